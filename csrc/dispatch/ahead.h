// Losses and other sums of no dims are reduced as soon as they are made, so that one rank alone can read them later.
#pragma once

#include "dispatch/op.h"
#include "layout/layout.h"

#include <ATen/core/Tensor.h>

namespace shardtensor {

// Process-wide, and alike on all ranks.
bool reduces_ahead();
void set_reduces_ahead(bool on);

// Starts the reduction of an op's result of no dims, if it is a sum over ranks. All ranks of its mesh call it. Not in a
// backward: nobody reads the gradient of a number, and it may be one of many.
void reduce_ahead(const Op& op, const at::Tensor& result, const LayoutPtr& replicated);

} // namespace shardtensor
