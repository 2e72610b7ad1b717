// The order of a tensor's dims in memory. It is a fact of the whole tensor: every rank's piece has the same order.
#pragma once

#include "layout/symbolic.h"

#include <ATen/core/Tensor.h>

namespace shardtensor {

// Dims from the outermost to the innermost. Empty: 0, 1, 2, ...
using DimOrder = c10::SmallVector<int8_t, 5>;

// The order of the strides of a whole tensor. (A piece's strides say nothing if it has one index of a dim.) Empty also if a
// stride is 0: a dense copy is then contiguous.
DimOrder order_of(c10::IntArrayRef strides);

// The order of the strides in any case, also if some are 0. Of dims with equal strides, those of size 1 come last.
DimOrder exact_order_of(c10::IntArrayRef sizes, c10::IntArrayRef strides);

// The order of the dims of `like`, which may have symbols. Undefined, or another number of dims than `ndim`: contiguous.
DimOrder order_like(const at::Tensor& like, size_t ndim);

// Strides without gaps.
Sizes dense_strides(c10::IntArrayRef sizes, const DimOrder& order);
SymSizes dense_strides(c10::SymIntArrayRef sizes, const DimOrder& order);

// The tensor, or a dense copy if its dims are not in this order, or in the order of the whole tensor's `strides`.
at::Tensor in_dim_order(at::Tensor local, const DimOrder& order);
at::Tensor in_dim_order(at::Tensor local, c10::IntArrayRef strides);

// Strides of a dense tensor of `sizes` with its dims in the order of `like`'s.
Sizes strides_like(c10::IntArrayRef sizes, const at::Tensor& like);
SymSizes strides_like(c10::SymIntArrayRef sizes, const at::Tensor& like);

} // namespace shardtensor
