// The gradient of a leaf, as the leaf keeps it.
#pragma once

#include <ATen/core/Tensor.h>

namespace shardtensor {

// The gradient as the leaf would keep it in .grad, with the leaf's cuts, unless it is already cut along all mesh dims that cut
// the leaf: then it keeps its own cuts.
at::Tensor with_cuts_of(const at::Tensor& leaf, const at::Tensor& grad);

} // namespace shardtensor
