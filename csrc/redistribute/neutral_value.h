// The neutral value of a reduction: a summand with this value does not change the result. Also norms as sums.
#pragma once

#include "layout/placement.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <c10/core/ScalarType.h>

namespace shardtensor {

// Raises for Avg, which has none.
at::Scalar neutral_value(ReduceOp op, at::ScalarType type, double norm_order = 2.0);
// The neutral value for the summand of a rank that has no value. For sums of floats it is -0.0: adding 0.0 would lose the sign
// of -0.0.
at::Scalar neutral_summand(ReduceOp op, at::ScalarType type, double norm_order = 2.0);

// norm_power(): the values whose sum over the ranks is needed. norm_root(): the norm, given the sum.
at::Tensor norm_power(const at::Tensor& t, double order);
at::Tensor norm_root(const at::Tensor& sum, double order, at::ScalarType type);

} // namespace shardtensor
