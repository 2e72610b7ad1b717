// as_strided, and ops that would change a tensor's memory.
#include "rules/views.h"

#include "rules/registry.h"

#include <ATen/ATen.h>
#include <ATen/TensorUtils.h>

#include <algorithm>

namespace shardtensor::rules {

namespace {

struct Strided {
  Sizes sizes, strides;
  int64_t offset; // from the base's first element
};

// For each dim of the result: its base dim, start and step. Nothing if the result is not made of slices and transposes.
struct Undone {
  c10::SmallVector<int64_t, 5> dims; // of the base, or -1: size 1 or stride 0
  c10::SmallVector<Dim::SymWindow, 5> windows;
  Sizes starts; // per base dim
};

std::optional<Undone> undo(const TensorArg& x, const Strided& to) {
  Sizes order;
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (x.size(d) > 1) {
      order.push_back(d);
    }
  }
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return x.strides()[a] > x.strides()[b]; });
  Undone out;
  out.starts.assign(x.dim(), 0);
  int64_t rest = to.offset;
  for (auto d : order) {
    if (x.strides()[d] <= 0) {
      return std::nullopt;
    }
    out.starts[d] = rest / x.strides()[d];
    rest %= x.strides()[d];
    if (out.starts[d] >= x.size(d)) {
      return std::nullopt;
    }
  }
  if (rest) {
    return std::nullopt;
  }
  const auto n = to.sizes.size();
  out.dims.assign(n, -1);
  out.windows.assign(n, Dim::SymWindow(0, 1, 1));
  uint64_t used = 0;
  for (const bool single : {false, true}) { // dims of size 1 take the base dims that the others leave
    for (size_t j = 0; j < n; ++j) {
      if ((to.sizes[j] == 1) != single || (to.strides[j] == 0 && !single)) {
        continue;
      }
      const auto* d = std::find_if(order.begin(), order.end(), [&](int64_t k) {
        return single ? x.strides()[k] == to.strides[j] && !(used >> k & 1) : x.strides()[k] <= to.strides[j];
      });
      if (d == order.end()) {
        if (single) {
          continue;
        }
        return std::nullopt;
      }
      const auto step = single ? 1 : to.strides[j] / x.strides()[*d];
      if ((!single && to.strides[j] % x.strides()[*d]) || (used >> *d & 1) ||
          out.starts[*d] + (to.sizes[j] - 1) * step >= x.size(*d)) {
        return std::nullopt;
      }
      used |= uint64_t{1} << *d;
      out.dims[j] = *d;
      out.windows[j] = Dim::SymWindow(out.starts[*d], step, to.sizes[j]);
    }
  }
  // The base's own dims of size 1, which may be sharded too: match a result dim with the same stride.
  for (int64_t d = 0; d < x.dim(); ++d) {
    for (size_t j = 0; j < n && x.is_one(d); ++j) {
      if (to.sizes[j] == 1 && out.dims[j] < 0 && to.strides[j] == x.strides()[d]) {
        out.dims[j] = d;
        break;
      }
    }
  }
  return out;
}

void undone_kernel(Run& run) {
  auto x = run.arg(0).toTensor();
  const auto& undone = noted<Undone>(run.solution);
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
      x = x.narrow(d, undone.starts[d], 1);
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

Rule undone_rule(const TensorArg& x, const Strided& to, Undone undone) {
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
    if (w.step != 1 || w.length != x.size(d)) {
      dim.window = w;
    }
  }
  rule.notes = std::move(undone);
  rule.operands.emplace_back(std::move(in));
  rule.results.emplace_back(std::move(out), to.sizes);
  rule.always(undone_kernel);
  rule.passes_partial();
  return rule;
}

constexpr auto kFrozen = "the memory or shape of its pieces cannot be replaced in place; make a new tensor instead";

// In place: changes only strides of dims of size 1, so nothing moves (a pooled image becomes channels_last).
Rule restrided(const Call& call) {
  const auto& x = call.tensors[0];
  const auto sizes = call.ints(1), strides = call.ints(2);
  bool alike =
      call.integer(3, x.offset()) == x.offset() && x.sizes() == c10::IntArrayRef(sizes) && strides.size() == sizes.size();
  for (int64_t d = 0; alike && d < x.dim(); ++d) {
    alike = x.size(d) <= 1 || x.strides()[d] == strides[d];
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      alike, call.schema.name(), ": cannot be done on a ShardTensor: ", kFrozen, ". (self: ", x.sizes(), " ", x.layout->str(),
      "; rank ", call.mesh.rank(), ")");
  auto rule = same(call);
  rule.results[0].geometry.reset();
  rule.always(unary_kernel<at::alias>);
  return rule;
}

bool lies_by(const at::Tensor& x, c10::IntArrayRef strides) {
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (x.size(d) > 1 && x.stride(d) != strides[d]) {
      return false;
    }
  }
  return true;
}

struct Laid {
  int64_t offset; // from the first element
  Sizes strides;  // of the base; the local tensor may have others
};

void whole_strided_kernel(Run& run) {
  auto x = run.arg(0).toTensor();
  const auto& [offset, strides] = noted<Laid>(run.solution);
  if (!lies_by(x, strides)) {
    x = at::empty_strided(x.sizes(), strides, x.options()).copy_(x);
  }
  run.returns({own(run, x.as_strided(run.arg(1).toIntVector(), run.arg(2).toIntVector(), x.storage_offset() + offset))});
}

// What the arguments from `arg` on ask for: sizes, strides, offset; within the elements.
Strided asked_for(const Call& call, int64_t arg) {
  const auto& x = call.tensors[0];
  Strided to{call.ints(arg), call.ints(arg + 1), call.integer(arg + 2, x.offset()) - x.offset()};
  TORCH_CHECK(to.sizes.size() == to.strides.size(), "mismatch in length of strides and shape");
  int64_t first = 0, last = to.offset;
  for (int64_t d = 0; d < x.dim(); ++d) {
    first += (x.size(d) - 1) * x.strides()[d];
  }
  for (size_t j = 0; j < to.sizes.size(); ++j) {
    last += (to.sizes[j] - 1) * to.strides[j];
  }
  TORCH_CHECK(
      c10::multiply_integers(to.sizes) == 0 || (to.offset >= 0 && last <= first), call.schema.name(), ": sizes ",
      c10::IntArrayRef(to.sizes), ", strides ", c10::IntArrayRef(to.strides), " and offset ", to.offset,
      " reach outside of the ShardTensor (", x.sizes(), ", ", x.layout->str(), ", rank ", call.mesh.rank(),
      "), which has no memory beyond its elements. Slice and permute the base tensor instead.");
  return to;
}

Rule as_strided(const Call& call) {
  const auto& x = call.tensors[0];
  const auto to = asked_for(call, 1);
  const bool empty = c10::multiply_integers(to.sizes) == 0;
  if (x.layout->is_sharded() && !empty) {
    if (const auto undone = undo(x, to)) {
      return undone_rule(x, to, *undone);
    }
    if (to.offset == 0 && c10::multiply_integers(to.sizes) == c10::multiply_integers(x.sizes())) {
      const auto strides = at::detail::computeStride(x.sizes(), x.strides(), to.sizes);
      if (strides && c10::IntArrayRef(*strides) == to.strides) {
        return reshaped(call, symbols(to.sizes), Told::Strides);
      }
    }
  }
  auto rule = replicate(call);
  rule.passes_partial();
  rule.results.emplace_back(Dims(to.sizes.size(), Dim(kNone)));
  rule.notes = Laid{empty ? 0 : to.offset, Sizes(x.strides().begin(), x.strides().end())};
  rule.always(whole_strided_kernel);
  return rule;
}

void strided_scatter_kernel(Run& run) {
  const auto x = run.arg(0).toTensor(), source = run.arg(1).toTensor();
  const auto& [offset, strides] = noted<Laid>(run.solution);
  auto out = at::empty_strided(x.sizes(), strides, x.options()).copy_(x);
  out.as_strided(source.sizes(), run.arg(3).toIntVector(), offset).copy_(source);
  run.returns({out});
}

// Whether index i of the first dim asked for lies in index i of x's, for all i.
bool first_dim_stays(const TensorArg& x, const Strided& to) {
  if (x.dim() == 0 || to.sizes.empty() || to.sizes[0] != x.size(0) || to.strides[0] != x.strides()[0]) {
    return false;
  }
  int64_t own = 0, asked = to.offset;
  for (int64_t d = 1; d < x.dim(); ++d) {
    own += (x.size(d) - 1) * x.strides()[d];
  }
  for (size_t j = 1; j < to.sizes.size(); ++j) {
    asked += (to.sizes[j] - 1) * to.strides[j];
  }
  return std::max(own, asked) < x.strides()[0];
}

Rule as_strided_scatter(const Call& call) {
  const auto& x = call.tensors[0];
  const auto to = asked_for(call, 2);
  TORCH_CHECK(
      call.tensors[1].sizes() == c10::IntArrayRef(to.sizes),
      "expected src to have a size equal to the slice of self. src size = ", call.tensors[1].sizes(),
      ", slice size = ", c10::IntArrayRef(to.sizes));
  Rule rule;
  Dims in(x.dim(), Dim(kNone)), part(to.sizes.size(), Dim(kNone));
  if (first_dim_stays(x, to)) {
    in[0] = part[0] = Dim(rule.factor());
  }
  rule.operands.emplace_back(in);
  rule.operands.emplace_back(std::move(part));
  rule.results.emplace_back(std::move(in));
  rule.notes = Laid{to.offset, Sizes(x.strides().begin(), x.strides().end())};
  rule.always(strided_scatter_kernel);
  rule.passes_partial(0b11);
  return rule;
}

} // namespace

void register_view_strided(Registry& r) {
  r.add("views", {"as_strided", "as_strided_copy"}, as_strided);
  r.add("views", {"as_strided_"}, restrided);
  r.add("views", {"as_strided_scatter"}, as_strided_scatter);
  r.add(
      "views",
      {
          "resize_",
          "resize_as_",
          "set_",
          "set_.source_Storage",
          "set_.source_Storage_storage_offset",
          "set_.source_Tensor",
      },
      nullptr, {.way = Way::Refused, .why = kFrozen});
}

} // namespace shardtensor::rules
