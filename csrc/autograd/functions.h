// The differentiable doors of the type: into it, out of it, and from one layout to another.
#pragma once

#include "layout/layout.h"

#include <ATen/core/Tensor.h>

#include <optional>

namespace shardtensor {

// The gradient arrives in `grad_layout` and is handed back as a local tensor. Default: `layout`, with Replicate for Partial, and
// what is handed back is the derivative by the summand (an average's is one nth).
at::Tensor from_local(
    const at::Tensor& local, LayoutPtr layout, c10::IntArrayRef sizes, c10::IntArrayRef strides, LayoutPtr grad_layout = {});
at::Tensor from_local(
    const at::Tensor& local,
    LayoutPtr layout,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef strides,
    LayoutPtr grad_layout = {});

// The gradient, a plain local tensor, is taken to have `grad_layout` (default: the tensor's, with Replicate for Partial).
at::Tensor to_local(const at::Tensor& t, LayoutPtr grad_layout = {});

// All of a ShardTensor, as a plain tensor; a plain one as it is.
at::Tensor whole(const at::Tensor& t);

// Moves to another layout, casting to `forward_dtype` first; the gradient moves back in `backward_dtype`. `async`: both return
// while the data is on its way, and wait at its first use.
at::Tensor redistribute(
    const at::Tensor& t,
    LayoutPtr layout,
    std::optional<at::ScalarType> forward_dtype = std::nullopt,
    std::optional<at::ScalarType> backward_dtype = std::nullopt,
    bool async = false);

// A layout with every Partial replaced by Replicate.
LayoutPtr without_partial(const LayoutPtr& layout);

} // namespace shardtensor
