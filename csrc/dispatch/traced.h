// Calls that arrive through __torch_dispatch__: their tensors stand for tensors of a graph, or are fake, and sizes may be
// symbols. They run through the boxed handler; here are its functions for symbolic sizes.
#pragma once

#include "dispatch/call.h"

namespace shardtensor {

// Runs the op's kernel at kKey, but never a typed kernel: those take no symbols.
void call_traced(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Whether any of the tensors has symbolic sizes.
inline bool any_symbolic(const Refs& refs) {
  return std::any_of(refs.begin(), refs.end(), [](const Ref& r) { return is_symbolic(*r.tensor); });
}

inline bool any_traced(const Refs& refs) {
  return std::any_of(refs.begin(), refs.end(), [](const Ref& r) { return r.impl && r.impl->traced(); });
}

// Whether a size of an operand or an integer among the arguments is a symbol.
bool has_symbols(const Op& op, const torch::jit::Stack& stack, size_t base, const Refs& refs);

// Turns the operands' sizes into numbers if the solution's kernel needs numbers.
void settle_sizes(const Op& op, const Refs& refs, const rules::Solution& solution);

} // namespace shardtensor
