// What a result is as a whole, from the operands and this rank's piece.
// Uses call.h. Used by autograd/.
#pragma once

#include "dispatch/call.h"

namespace shardtensor {

Sizes global_sizes(const rules::Solution::Result& result, const Refs& refs, const at::Tensor& local);

// Depends only on what all ranks know: a piece may be a single row, whose strides say nothing.
Sizes strides_of(const rules::Solution::Result& result, const Refs& refs, c10::IntArrayRef sizes);

} // namespace shardtensor
