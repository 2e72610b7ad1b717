// What backends can reduce, made of what they cannot: complex numbers as pairs, bools and small integers widened, NaN kept in max
// and min. Uses layout/ (ReduceOp) and ATen's ops alone, so it can be traced.
#pragma once

#include "layout/placement.h"

#include <ATen/core/Tensor.h>

namespace shardtensor::comm {

// A tensor the backend can reduce that shares or stands for `t`.
at::Tensor reducible(const at::Tensor& t, ReduceOp op);
// `reduced`, of n ranks' reducible(t), as a tensor like `t`; it may be written. Avg is divided here.
at::Tensor from_reducible(at::Tensor reduced, const at::Tensor& t, ReduceOp op, int64_t n);

} // namespace shardtensor::comm
