// The differentiable conversions: from local tensors to ShardTensors, back, and from one layout to another.
#pragma once

#include "layout/layout.h"
#include "redistribute/watch.h"
#include "tensor/reduced_partials.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace shardtensor {

// The gradient is moved to `grad_layout` and returned as a local tensor. Default: `layout`, with Replicate for Partial; then
// the derivative with respect to this rank's summand is returned (one nth for an average).
at::Tensor from_local(
    const at::Tensor& local, LayoutPtr layout, c10::IntArrayRef sizes, c10::IntArrayRef strides, LayoutPtr grad_layout = {});
at::Tensor from_local(
    const at::Tensor& local,
    LayoutPtr layout,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef strides,
    LayoutPtr grad_layout = {});
// The same tensor, which has no elements. Where torch's formula makes its gradient as a plain tensor, it gets a ShardTensor.
at::Tensor with_sharded_gradient(const at::Tensor& t);
// Every rank's piece has the size of this one.
at::Tensor from_local_of_equal_pieces(const at::Tensor& local, LayoutPtr layout, LayoutPtr grad_layout = {});

// The gradient, a plain local tensor, is taken to have `grad_layout` (default: the tensor's, with Replicate for Partial).
at::Tensor to_local(const at::Tensor& t, LayoutPtr grad_layout = {});

// The whole of a ShardTensor, as a plain tensor. Returns a plain tensor unchanged.
at::Tensor whole(const at::Tensor& t);

// Moves to another layout, casting to `forward_dtype` first; the gradient moves back in `backward_dtype`. `async`: both return
// before the data has arrived; its first use waits.
at::Tensor redistribute(
    const at::Tensor& t,
    LayoutPtr layout,
    std::optional<at::ScalarType> forward_dtype = std::nullopt,
    std::optional<at::ScalarType> backward_dtype = std::nullopt,
    bool async = false);

// The same if the user did not ask for it: observers hear of it.
at::Tensor redistribute_for(const MoveCause& cause, const at::Tensor& t, LayoutPtr layout);

// Several at once, in grouped collectives (redistribute/redistribute.h).
std::vector<at::Tensor> redistribute_all(
    const std::vector<at::Tensor>& tensors,
    const std::vector<LayoutPtr>& layouts,
    std::optional<at::ScalarType> forward_dtype = std::nullopt,
    std::optional<at::ScalarType> backward_dtype = std::nullopt,
    bool async = false);

} // namespace shardtensor
