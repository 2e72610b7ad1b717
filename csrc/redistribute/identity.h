// The neutral value of a reduction: a summand that holds it changes nothing. And norms as sums.
#pragma once

#include "layout/placement.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <c10/core/ScalarType.h>

namespace shardtensor {

// Avg has none.
at::Scalar identity(ReduceOp op, at::ScalarType type, double norm_order = 2.0);
// The same for a summand where a rank has no value: beside 0.0, a sum would lose the sign of -0.0, but beside -0.0 it keeps it.
at::Scalar no_summand(ReduceOp op, at::ScalarType type, double norm_order = 2.0);

// What adds up over the ranks, and the norm of the sum.
at::Tensor norm_power(const at::Tensor& t, double order);
at::Tensor norm_root(const at::Tensor& sum, double order, at::ScalarType type);

} // namespace shardtensor
