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

// Tells the solution the orders of its results' dims, and which facts of the call they depend on.
void ask_orders(const Op& op, const torch::jit::Stack& stack, size_t base, const Refs& refs, rules::Solution& solution);

} // namespace shardtensor
