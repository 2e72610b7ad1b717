// The neutral value of a reduction: a summand that holds it changes nothing.
#pragma once

#include "layout/placement.h"

#include <c10/core/Scalar.h>
#include <c10/core/ScalarType.h>

namespace shardtensor {

// Avg has none.
at::Scalar identity(ReduceOp op, at::ScalarType type, double norm_order = 2.0);

} // namespace shardtensor
