// Calls that come by __torch_dispatch__: their tensors stand for those of a graph, or are fake, and sizes may be symbols. They
// take the boxed handler's way; what reads symbols has its twin here.
#pragma once

#include "dispatch/call.h"

#include <c10/util/FunctionRef.h>

namespace shardtensor {

// What kKey has for the op, but never a typed kernel: those take no symbols.
void call_traced(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Whether any of the tensors has symbolic sizes.
inline bool any_symbolic(const Refs& refs) {
  return std::any_of(refs.begin(), refs.end(), [](const Ref& r) { return is_symbolic(*r.tensor); });
}

// Whether the op leaves symbols as they are, and also what autograd will call for it if it records it. Any other op's operands
// are made numbers when it is first traced: made numbers later, in a backward, they would be missing among the graph's outputs.
bool keeps_symbols(const Op& op, const Refs& refs);

// Makes the operands' sizes numbers where the solution was found by them.
void settle_sizes(const Op& op, const Refs& refs, const rules::Solution& solution);

// What `move` makes of a graph's tensor in another layout. Where the graph has moved it there before, and not written it since, a
// copy of that: ranks talk once. Not in a backward, which would make the forward keep what it moved.
at::Tensor moved_once(const ShardTensorImpl& t, const LayoutPtr& to, c10::function_ref<at::Tensor()> move);

// This rank's sizes where those of the whole may be symbols.
SymSizes sym_local_sizes(const Layout& layout, const SymSizes& sizes);

// Which of the tensors have symbols where: part of the key, since choices weigh symbols otherwise than numbers.
void key_of_symbols(const Refs& refs, Key& key);

// check_alike() for two dims, one of them a symbol; the graph gets a guard.
void check_alike_symbols(
    const Op& op, const at::Tensor& x, rules::Solution::Indexed a, const at::Tensor& y, rules::Solution::Indexed b);

// wrap_result() where sizes are symbols.
at::Tensor wrap_symbolic_result(
    const Op& op,
    at::Tensor local,
    const rules::Solution& solution,
    size_t nth,
    const Refs& refs,
    const Form* form,
    const ShardTensorImpl* base,
    bool moved,
    const SymSizes* given);

} // namespace shardtensor
