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

rules::Symbols symbols_of(const Op& op) {
  return op.entry && !op.asks_sizes ? op.entry->options.symbols : rules::Symbols::None;
}

// Rules and caches need numbers. If the op keeps symbols, also returns its size argument unchanged.
std::optional<SymSizes> guard_arguments(const Op& op, Stack& stack, size_t base) {
  std::optional<SymSizes> sizes;
  for (size_t i = 0; i < op.kinds.size(); ++i) {
    auto& value = stack[base + i];
    if (op.kinds[i] != ArgKind::Other) {
      continue;
    }
    if (value.isSymInt()) {
      value = value.toSymInt().guard_int(__FILE__, __LINE__);
    } else if (value.isSymIntList() && symbols_of(op) == rules::Symbols::Arguments) {
      sizes = value.toSymIntVector();
      c10::List<int64_t> hints;
      for (const auto& n : *sizes) {
        hints.push_back(hint_of(n));
      }
      value = std::move(hints);
    } else if (value.isSymIntList()) {
      value = c10::List<int64_t>(c10::IntArrayRef(guarded(value.toSymIntVector())));
    } else if (value.isSymFloat()) {
      value = value.toSymFloat().guard_float(__FILE__, __LINE__);
    } else if (value.isSymBool()) {
      value = value.toSymBool().guard_bool(__FILE__, __LINE__);
    }
  }
  return sizes;
}

void guard_operands(const Op& op, Stack& stack, size_t base) {
  const auto refs = collect(op, stack, base);
  if (keeps_symbols(op, refs)) {
    return;
  }
  for (const auto& r : refs) {
    if (is_symbolic(*r.tensor)) {
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

bool keeps_symbols(const Op& op, const Refs& refs) {
  const auto tracked = [](const Ref& r) { return is_tracked(*r.tensor); };
  const auto symbols = symbols_of(op);
  return symbols >= rules::Symbols::Apart ||
         (symbols == rules::Symbols::Unrecorded && std::none_of(refs.begin(), refs.end(), tracked));
}

void settle_sizes(const Op& op, const Refs& refs, const Solution& solution) {
  if (symbols_of(op) < rules::Symbols::Operands && (op.asks_sizes || solution.reads_sizes() || solution.kernel)) {
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

void call_traced(const c10::OperatorHandle& handle_, Stack* stack) {
  const auto* op = boxed_op(handle_);
  if (!op) { // another kernel is registered at the key, by autograd/ or a user
    handle_.callBoxedForDispatchKey(kKey, *stack);
    return;
  }
  const auto base = stack->size() - op->kinds.size();
  guard_operands(*op, *stack, base);
  const auto sizes = guard_arguments(*op, *stack, base);
  enter_symbolic_plain(*op, *stack, base);
  if (is_special(*op)) {
    handle_specially(*op, stack);
  } else {
    handle(*op, stack, sizes ? &*sizes : nullptr);
  }
}

void key_of_symbols(const Refs& refs, Key& key) {
  key.push(Key::kSymbols);
  for (const auto& r : refs) {
    uint64_t symbols = 0;
    if (is_symbolic(*r.tensor)) {
      const auto sizes = r.tensor->sym_sizes();
      for (size_t d = 0; d < sizes.size(); ++d) {
        symbols |= static_cast<uint64_t>(sizes[d].is_symbolic()) << (d & 63);
      }
    }
    key.push(symbols);
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
    const Op& op,
    at::Tensor local,
    const Solution& solution,
    size_t nth,
    const Refs& refs,
    const Form* form,
    const ShardTensorImpl* base,
    bool moved,
    const SymSizes* given) {
  const auto* result = nth < solution.results.size() ? &solution.results[nth] : nullptr;
  const auto& layout = result ? result->layout : solution.replicated;
  auto sizes = local.sym_sizes().vec(), strides = local.sym_strides().vec();
  if (given) {
    sizes = *given;
  } else if (result && layout->is_sharded()) {
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
