#include "dispatch/meta_probe.h"

#include "comm/tensor_kind.h"
#include "dispatch/errors.h"
#include "dispatch/excluded_keys.h"
#include "tensor/symbolic.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <cstring>
#include <numeric>

namespace shardtensor {

using rules::Solution;
using torch::jit::Stack;

namespace {

at::Tensor meta_of(const at::Tensor& t, bool hints) {
  const auto options = t.options().device(at::kMeta).requires_grad(false);
  auto out = hints ? at::empty_strided(hints_of(t.sym_sizes()), hints_of(t.sym_strides()), options)
                   : at::empty_strided(t.sizes(), t.strides(), options);
  out._set_conj(t.is_conj());
  out._set_neg(t.is_neg());
  return out;
}

} // namespace

Stack on_meta(const Op& op, const Stack& stack, size_t base, const Refs& refs, bool hints) {
  Stack call(stack.begin() + static_cast<int64_t>(base), stack.end());
  const auto all = [](const Ref&) { return true; };
  replace_tensors(call, 0, refs, all, [&](const Ref& r) {
    const bool sized_by_op = is_output(op, r) && r.index < 0;
    return sized_by_op ? at::empty({0}, r.tensor->options().device(at::kMeta).requires_grad(false)) : meta_of(*r.tensor, hints);
  });
  for (auto& value : call) {
    if (value.isDevice()) { // of the result
      value = c10::Device(at::kMeta);
    }
  }
  return call;
}

Stack results_outside_mesh(const Op& op, const Stack& stack, size_t base, const Refs& refs, const Mesh& mesh) {
  c10::impl::ExcludeDispatchKeyGuard below(kBelow);
  auto call = on_meta(op, stack, base, refs);
  try {
    op.handle.callBoxed(&call);
    return call;
  } catch (const std::exception&) { // no meta kernel, or it needs values; a wrong call raises below
  }
  // Runs the op on zeros in place of ShardTensors, which have no values on this rank; plain tensors do (a mask of an index, for
  // example). If torch says that the op's result sizes depend on values, this raises, except between the ops of a backward
  // formula: there any size will do, because the user does not see it.
  const auto of_mesh = [](const Ref& r) { return r.impl != nullptr; };
  const bool any_sizes = op.handle.hasTag(at::Tag::dynamic_output_shape) && !torch::autograd::get_current_node();
  call.assign(stack.begin() + static_cast<int64_t>(base), stack.end());
  replace_tensors(call, 0, refs, of_mesh, [&](const Ref& r) {
    return any_sizes ? meta_of(*r.tensor, false)
                     : at::empty_strided(r.tensor->sizes(), r.tensor->strides(), r.impl->local().options().requires_grad(false))
                           .zero_();
  });
  try {
    op.handle.callBoxed(&call);
  } catch (const std::exception&) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !any_sizes, op.name, ": rank ", mesh.rank(), " is not in ", mesh.str(),
        ", so it does not have the values that the sizes of the result depend on; call this only on that mesh's ranks");
    throw;
  }
  return call;
}

namespace {

// Whether few of torch's kernels take the tensor's dtype.
bool is_rare(const Ref& r) {
  const auto dtype = r.tensor->scalar_type();
  return c10::isFloat8Type(dtype) || c10::isBarebonesUnsignedType(dtype) || dtype == at::kComplexHalf;
}

} // namespace

// Only the op's kernel knows whether it takes such a dtype, and on an empty piece it would not raise. So all ranks run it on a
// few elements.
void probe_dtype(const Op& op, const Stack& stack, size_t base, const rules::Call& call, const Refs& refs) {
  const auto listed = [](const Ref& r) { return r.index >= 0; };
  if (op.is_random || std::none_of(refs.begin(), refs.end(), is_rare) || std::any_of(refs.begin(), refs.end(), listed)) {
    return;
  }
  const auto first = stack.begin() + static_cast<std::ptrdiff_t>(base);
  Stack args(first, first + static_cast<std::ptrdiff_t>(op.kinds.size()));
  for (const auto& r : refs) {
    auto sizes = r.tensor->sizes().vec();
    for (auto& n : sizes) {
      n = std::min<int64_t>(n, 3); // with one element some kernels do not check the dtype; points have up to 3 coordinates
    }
    args[r.arg] = at::zeros(sizes, r.tensor->options());
  }
  c10::impl::ExcludeDispatchKeyGuard aside(kAside);
  try {
    op.handle.callBoxed(args);
  } catch (const c10::Error& error) {
    // Other errors may come from the few sizes.
    for (const char* of_dtypes : {"not implemented for '", "can't be cast", "Promotion for"}) {
      const auto* why = error.what_without_backtrace();
      TORCH_CHECK_NOT_IMPLEMENTED(!std::strstr(why, of_dtypes), op.name, ": ", why, " (", errors::layouts_of(call), ")");
    }
  }
}

namespace {

// The arguments that may change the order of a result's dims. Tensors (every key holds their orders), floating-point numbers
// and generators do not.
uint64_t ordering_arguments(const Op& op) {
  uint64_t out = 0;
  for (size_t i = 0; i < op.kinds.size(); ++i) {
    auto type = op.schema().arguments()[i].real_type();
    if (const auto optional = type->cast<c10::OptionalType>()) {
      type = optional->getElementType();
    }
    const auto kind = type->kind();
    const bool orders =
        kind != c10::TypeKind::NumberType && kind != c10::TypeKind::FloatType && kind != c10::TypeKind::GeneratorType;
    out |= op.kinds[i] == ArgKind::Other && orders ? rules::Reads::arg(i) : 0;
  }
  return out;
}

// Whether the op lays out a result of few elements like one of many, while torch's meta kernel in Python may have another order:
// elementwise ops, and transforms (which have Options::calls).
bool runs_on_few(const Op& op) {
  const auto& options = op.entry->options;
  return (options.broadcasts || (options.calls && options.asks_order)) && !op.mutated && !op.is_random;
}

// Whether the pieces are plain tensors, or stand for such in a graph. A Python subclass may have other kernels.
bool are_plain(const Refs& refs) {
  return std::all_of(refs.begin(), refs.end(), [](const Ref& r) {
    const auto& t = r.impl ? r.impl->local() : *r.tensor;
    return !t.is_meta() && (!t.key_set().has_any(kStandIns) || is_traced(t));
  });
}

// Strides of a tensor with few indices in each dim for which torch chooses the same order: any two dims compare alike, and
// zeros and gaps are kept.
Sizes strides_of_few(const at::Tensor& t, c10::IntArrayRef held) {
  if (t.is_contiguous()) {
    return dense_strides(held, {});
  }
  const auto order = exact_order_of(t.sizes(), t.strides());
  if (t.is_non_overlapping_and_dense()) {
    return dense_strides(held, order);
  }
  Sizes out(held.size());
  int64_t last = 0, next = 1;
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    const auto stride = t.strides()[*d];
    next *= last && stride != last ? 2 : 1;
    last = stride;
    out[*d] = stride ? next : 0;
  }
  return out;
}

// The call on small tensors of ones: at most two elements along a dim, or more if torch compares sizes. Sizes among the
// arguments shrink like the tensors.
Stack on_few(const Op& op, const Stack& stack, size_t base, const Refs& refs, bool hints) {
  constexpr int64_t kFew = 2;
  Stack call(stack.begin() + static_cast<int64_t>(base), stack.end());
  std::vector<at::Tensor> forms;
  std::vector<int64_t> lengths; // larger than 1, each once
  bool by_sizes = false;
  for (const auto& r : refs) {
    const auto& form = forms.emplace_back(meta_of(*r.tensor, hints));
    std::copy_if(form.sizes().begin(), form.sizes().end(), std::back_inserter(lengths), [](int64_t n) { return n > 1; });
    by_sizes = by_sizes || is_ordered_by_sizes(form);
  }
  std::sort(lengths.begin(), lengths.end());
  lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
  const auto shrunk = [&](int64_t n) {
    return n < kFew || !by_sizes ? std::min(n, kFew)
                                 : kFew + (std::lower_bound(lengths.begin(), lengths.end(), n) - lengths.begin());
  };
  size_t nth = 0;
  const auto all = [](const Ref&) { return true; };
  replace_tensors(call, 0, refs, all, [&](const Ref& r) {
    const auto& form = forms[nth++];
    Sizes sizes;
    for (const auto n : form.sizes()) {
      sizes.push_back(shrunk(n));
    }
    const auto options = (r.impl ? r.impl->local() : *r.tensor).options().requires_grad(false);
    return at::empty_strided(sizes, strides_of_few(form, sizes), options).fill_(1);
  });
  for (size_t i = 0; i < op.kinds.size(); ++i) {
    if (op.schema().arguments()[i].real_type()->kind() == c10::TypeKind::SymIntType) {
      call[i] = std::min(call[i].toSymInt().guard_int(__FILE__, __LINE__), kFew);
    }
  }
  return call;
}

} // namespace

DimOrder order_with_ones(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  if (Sizes(strides.begin(), strides.end()) == dense_strides(sizes, {}) ||
      std::find(strides.begin(), strides.end(), 0) != strides.end()) {
    return order_of(strides);
  }
  return exact_order_of(sizes, strides);
}

bool is_ordered_by_sizes(const at::Tensor& t) {
  const auto sizes = t.sizes(), strides = t.strides();
  for (size_t a = 0; a < sizes.size(); ++a) {
    for (size_t b = a + 1; b < sizes.size(); ++b) {
      if (strides[a] == strides[b] && strides[a] != 0 && sizes[a] > 1 && sizes[b] > 1) {
        return true;
      }
    }
  }
  return false;
}

std::optional<Stack> probe_results(const Op& op, const Stack& stack, size_t base, const Refs& refs) {
  c10::impl::ExcludeDispatchKeyGuard aside(kAside);
  const bool symbolic = any_symbolic(refs);
  for (const bool few : {true, false}) {
    if (few && !(runs_on_few(op) && are_plain(refs))) {
      continue;
    }
    try {
      auto call = few ? on_few(op, stack, base, refs, symbolic) : on_meta(op, stack, base, refs, symbolic);
      op.handle.callBoxed(&call);
      return call;
    } catch (const std::exception&) { // no such device here, or no kernel
    }
  }
  return std::nullopt;
}

// torch decides the order of the results' dims. This calls its meta kernels, with the whole tensors' sizes and strides. Results
// of an op without a meta kernel are contiguous. For some elementwise ops (copysign, floor_divide), and for transforms outside
// of CUDA, torch's meta kernels in Python return another order than the op. So these ops themselves run on a few elements.
void probe_orders(const Op& op, const Stack& stack, size_t base, const Refs& refs, Solution& solution) {
  const auto format = op.schema().argumentIndexWithName("memory_format");
  const bool asks = op.entry->options.asks_order || (format && !stack[base + *format].isNone());
  if (!(solution.shards || solution.moves) || op.is_view || op.reshapes_self || op.is(rules::Way::Lists) ||
      (any_symbolic(refs) && !asks)) {
    return;
  }
  if (!asks && std::all_of(refs.begin(), refs.end(), [](const Ref& r) { return r.tensor->is_contiguous(); })) {
    solution.reads |= format ? rules::Reads::arg(*format) : 0;
    return;
  }
  solution.reads |= ordering_arguments(op);
  const auto call = probe_results(op, stack, base, refs);
  if (!call) {
    return;
  }
  size_t nth = 0;
  each_tensor(*call, [&](const at::Tensor& t) {
    if (nth < solution.results.size() && t.defined() && !solution.results[nth].order) {
      solution.results[nth].order = order_with_ones(t.sizes(), t.strides());
    }
    ++nth;
  });
}

} // namespace shardtensor
