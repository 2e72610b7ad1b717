#include "dispatch/traced.h"

#include "dispatch/alternative_paths.h"
#include "dispatch/call.h"
#include "dispatch/plain_tensors.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <unordered_map>

namespace shardtensor {

using c10::IValue;
using torch::jit::Stack;

namespace {

// Numbers in place of the arguments' symbols, unless the rule reads them as symbols.
void guard_arguments(const Op& op, Stack& stack, size_t base) {
  if (op.entry && op.entry->options.symbols) {
    return;
  }
  for (size_t i = 0; i < op.kinds.size(); ++i) {
    auto& value = stack[base + i];
    if (op.kinds[i] != ArgKind::Other) {
      continue;
    }
    if (value.isSymInt()) {
      value = value.toSymInt().guard_int(__FILE__, __LINE__);
    } else if (value.isSymIntList()) {
      value = c10::List<int64_t>(c10::IntArrayRef(guarded(value.toSymIntVector())));
    } else if (value.isSymFloat()) {
      value = value.toSymFloat().guard_float(__FILE__, __LINE__);
    } else if (value.isSymBool()) {
      value = value.toSymBool().guard_bool(__FILE__, __LINE__);
    }
  }
}

// Whether the op has a kernel for fake tensors; the fallback of torch that only raises is none.
bool has_meta_kernel(const c10::OperatorHandle& op) {
  using Key = c10::DispatchKey;
  constexpr Key kernels[] = {
      Key::Meta, Key::CompositeExplicitAutograd, Key::CompositeExplicitAutogradNonFunctional, Key::CompositeImplicitAutograd};
  return std::any_of(std::begin(kernels), std::end(kernels), [&](auto key) { return op.hasKernelForDispatchKey(key); });
}

// An out= argument without elements gets the result's sizes, for which torch is asked with numbers; not if the op reads it too.
bool is_resized(const Op& op, const Ref& r, const Refs& refs) {
  const auto numel = r.tensor->sym_numel().maybe_as_int();
  return is_output(op, r) && numel && *numel == 0 &&
         std::none_of(refs.begin(), refs.end(), [&](const Ref& o) { return o.tensor->is_same(*r.tensor) && !is_output(op, o); });
}

// Turns sizes that cannot be symbols into numbers. All sizes must be numbers for ops that have neither a rule nor parts with
// rules, ops without a meta kernel, out= forms that resize, and lists as flat memory.
void guard_operands(const Op& op, Stack& stack, size_t base) {
  const bool pieces = op.entry && (op.entry->runs_as_other_ops() || (op.entry->rule && !op.entry->options.dense));
  const auto refs = collect(op, stack, base);
  const bool may_keep = pieces && has_meta_kernel(op.handle) &&
                        std::none_of(refs.begin(), refs.end(), [&](const Ref& r) { return is_resized(op, r, refs); });
  for (const auto& r : refs) {
    if (!is_symbolic(*r.tensor)) {
      continue;
    }
    if (may_keep) { // except for uneven cuts; now, since in the backward it may be too late
      if (r.impl) {
        sym_local_sizes(r.impl->layout(), r.tensor->sym_sizes());
      }
    } else {
      guarded(r.tensor->sym_sizes());
      guarded(r.tensor->sym_strides());
    }
  }
}

// Replaces plain tensors of symbolic sizes by replicated ShardTensors, since only ShardTensors can give hints of their sizes.
void promote_symbolic_plain(const Op& op, Stack& stack, size_t base) {
  const auto refs = collect(op, stack, base);
  const auto is_such = [&](const Ref& r) { return !r.impl && !(op.mutated >> r.arg & 1) && is_symbolic(*r.tensor); };
  if (std::none_of(refs.begin(), refs.end(), is_such)) {
    return;
  }
  check_plain(op, refs);
  const auto layout = Layout::replicated(mesh_of(op, refs));
  replace_tensors(stack, base, refs, is_such, [&](const Ref& r) {
    return wrap_symbolic(*r.tensor, layout, r.tensor->sym_sizes(), r.tensor->sym_strides());
  });
}

const Op* boxed_op(const c10::OperatorHandle& op) {
  static const auto* known = [] {
    auto* all = new std::unordered_map<std::string, const Op*>();
    for (const auto& o : installed_ops()) {
      if (!(o.entry && o.entry->is_formula())) {
        all->emplace(o.name, &o);
      }
    }
    return all;
  }();
  const auto found = known->find(text_of(op.operator_name()));
  return found == known->end() ? nullptr : found->second;
}

} // namespace

void call_traced(const c10::OperatorHandle& handle_, Stack* stack) {
  const auto* op = boxed_op(handle_);
  if (!op) { // another kernel is registered at the key: the op's formula, or a user's
    handle_.callBoxedForDispatchKey(kKey, *stack);
    return;
  }
  const auto base = stack->size() - op->kinds.size();
  guard_operands(*op, *stack, base);
  guard_arguments(*op, *stack, base);
  promote_symbolic_plain(*op, *stack, base);
  if (has_alternative_path(*op)) {
    take_alternative_path(*op, stack);
  } else {
    handle(*op, stack);
  }
}

} // namespace shardtensor
