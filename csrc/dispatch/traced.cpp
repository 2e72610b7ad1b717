#include "dispatch/traced.h"

#include "comm/values.h"
#include "dispatch/handler.h"
#include "dispatch/plain.h"
#include "dispatch/special.h"

#include <ATen/ATen.h>
#include <ATen/TensorUtils.h>
#include <torch/csrc/autograd/function.h>

#include <unordered_map>

namespace shardtensor {

using c10::IValue;
using rules::Solution;
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

// Makes numbers of sizes that cannot be symbols. Ops without a rule, and calls of rooms that know no symbols, need only numbers.
void guard_operands(const Op& op, Stack& stack, size_t base) {
  const bool may_keep = op.entry && op.entry->rule && !op.asks_sizes && !op.is(rules::Way::Each);
  for (const auto& r : collect(op, stack, base)) {
    if (!is_symbolic(*r.tensor)) {
      continue;
    }
    if (may_keep) { // but for what is not cut evenly; at once, since the backward may be too late
      if (r.impl) {
        sym_local_sizes(r.impl->layout(), r.tensor->sym_sizes().vec());
      }
    } else {
      guarded(r.tensor->sym_sizes());
      guarded(r.tensor->sym_strides());
    }
  }
}

// Replaces plain tensors of symbolic sizes by replicated ShardTensors, since only ShardTensors can give hints of their sizes.
void enter_symbolic_plain(const Op& op, Stack& stack, size_t base) {
  auto refs = collect(op, stack, base);
  const auto is_such = [&](const Ref& r) { return !r.impl && !(op.mutated >> r.arg & 1) && is_symbolic(*r.tensor); };
  if (std::none_of(refs.begin(), refs.end(), is_such)) {
    return;
  }
  check_plain(op, refs);
  const auto layout = Layout::replicated(mesh_of(op, refs));
  const auto entered = [&](const at::Tensor& t) { return wrap_symbolic(t, layout, t.sym_sizes(), t.sym_strides()); };
  for (const auto& r : refs) {
    if (!is_such(r)) {
      continue;
    }
    auto& slot = stack[base + r.arg];
    if (r.index < 0) {
      slot = entered(slot.toTensor());
    } else {
      const auto given = slot;
      change_list(slot, given, [&](auto& list) {
        list.set(static_cast<size_t>(r.index), entered(given.toListRef()[r.index].toTensor()));
      });
    }
  }
}

const Op* boxed_op(const c10::OperatorHandle& op) {
  static const auto* known = [] {
    auto* all = new std::unordered_map<std::string, const Op*>();
    for (const auto& o : installed_ops()) {
      all->emplace(o.name, &o);
    }
    return all;
  }();
  const auto found = known->find(c10::toString(op.operator_name()));
  return found == known->end() ? nullptr : found->second;
}

} // namespace

bool has_symbols(const Op& op, const Stack& stack, size_t base, const Refs& refs) {
  const auto first = stack.begin() + static_cast<std::ptrdiff_t>(base);
  return any_symbolic(refs) || std::any_of(first, first + static_cast<std::ptrdiff_t>(op.kinds.size()), [](const IValue& v) {
           return v.isSymInt() || v.isSymIntList() || v.isSymFloat() || v.isSymBool();
         });
}

void settle_sizes(const Op& op, const Refs& refs, const Solution& solution) {
  // Even if the kernel runs only on other ranks: guards are functions of global facts.
  if (solution.kernel && !op.entry->options.symbols) {
    for (const auto& r : refs) {
      guarded(r.tensor->sym_sizes());
    }
  }
}

at::Tensor moved_once(const ShardTensorImpl& t, const LayoutPtr& to, c10::function_ref<at::Tensor()> move) {
  if (!t.traced() || t.layout().is_replicated() || !is_recording() || torch::autograd::get_current_node()) {
    return move();
  }
  auto out = t.moved_to(*to);
  if (!out.defined()) {
    out = move();
  }
  // Keep a copy: the caller may write to `out`. If the copy is never used, the graph drops it.
  t.keep_moved(to, out.clone());
  return out;
}

SymSizes sym_local_sizes(const Layout& layout, const SymSizes& sizes) {
  SymSizes out;
  for (size_t d = 0; d < sizes.size(); ++d) {
    out.push_back(sym_extent_before(layout, layout.ndim(), static_cast<int64_t>(d), sizes[d]));
  }
  return out;
}

SymSizes sym_local_size_argument(const Solution& solution, const rules::SizeArg& a, const Refs& refs) {
  const auto& result = solution.results[a.result];
  SymSizes sizes;
  for (const auto& s : result.sizes) {
    sizes.push_back(s.operand >= 0 ? refs[s.operand].tensor->sym_size(s.dim) : s.value);
  }
  return sym_local_sizes(*result.layout, sizes);
}

void call_traced(const c10::OperatorHandle& handle_, Stack* stack) {
  const auto* op = boxed_op(handle_);
  if (!op) { // another kernel is registered at the key, by autograd/ or a user
    handle_.callBoxedForDispatchKey(kKey, *stack);
    return;
  }
  const auto base = stack->size() - op->kinds.size();
  guard_operands(*op, *stack, base);
  guard_arguments(*op, *stack, base);
  enter_symbolic_plain(*op, *stack, base);
  if (is_special(*op)) {
    handle_specially(*op, stack);
  } else {
    handle(*op, stack);
  }
}

void check_alike_symbols(const Op& op, const at::Tensor& x, Solution::Indexed a, const at::Tensor& y, Solution::Indexed b) {
  TORCH_SYM_CHECK(
      (x.sym_size(a.dim) * b.inner).sym_eq(y.sym_size(b.dim) * a.inner), op.name, ": the size of dim ", b.dim,
      " of one argument (", y.sym_size(b.dim), ") must match the size of dim ", a.dim, " of another (", x.sym_size(a.dim), ")");
}

namespace {

SymSizes sym_global_sizes(const Solution::Result& result, const Refs& refs, const at::Tensor& local) {
  auto sizes = local.sym_sizes().vec();
  for (size_t d = 0; d < result.sizes.size(); ++d) {
    const auto& from = result.sizes[d];
    if (from.operand >= 0) {
      sizes[d] = refs[from.operand].tensor->sym_size(from.dim);
    } else if (from.operand != -1) {
      sizes[d] = from.value;
    }
  }
  return sizes;
}

// form_of() over symbols.
std::pair<SymSizes, c10::SymInt> form_of(const rules::Geometry& geometry, const at::Tensor& base, const SymSizes& sizes) {
  auto offset = base.sym_storage_offset();
  const auto have = base.sym_strides();
  SymSizes strides;
  if (geometry.reshaped) {
    const auto found = at::detail::computeStride(base.sym_sizes(), have, c10::SymDimVector(sizes.begin(), sizes.end()));
    return {found ? SymSizes(found->begin(), found->end()) : sym_strides_like(sizes, at::Tensor()), offset};
  }
  for (const auto& term : geometry.strides) {
    strides.push_back(term.dim < 0 ? c10::SymInt(0) : have[term.dim] * term.times);
  }
  for (const auto& term : geometry.offset) {
    offset = offset + have[term.dim] * term.times;
  }
  return {strides, offset};
}

} // namespace

at::Tensor wrap_symbolic_result(
    at::Tensor local,
    const Solution& solution,
    size_t nth,
    const Refs& refs,
    const Form* form,
    const ShardTensorImpl* base,
    bool moved) {
  const auto* result = nth < solution.results.size() ? &solution.results[nth] : nullptr;
  const auto& layout = result ? result->layout : solution.replicated;
  auto sizes = local.sym_sizes().vec(), strides = local.sym_strides().vec();
  if (result && layout->is_sharded()) {
    sizes = sym_global_sizes(*result, refs, local);
  }
  if (base && !moved) {
    if (form) {
      return wrap_symbolic(std::move(local), layout, sizes, symbols(form->strides), base, form->offset);
    }
    const auto [found, offset] = form_of(*result->geometry, *refs[0].tensor, sizes);
    return wrap_symbolic(std::move(local), layout, sizes, found, base, offset);
  }
  if (result && !result->strides.empty()) {
    strides = symbols(result->strides);
  } else if (result && solution.shards) {
    strides = result->order ? sym_dense_strides(sizes, *result->order)
                            : sym_strides_like(sizes, result->like >= 0 ? *refs[result->like].tensor : at::Tensor());
  }
  return wrap_symbolic(std::move(local), layout, sizes, strides, base, 0, moved);
}

} // namespace shardtensor
