#include "dispatch/outputs.h"

#include "dispatch/eager_scalar_reduce.h"
#include "dispatch/excluded_keys.h"
#include "dispatch/inputs.h"
#include "kernels/boxes.h"
#include "redistribute/redistribute.h"

#include <ATen/ATen.h>
#include <ATen/TensorUtils.h>
#include <c10/util/strides.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/graph_task.h>

namespace shardtensor {

using rules::Solution;
using torch::jit::Stack;

namespace {

template <typename In>
typename In::List sizes_of_result(const Solution::ResultSpec& result, const Refs& refs, const at::Tensor& local) {
  const auto have = In::sizes(local);
  typename In::List sizes(have.begin(), have.end());
  for (size_t d = 0; d < result.sizes.size(); ++d) {
    const auto& from = result.sizes[d];
    if (from.operand >= 0) {
      sizes[d] = In::sizes(*refs[from.operand].tensor)[from.dim];
    } else if (from.operand != -1) {
      sizes[d] = In::of(from.value);
    }
  }
  return sizes;
}

// The operand `like`, if its sizes and strides can be used for the result: it has the same sizes, and the strides that torch
// gives a new contiguous tensor (a contiguous tensor may have other strides along dims of size 1, or if it has no elements).
const at::Tensor* twin_of(const Solution::ResultSpec& result, const Refs& refs, const at::Tensor& local) {
  if (result.like < 0 || (result.order && !result.order->empty())) {
    return nullptr;
  }
  const auto& lead = *refs[result.like].tensor;
  const auto have = local.sizes(), want = lead.sizes(), strides = lead.strides();
  if (result.sizes.size() != want.size() || have.size() != want.size()) {
    return nullptr;
  }
  int64_t stride = 1;
  for (auto d = want.size(); d-- > 0;) {
    const auto& from = result.sizes[d];
    const bool same =
        from.operand == result.like ? from.dim == static_cast<int16_t>(d) : from.operand == -1 && have[d] == want[d];
    if (!same || strides[d] != stride) {
      return nullptr;
    }
    stride *= std::max<int64_t>(want[d], 1);
  }
  return &lead;
}

// The strides of a view of all of the base's elements.
Sizes reshaped(const at::Tensor& base, c10::IntArrayRef sizes) {
  if (base.is_contiguous()) {
    return Sizes(c10::contiguous_strides(sizes));
  }
  const auto found = at::detail::computeStride(base.sizes(), base.strides(), sizes);
  // Checks the whole tensor, as torch does, so that all ranks raise alike: a piece might allow the view.
  TORCH_CHECK(
      found,
      "view size is not compatible with input tensor's size and stride (at least one dimension spans across two "
      "contiguous subspaces). Use .reshape(...) instead: sizes ",
      base.sizes(), ", strides ", base.strides(), " as ", sizes);
  return Sizes(found->begin(), found->end());
}

SymSizes reshaped(const at::Tensor& base, c10::SymIntArrayRef sizes) {
  const auto found =
      at::detail::computeStride(base.sym_sizes(), base.sym_strides(), c10::SymDimVector(sizes.begin(), sizes.end()));
  return found ? SymSizes(found->begin(), found->end()) : dense_strides(sizes, {}); // where torch refuses, its own op raises
}

template <typename In, typename AllSizes>
ViewFormIn<In> form_of(const rules::Geometry& geometry, const at::Tensor& base, const AllSizes& sizes) {
  if (geometry.reshaped) {
    return {reshaped(base, sizes), In::offset(base)};
  }
  const auto strides = In::strides(base);
  ViewFormIn<In> form{{}, In::offset(base)};
  for (const auto& [dim, times, plus] : geometry.strides) {
    auto stride = In::of(times);
    if (dim >= 0) {
      stride = strides[dim] * (stride == rules::Geometry::kItsSize ? In::sizes(base)[dim] : stride);
    }
    form.strides.push_back(plus < 0 ? stride : stride + strides[plus]);
  }
  for (const auto& [dim, times, plus] : geometry.offset) {
    if (const auto n = In::of(times); !In::is_zero(n)) {
      form.offset = In::is_zero(form.offset) ? strides[dim] * n : form.offset + strides[dim] * n;
    }
  }
  return form;
}

// Views that autograd itself creates are not tracked: users never see their bases. But CopySlices writes to the views that it
// creates, so these are tracked. A leaf's gradient that AccumulateGrad keeps is no view.
void mark_broken(ShardTensorImpl& view, const ShardTensorImpl& base, bool copied) {
  const auto node = torch::autograd::get_current_node();
  const auto* write = dynamic_cast<const torch::autograd::CopySlices*>(node.get());
  const bool autograds = node && !base.watches() && !(write && write->view_fn);
  if (autograds && dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get())) {
    return;
  }
  if (copied) {
    view.set_detached_view(base, !autograds);
  } else {
    view.share_detached_view(base);
  }
}

// Whether a view holds summands along a mesh dim along which its base has none: then its memory is not the base's, even on
// ranks whose piece has no elements.
bool has_new_summands(const Layout& view, const Layout& base) {
  const auto is_new = [&](int64_t m) { return view.placement(m).is_partial() && !base.placement(m).is_partial(); };
  return view.has_partial() && base.any_mesh_dim(is_new);
}

// Whether a view shares no memory with its base's piece; decided alike on all ranks, because an empty piece cannot show it. If
// the piece is a Python subclass, only the op can tell: the class may put a view of its memory into a new wrapper.
bool is_copy(const at::Tensor& local, const Layout& layout, const Solution& solution, const ShardTensorImpl& base) {
  if (solution.operands[0] || solution.put_back || has_new_summands(layout, base.layout())) {
    return true;
  }
  const auto& piece = base.local(true);
  const bool wrapped = piece.key_set().has(c10::DispatchKey::Python) && !is_traced(piece);
  return !wrapped && !rules::is_empty(local) && !local.is_alias_of(piece);
}

} // namespace

Sizes global_sizes(const Solution::ResultSpec& result, const Refs& refs, const at::Tensor& local) {
  return sizes_of_result<Numbers>(result, refs, local);
}

namespace {

DimOrder order_of_result(const Solution::ResultSpec& result, const Refs& refs, size_t ndim) {
  return result.order ? *result.order : result.like >= 0 ? order_like(*refs[result.like].tensor, ndim) : DimOrder();
}

} // namespace

Sizes strides_of(const Solution::ResultSpec& result, const Refs& refs, c10::IntArrayRef sizes) {
  return dense_strides(sizes, order_of_result(result, refs, sizes.size()));
}

std::vector<ViewForm> forms_of(const Op& op, const at::Tensor& base, const Stack& stack, size_t at) {
  c10::impl::ExcludeDispatchKeyGuard aside(kAside);
  const auto room = base.storage().sym_nbytes() / static_cast<int64_t>(base.dtype().itemsize());
  const auto meta = at::empty_symint({room}, base.options().device(at::kMeta).requires_grad(false))
                        .as_strided_symint(base.sym_sizes(), base.sym_strides(), base.sym_storage_offset());
  Stack call(stack.begin() + static_cast<int64_t>(at), stack.end());
  call[0] = meta;
  op.handle.callBoxed(&call);
  std::vector<ViewForm> forms;
  each_tensor(call, [&](const at::Tensor& t) { forms.push_back({t.sym_strides().vec(), t.sym_storage_offset()}); });
  return forms;
}

namespace {

// The same layout with even pieces instead of pieces whose sizes are symbols.
LayoutPtr evened(LayoutPtr layout) {
  for (int64_t m = 0; m < layout->ndim(); ++m) {
    if (const auto& cut = layout->cut(m); cut && !cut->symbols.empty()) {
      layout = layout->with(m, layout->placement(m));
    }
  }
  return layout;
}

// Whether a view is of a gradient and will only be read. CopySlices writes into its views.
bool is_read_by_autograd() {
  const auto node = torch::autograd::get_current_node();
  return node && !dynamic_cast<const torch::autograd::CopySlices*>(node.get());
}

// A result that is no view: its piece is not shared.
at::Tensor new_result(at::Tensor result, const Layout& layout) {
  if (C10_UNLIKELY(layout.has_partial())) {
    as_shard_tensor(result)->let_keep_sums();
  }
  return result;
}

template <typename In>
typename In::List list_of(const SymSizes& numbers) {
  if constexpr (std::is_same_v<In, Symbols>) {
    return numbers;
  } else {
    return guarded(numbers);
  }
}

// The general case of wrap_result(): no other tensor's sizes and strides can be reused.
template <typename In>
at::Tensor wrapped(
    at::Tensor local,
    const Solution& solution,
    const Solution::ResultSpec* result,
    const Refs& refs,
    const ViewForm* form,
    const ShardTensorImpl* base,
    bool copied) {
  constexpr bool symbols = std::is_same_v<In, Symbols>;
  const auto* layout = result ? &result->layout : &solution.replicated;
  LayoutPtr even;
  typename In::List own_sizes, own_strides;
  auto sizes = In::sizes(local), strides = In::strides(local); // they outlive the move into the result
  const auto keep_sizes = [&] {                                // a copy may replace the local tensor
    if (own_sizes.empty()) {
      own_sizes = typename In::List(sizes.begin(), sizes.end());
      sizes = own_sizes;
    }
  };
  if (result && (*layout)->is_sharded()) {
    sizes = own_sizes = sizes_of_result<In>(*result, refs, local);
  }
  if constexpr (symbols) {
    keep_sizes();
    strides = own_strides = strides.vec();
    if ((*layout)->has_symbols() && (!base || copied || is_read_by_autograd())) { // any other view may be written
      even = evened(*layout);
      local = redistribute(local, **layout, *even, sizes);
      layout = &even;
      copied = base != nullptr;
    }
  }
  const bool moved = copied || (base && base->is_detached_view());
  const auto finished = [&](const auto& as, const auto& offset) {
    at::Tensor out;
    if constexpr (symbols) {
      out = wrap_symbolic(std::move(local), *layout, sizes, as, base, offset, moved);
    } else {
      out = wrap(std::move(local), *layout, sizes, as, base, offset, moved);
    }
    if (moved) {
      mark_broken(*as_shard_tensor(out), *base, copied);
    }
    if (!base) {
      return new_result(std::move(out), **layout);
    }
    // A kernel may copy only on ranks with empty pieces, and all ranks must find the same sums.
    if (C10_UNLIKELY(base->keeps_sums()) && !moved && (!solution.kernel || !base->layout().is_sharded())) {
      as_shard_tensor(out)->share_sums(*base);
    }
    return out;
  };
  // In a graph, a view that had to move data gets new strides below.
  if (base && (!moved || form || (!symbols && result && result->geometry))) {
    auto found = form ? ViewFormIn<In>{list_of<In>(form->strides), In::of(form->offset)}
                      : form_of<In>(*result->geometry, *refs[0].tensor, sizes); // raises where torch would
    if constexpr (symbols) { // a gradient's offset matters to nobody; a symbol would be kept as a size of one more tensor
      const bool drop = found.offset.is_symbolic() && torch::autograd::get_current_graph_task_id() != -1;
      found.offset = drop ? c10::SymInt(0) : found.offset;
    } else if (solution.put_back) {
      keep_sizes();
      local = in_dim_order(std::move(local), found.strides);
    }
    return finished(found.strides, found.offset);
  }
  if (result && !result->strides.empty()) {
    strides = own_strides = list_of<In>(result->strides);
  } else if (result && (solution.shards || result->order)) {
    const auto order = order_of_result(*result, refs, sizes.size());
    keep_sizes();
    strides = own_strides = dense_strides(sizes, order);
    local = in_dim_order(std::move(local), order);
  }
  return finished(strides, 0);
}

} // namespace

at::Tensor wrap_result(
    const Op& op, at::Tensor local, const Solution& solution, size_t nth, const Refs& refs, const ViewForm* form) {
  const auto* result = nth < solution.results.size() ? &solution.results[nth] : nullptr;
  const ShardTensorImpl* base = op.is_view || op.reshapes_self ? refs[0].impl : nullptr;
  // A copy, or a view of one: a write to it does not reach the base on every rank.
  const auto& layout = result ? result->layout : solution.replicated;
  const bool copied = base && is_copy(local, *layout, solution, *base);
  if (C10_UNLIKELY(copied)) {
    local = kernels::resolved(local); // maybe only some ranks made a view
  }
  if (C10_UNLIKELY(is_symbolic(local) || any_symbolic(refs))) {
    return wrapped<Symbols>(std::move(local), solution, result, refs, form, base, copied);
  }
  if (C10_UNLIKELY(!base && local.dim() == 0 && layout->has_partial())) {
    auto out = wrap(std::move(local), layout, {}, {});
    reduce_ahead(op, out, solution.replicated);
    return new_result(std::move(out), *layout);
  }
  if (!base && result && result->strides.empty()) {
    if (const auto* twin = twin_of(*result, refs, local)) {
      return new_result(wrap(in_dim_order(std::move(local), twin->strides()), layout, twin->sizes(), twin->strides()), *layout);
    }
  }
  return wrapped<Numbers>(std::move(local), solution, result, refs, form, base, copied);
}

} // namespace shardtensor
