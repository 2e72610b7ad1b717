// The gradient of a leaf, as the leaf keeps it.
#pragma once

#include <ATen/core/Tensor.h>

namespace shardtensor {

// The gradient as the leaf would keep it in .grad, in the leaf's cuts, if it is not cut along all mesh dims that cut the leaf. A
// gradient that is cut otherwise stays so.
at::Tensor with_cuts_of(const at::Tensor& leaf, const at::Tensor& grad);

} // namespace shardtensor
