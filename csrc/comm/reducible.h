// Converts tensors into ones that backends can reduce: complex numbers as pairs, bools and small integers widened, NaN kept in
// max and min. Uses layout/ (ReduceOp) and only ATen's ops, so it can be traced.
#pragma once

#include "layout/placement.h"

#include <ATen/core/Tensor.h>

namespace shardtensor::comm {

// Whether the ranks can reduce values of the dtype by `op`.
bool can_reduce(at::ScalarType dtype, ReduceOp op);
// The op that the backend gets: the sum for means and norms, and min, max or sum for bitwise ops on bools.
ReduceOp backend_op(ReduceOp op, at::ScalarType dtype);
// A tensor for the backend to reduce: it shares `t`'s memory or represents `t`.
at::Tensor reducible(const at::Tensor& t, ReduceOp op);
// Converts `reduced`, the reduction of n ranks' reducible(t), back to a tensor like `t`. May write into `reduced`. Divides for
// Avg.
at::Tensor from_reducible(at::Tensor reduced, const at::Tensor& t, ReduceOp op, int64_t n);

} // namespace shardtensor::comm
