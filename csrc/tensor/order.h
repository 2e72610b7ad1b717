// In which order a tensor's dims lie in memory. It is a fact of the whole tensor: every rank's piece is laid out in the same
// order.
#pragma once

#include "layout/layout.h"

#include <ATen/core/Tensor.h>

namespace shardtensor {

// Dims from the outermost to the innermost. Empty: in the order in which they are counted.
using Order = c10::SmallVector<int8_t, 5>;

// By the strides alone, since a piece of size 1 tells nothing. Empty too where a stride is 0: a dense copy starts anew.
Order order_of(c10::IntArrayRef strides);

// Strides without gaps.
Sizes dense_strides(c10::IntArrayRef sizes, const Order& order);

// The tensor, or a dense copy where its dims do not lie in the order that the whole tensor's `strides` say.
at::Tensor laid(at::Tensor local, c10::IntArrayRef strides);

// Strides of a dense tensor of `sizes` whose dims lie in memory in the order in which `like`'s do.
Sizes strides_like(c10::IntArrayRef sizes, const at::Tensor& like);

} // namespace shardtensor
