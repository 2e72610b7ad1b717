// What torch itself is asked about a call, on whole tensors without values or on a few elements: its kernels and its meta
// kernels, some of which are Python. So none of it runs inside solve().
#pragma once

#include "dispatch/refs.h"
#include "rules/solution.h"

namespace shardtensor {

// The call on meta tensors of the global sizes; the out= arguments are empty, so that the op sizes them. hints: see hint_of().
torch::jit::Stack on_meta(const Op& op, const torch::jit::Stack& stack, size_t base, const Refs& refs, bool hints = false);

// What the op returns for whole tensors, as tensors without values: on a rank outside of the mesh.
torch::jit::Stack results_aside(const Op& op, const torch::jit::Stack& stack, size_t base, const Refs& refs, const Mesh& mesh);

// Raises if the op's kernel does not take a rare dtype.
void ask_kernel(const Op& op, const torch::jit::Stack& stack, size_t base, const rules::Call& call, const Refs& refs);

// The op's results as torch lays them out: those of a few elements, if the op runs on them as on many, or tensors without values.
// Nothing if torch cannot tell.
std::optional<torch::jit::Stack> laid_out(const Op& op, const torch::jit::Stack& stack, size_t base, const Refs& refs);

// The order of the dims of such a result. A dim of size 1 has its own stride too, where torch has placed it (the channels of
// channels_last).
Order order_with_ones(c10::IntArrayRef sizes, c10::IntArrayRef strides);

// Whether dims have one stride, as those of windows that overlap do: torch then orders them by their sizes.
bool is_ordered_by_sizes(const at::Tensor& t);

// Tells the solution the orders of its results' dims, and which facts of the call they depend on.
void ask_orders(const Op& op, const torch::jit::Stack& stack, size_t base, const Refs& refs, rules::Solution& solution);

} // namespace shardtensor
