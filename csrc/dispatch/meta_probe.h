// Asks torch about a call: runs its meta kernels on whole tensors without values, or its kernels on a few elements. Some of
// these are Python, so solve() must not call anything here.
#pragma once

#include "dispatch/refs.h"
#include "rules/solution.h"

namespace shardtensor {

// The call on meta tensors of the global sizes; the out= arguments are empty, so that the op sizes them. hints: see hint_of().
torch::jit::Stack on_meta(const Op& op, const torch::jit::Stack& stack, size_t base, const Refs& refs, bool hints = false);

// The op's results for whole tensors, as tensors without values: for a rank outside of the mesh.
torch::jit::Stack results_outside_mesh(
    const Op& op, const torch::jit::Stack& stack, size_t base, const Refs& refs, const Mesh& mesh);

// For rare dtypes: raises if the op's kernel does not take the dtype.
void probe_dtype(const Op& op, const torch::jit::Stack& stack, size_t base, const rules::Call& call, const Refs& refs);

// Results with the strides that torch would give them: from the op on a few elements, if it lays out few like many, otherwise
// from its meta kernel. Nothing if both fail.
std::optional<torch::jit::Stack> probe_results(const Op& op, const torch::jit::Stack& stack, size_t base, const Refs& refs);

// The order of the dims of such a result. Dims of size 1 keep the place that torch gave them (the channels of channels_last).
DimOrder order_with_ones(c10::IntArrayRef sizes, c10::IntArrayRef strides);

// Whether dims have one stride, as those of windows that overlap do: torch then orders them by their sizes.
bool is_ordered_by_sizes(const at::Tensor& t);

// Stores the orders of the results' dims in the solution, and which facts of the call they depend on.
void probe_orders(const Op& op, const torch::jit::Stack& stack, size_t base, const Refs& refs, rules::Solution& solution);

} // namespace shardtensor
