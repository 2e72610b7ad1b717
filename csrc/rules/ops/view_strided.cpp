// as_strided, and ops that would change a tensor's memory.
#include "rules/ops/views.h"

#include "rules/exact_dtypes.h"
#include "rules/registry.h"
#include "tensor/dim_order.h"
#include "tensor/symbolic.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/TensorUtils.h>

#include <algorithm>

namespace shardtensor::rules {

namespace {

struct StridedView {
  SymSizes sizes, strides;
  c10::SymInt offset; // from the base's first element
};

// For each dim of the result: its base dim, start and step. Nothing if the result is not made of slices and transposes.
struct SlicesOfBase {
  c10::SmallVector<int64_t, 5> dims; // of the base, or -1: size 1 or stride 0
  c10::SmallVector<Dim::SymWindow, 5> windows;
  SymSizes starts;   // per base dim
  int64_t host = -1; // the base dim that is the host of the selected rows of cut dims
};

// The dims that have more than one index, the longest stride first. Nothing if one of them repeats its elements.
std::optional<Sizes> by_stride(const TensorArg& x, const SymSizes& strides) {
  Sizes order;
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (!x.is_one(d)) {
      order.push_back(d);
      if (strides[d] <= 0) {
        return std::nullopt;
      }
    }
  }
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return strides[a] > strides[b]; });
  return order;
}

// The index of each dim at an offset. Nothing if no element is there. Offsets below a symbolic stride are compared, not
// divided, so that they stay numbers.
std::optional<SymSizes> index_at(const c10::SymInt& offset, const TensorArg& x, const SymSizes& strides, const Sizes& order) {
  SymSizes out(x.dim(), 0);
  auto rest = offset;
  for (auto d : order) {
    if (rest >= strides[d]) {
      out[d] = strides[d] == 1 ? rest : rest / strides[d];
      rest = strides[d] == 1 ? c10::SymInt(0) : rest % strides[d];
    }
    if (out[d] >= x.sym_size(d)) {
      return std::nullopt;
    }
  }
  return rest == 0 ? std::make_optional(out) : std::nullopt;
}

// For each dim of the result that is larger than 1, its base dim: the one with the longest stride that does not exceed its own.
// -1: stride 0. Nothing if two dims have the same base dim.
std::optional<Sizes> dims_stepped_along(const StridedView& to, const SymSizes& strides, const Sizes& order) {
  Sizes out(to.sizes.size(), -1);
  uint64_t used = 0;
  for (size_t j = 0; j < out.size(); ++j) {
    if (to.sizes[j] == 1 || to.strides[j] == 0) {
      continue;
    }
    const auto* d = std::find_if(order.begin(), order.end(), [&](int64_t k) { return strides[k] <= to.strides[j]; });
    if (d == order.end() || (used >> *d & 1)) {
      return std::nullopt;
    }
    used |= uint64_t{1} << *d;
    out[j] = *d;
  }
  return out;
}

std::optional<SlicesOfBase> undo(const TensorArg& x, const StridedView& to) {
  const auto strides = x.sym_strides();
  const auto order = by_stride(x, strides);
  const auto dims = order ? dims_stepped_along(to, strides, *order) : std::nullopt;
  const auto starts = dims ? index_at(to.offset, x, strides, *order) : std::nullopt;
  if (!starts) {
    return std::nullopt;
  }
  SlicesOfBase out{*dims, {}, *starts};
  const auto n = to.sizes.size();
  out.windows.assign(n, Dim::SymWindow(0, 1, 1));
  for (size_t j = 0; j < n; ++j) {
    if (const auto d = out.dims[j]; d >= 0) {
      if (to.strides[j] % strides[d] != 0) {
        return std::nullopt;
      }
      const auto step = (to.strides[j] / strides[d]).guard_int(__FILE__, __LINE__);
      if (plus(out.starts[d], (to.sizes[j] - 1) * step) >= x.sym_size(d)) {
        return std::nullopt;
      }
      out.windows[j] = Dim::SymWindow(out.starts[d], step, to.sizes[j]);
    }
  }
  // Dims of size 1 get base dims of equal stride that are still free, and finally the base's dims of size 1, which may be
  // sharded.
  auto left = *order;
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (x.is_one(d)) {
      left.push_back(d);
    }
  }
  for (size_t j = 0; j < n; ++j) {
    const auto fits = [&](int64_t d) {
      return to.strides[j] == strides[d] && std::find(out.dims.begin(), out.dims.end(), d) == out.dims.end();
    };
    if (const auto* d = std::find_if(left.begin(), left.end(), fits); to.sizes[j] == 1 && out.dims[j] < 0 && d != left.end()) {
      out.dims[j] = *d;
      out.windows[j] = Dim::SymWindow(out.starts[*d], 1, 1);
    }
  }
  return out;
}

void undone_kernel(KernelRun& run) {
  auto x = run.arg(0).toTensor();
  const auto& undone = kernel_data<SlicesOfBase>(run.solution);
  const auto n = undone.dims.size();
  const auto ndim = x.dim();
  Sizes order, chosen;
  for (size_t j = 0; j < n; ++j) {
    const auto d = undone.dims[j];
    if (d >= 0) {
      x = slice_of_piece(x, d, undone.windows[j], mine(run, 0, d));
      order.push_back(d);
    }
  }
  for (int64_t d = 0; d < ndim; ++d) {
    if (std::find(order.begin(), order.end(), d) == order.end()) {
      const auto piece = mine(run, 0, d);
      const bool here = undone.starts[d] >= piece.start && undone.starts[d] < piece.end();
      x = here ? x.narrow_symint(d, plus(undone.starts[d], -piece.start), 1) : none_along(x, d, undone.host);
      chosen.push_back(d);
    }
  }
  auto all = order;
  all.append(chosen.begin(), chosen.end());
  x = x.permute(all);
  for (size_t i = 0; i < chosen.size(); ++i) {
    x = x.select(static_cast<int64_t>(order.size()), 0);
  }
  for (size_t j = 0; j < n; ++j) {
    if (undone.dims[j] < 0) {
      x = x.unsqueeze(static_cast<int64_t>(j));
      SymSizes sizes(x.dim(), -1);
      sizes[j] = undone.windows[j].length;
      x = x.expand_symint(sizes);
    }
  }
  run.returns({own(run, x)});
}

// Selected rows of cut dims stay at their owners, as with select.
void add_rows(const TensorArg& x, Rule& rule, SlicesOfBase& undone, Dims& in, Dims& out) {
  uint64_t kept = 0;
  for (auto d : undone.dims) {
    kept |= d < 0 ? 0 : uint64_t{1} << d;
  }
  undone.host = host_among(x, kept);
  const auto* host = std::find(undone.dims.begin(), undone.dims.end(), undone.host);
  for (int64_t d = 0; d < x.dim() && undone.host >= 0; ++d) { // without one, the base is gathered along these dims
    if (x.layout->shards(d) && !(kept >> d & 1)) {
      in[d] = Dim(rule.factor({.kernel = true}));
      out[host - undone.dims.begin()].at.push_back({in[d].factor, undone.starts[d]});
      guard_place(x, d, undone.starts[d]);
    }
  }
}

Rule undone_rule(const TensorArg& x, const StridedView& to, SlicesOfBase undone) {
  Rule rule;
  Dims in(x.dim(), Dim(kNone)), out;
  for (size_t j = 0; j < to.sizes.size(); ++j) {
    const auto d = undone.dims[j];
    auto& w = undone.windows[j];
    if (d < 0) {
      w.length = to.sizes[j];
      out.emplace_back(kNone);
      continue;
    }
    in[d] = Dim(rule.factor());
    auto& dim = out.emplace_back(in[d]);
    if (w.step != 1 || w.length != x.sym_size(d)) {
      dim.window = w;
    }
  }
  add_rows(x, rule, undone, in, out);
  rule.kernel_data = std::move(undone);
  rule.operands.emplace_back(std::move(in));
  rule.results.emplace_back(std::move(out), to.sizes);
  rule.always(undone_kernel);
  rule.passes_partial();
  return rule;
}

constexpr auto kFrozen = "the memory or shape of its pieces cannot be replaced in place; make a new tensor instead";

// In place: changes only strides of dims of size 1, so no data moves (a pooled image becomes channels_last).
Rule restrided(const Call& call) {
  const auto& x = call.tensors[0];
  const auto sizes = call.sym_ints(1), strides = call.sym_ints(2), own = x.sym_strides();
  const auto offset = call.has(3) ? call.sym_ints(3)[0] : x.sym_offset();
  bool alike = offset == x.sym_offset() && sizes == x.sym_sizes() && strides.size() == sizes.size();
  for (int64_t d = 0; alike && d < x.dim(); ++d) {
    alike = sizes[d] == 0 || sizes[d] == 1 || own[d] == strides[d];
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      alike, call.schema.name(), ": cannot be done on a ShardTensor: ", kFrozen, ". (self: ", x.sizes(), " ", x.layout->str(),
      "; rank ", call.mesh.rank(), ")");
  auto rule = same(call);
  rule.results[0].geometry.reset();
  rule.always(unary_kernel<at::alias>);
  return rule;
}

} // namespace

void set_copy_form(Rule& rule, CopyForm form) {
  auto& result = rule.results[0];
  if (form.repeats) {
    result.order = order_of(guarded(form.strides)); // the meta kernels of torch 2.11 give another one
  } else if (!form.dense) {
    result.strides = std::move(form.strides);
  }
}

CopyForm form_of_copy(const TensorArg& x) {
  const auto sizes = x.sym_sizes();
  CopyForm form{x.sym_strides()};
  form.dense = form.strides == dense_strides(sizes, {});
  Sizes order;
  for (int64_t d = 0; d < x.dim() && !form.dense; ++d) {
    if (sizes[d] == 0) {
      return form;
    }
    if (!x.is_one(d)) {
      order.push_back(d);
      form.repeats = form.repeats || form.strides[d] == 0;
    }
  }
  if (form.repeats) {
    form.dense = true;
    form.strides = symbols(at::infer_dense_strides(guarded(sizes), guarded(form.strides)));
    return form;
  }
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return form.strides[a] < form.strides[b]; });
  c10::SymInt last = 0; // the farthest element along the dims so far
  for (const auto d : order) {
    form.shared = form.shared || form.strides[d] <= last;
    last = plus(last, (sizes[d] - 1) * form.strides[d]);
  }
  return form;
}

bool has_strides(const at::Tensor& x, const SymSizes& strides) {
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (x.sym_size(d) > 1 && x.sym_stride(d) != strides[d]) {
      return false;
    }
  }
  return true;
}

namespace {

struct BaseStrides {
  c10::SymInt offset; // from the first element
  SymSizes strides;   // of the base; the local tensor may have others
};

void whole_strided_kernel(KernelRun& run) {
  auto x = run.arg(0).toTensor();
  const auto& [offset, strides] = kernel_data<BaseStrides>(run.solution);
  if (!has_strides(x, strides)) {
    x = at::empty_strided_symint(x.sym_sizes(), strides, x.options()).copy_(x);
  }
  const auto sizes = run.arg(1).toSymIntVector(), steps = run.arg(2).toSymIntVector();
  run.returns({own(run, x.as_strided_symint(sizes, steps, plus(x.sym_storage_offset(), offset)))});
}

// The offset of the last of these elements.
c10::SymInt last_of(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, c10::SymInt offset = 0) {
  for (size_t d = 0; d < sizes.size(); ++d) {
    offset = plus(offset, (sizes[d] - 1) * strides[d]);
  }
  return offset;
}

// The view that the arguments from `arg` on describe (sizes, strides, offset), within the elements of a tensor of these strides
// and this offset.
StridedView asked_for(const Call& call, int64_t arg, const SymSizes& strides, const c10::SymInt& start) {
  const auto& x = call.tensors[0];
  StridedView to{call.sym_ints(arg), call.sym_ints(arg + 1), 0};
  if (call.has(arg + 2)) {
    to.offset = plus(call.sym_ints(arg + 2)[0], -start);
  }
  TORCH_CHECK(to.sizes.size() == to.strides.size(), "mismatch in length of strides and shape");
  TORCH_CHECK(
      numel_of(to.sizes) == 0 || (to.offset >= 0 && last_of(to.sizes, to.strides, to.offset) <= last_of(x.sym_sizes(), strides)),
      call.schema.name(), ": sizes ", c10::SymIntArrayRef(to.sizes), ", strides ", c10::SymIntArrayRef(to.strides),
      " and offset ", to.offset, " reach outside of the ShardTensor (", c10::SymIntArrayRef(x.sym_sizes()), ", ", x.layout->str(),
      ", rank ", call.mesh.rank(), "), which has no memory beyond its elements. Slice and permute the base tensor instead.");
  return to;
}

// The strides of a view of all elements in their order.
std::optional<SymSizes> reshaped_strides(const TensorArg& x, const SymSizes& to) {
  const auto found = at::detail::computeStride(x.sym_sizes(), x.sym_strides(), c10::SymDimVector(to.begin(), to.end()));
  return found ? std::make_optional(SymSizes(found->begin(), found->end())) : std::nullopt;
}

Rule as_strided(const Call& call) {
  const auto& x = call.tensors[0];
  const auto to = asked_for(call, 1, x.sym_strides(), x.sym_offset());
  const bool empty = numel_of(to.sizes) == 0;
  if (x.layout->is_sharded() && !empty) {
    if (const auto undone = undo(x, to)) {
      return undone_rule(x, to, *undone);
    }
    if (to.offset == 0 && numel_of(to.sizes) == numel_of(x.sym_sizes()) && reshaped_strides(x, to.sizes) == to.strides) {
      return reshaped(call, to.sizes, ReshapeArguments::Strides);
    }
  }
  auto rule = replicate(call);
  rule.passes_partial();
  rule.results.emplace_back(Dims(to.sizes.size(), Dim(kNone)));
  rule.kernel_data = BaseStrides{empty ? c10::SymInt(0) : to.offset, x.sym_strides()};
  rule.always(whole_strided_kernel);
  return rule;
}

void strided_scatter_kernel(KernelRun& run) {
  const auto x = run.arg(0).toTensor(), source = run.arg(1).toTensor();
  const auto& [offset, strides] = kernel_data<BaseStrides>(run.solution);
  auto out = at::empty_strided_symint(x.sym_sizes(), strides, x.options()).copy_(x);
  out.as_strided_symint(source.sym_sizes(), run.arg(3).toSymIntVector(), offset).copy_(source);
  run.returns({out});
}

// Whether index i of the requested first dim lies within index i of x's first dim, for all i. x's copy has these strides.
bool first_dim_stays(const TensorArg& x, const SymSizes& strides, const StridedView& to) {
  const auto sizes = x.sym_sizes();
  if (sizes.empty() || to.sizes.empty() || to.sizes[0] != sizes[0] || to.strides[0] != strides[0]) {
    return false;
  }
  const auto rest = [](const SymSizes& n) { return c10::SymIntArrayRef(n).slice(1); };
  return last_of(rest(sizes), rest(strides)) < strides[0] && last_of(rest(to.sizes), rest(to.strides), to.offset) < strides[0];
}

Rule as_strided_scatter(const Call& call) {
  const auto& x = call.tensors[0];
  auto form = form_of_copy(x);
  const auto to = asked_for(call, 2, form.strides, form.repeats ? c10::SymInt(0) : x.sym_offset());
  TORCH_CHECK(
      call.tensors[1].sym_sizes() == to.sizes,
      "expected src to have a size equal to the slice of self. src size = ", call.tensors[1].sym_sizes(),
      ", slice size = ", to.sizes);
  Rule rule;
  Dims in(x.dim(), Dim(kNone)), part(to.sizes.size(), Dim(kNone));
  if (first_dim_stays(x, form.strides, to)) {
    in[0] = part[0] = Dim(rule.factor());
  }
  rule.operands.emplace_back(in);
  rule.operands.emplace_back(std::move(part));
  rule.results.emplace_back(std::move(in));
  rule.kernel_data = BaseStrides{to.offset, form.strides};
  set_copy_form(rule, std::move(form));
  rule.always(strided_scatter_kernel);
  rule.linear.push_back(moves(call, 0b11, x.dtype));
  return rule;
}

} // namespace

void register_view_strided(Registry& r) {
  const Options symbols{.symbols = true};
  r.add("views", {"as_strided", "as_strided_copy"}, as_strided, symbols);
  r.add("views", {"as_strided_"}, restrided, symbols);
  r.add("views", {"as_strided_scatter"}, as_strided_scatter, symbols);
  r.add(
      "views",
      {"resize_", "resize_as_", "set_", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor"},
      nullptr, {.way = Way::Refused, .why = kFrozen});
}

} // namespace shardtensor::rules
