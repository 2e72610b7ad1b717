// Fourier transforms: the transformed dims stay whole, every other dim may be cut, and summands pass. If a transformed dim is
// cut, another dim is cut instead, by one exchange: the first (a batch), or else the last, that has an index for each rank. Of
// several transformed dims, those that are whole on every rank may go first, and the rest in a second call. If no other dim can
// be cut, one long signal is taken as rows and columns.
#include "rules/kernel_utils.h"
#include "rules/pad_empty.h"
#include "rules/registry.h"
#include "tensor/move.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace shardtensor::rules {

namespace {

Rule transform(const Call& call) {
  Rule rule;
  const auto& x = call.tensors[0];
  auto dims = fresh_dims(rule, x.dim());
  bool cut = false;
  for (const auto given : call.ints(call.position("dim"))) {
    const auto d = wrap_dim(given, x.dim());
    dims[d] = Dim(kNone);
    cut = cut || x.layout->shards(d);
  }
  for (int64_t i = 0; i < x.dim() && cut; ++i) {
    const auto d = i ? x.dim() - i : 0;
    if (dims[d].factor != kNone) {
      rule.spread.push_back(dims[d].factor);
    }
  }
  rule.operands.emplace_back(dims);
  rule.results.emplace_back(dims);
  add_outputs(call, rule);
  rule.jointly_linear(with_outputs(call, 0b1));
  if (rule.operands.size() == 1) { // MKL refuses empty pieces before torch 2.15
    rule.kernel = call_op_nonempty;
    rule.kernel_if = is_empty;
  }
  return rule;
}

bool has(const Sizes& dims, int64_t d) {
  return std::find(dims.begin(), dims.end(), d) != dims.end();
}

// Whether one of the tensor dims `dims` has an index for each rank if mesh dim m cuts it too.
bool takes_cut(const Layout& layout, c10::SymIntArrayRef sizes, const Sizes& dims, int64_t m) {
  return std::any_of(dims.begin(), dims.end(), [&](int64_t d) {
    return sizes[d] >= layout.ranks_where([&](int64_t k) { return k == m || layout.placement(k).is_shard(d); });
  });
}

// From complex numbers to complex ones, from real ones, or to real ones. torch transforms the last dim first if it starts from
// real numbers, and last if it ends with them.
enum class Transform : uint8_t { C2C, R2C, C2R };

// ---- one signal that is cut: each rank has a part ----

LayoutPtr recut(const at::Tensor& t, int64_t from, int64_t to) {
  const auto& layout = as_shard_tensor(t)->layout();
  return layout.with_where([&](int64_t m) { return layout.placement(m).is_shard(from); }, Placement::shard(to));
}

// A signal of n = rows * columns numbers: its transform is that of the rows' numbers, column by column, then of the columns'.
struct FactoredSignal {
  int64_t dim, rows, columns;
};

// If the transformed dim is cut, no other dim has an index for each rank, and n has two factors that do. A short signal is
// gathered: that takes one message instead of three.
std::optional<FactoredSignal> grid_of(const at::Tensor& self, const Sizes& dims, const c10::SymInt& results) {
  constexpr int64_t kShort = 1 << 12;
  const auto& layout = as_shard_tensor(self)->layout();
  if (dims.size() != 1 || !layout.shards(dims[0]) || results < kShort) {
    return std::nullopt;
  }
  const auto d = dims[0];
  const auto ranks = layout.pieces_of(d);
  if (layout.any_mesh_dim([&](int64_t m) { return layout.placement(m).is_partial() || layout.placement(m).split_factor != 1; })) {
    return std::nullopt;
  }
  for (int64_t e = 0; e < self.dim(); ++e) {
    if (e != d && self.sym_size(e) >= ranks * layout.pieces_of(e)) {
      return std::nullopt; // cut instead, by the rule
    }
  }
  const auto n = results.guard_int(__FILE__, __LINE__);
  for (auto rows = static_cast<int64_t>(std::sqrt(static_cast<double>(n))); rows >= ranks; --rows) {
    if (n % rows == 0) {
      return FactoredSignal{d, rows, n / rows};
    }
  }
  return std::nullopt;
}

// exp(-2 pi i row column / n), or its conjugate, where `like`, [.., rows, columns, ..], has its columns.
at::Tensor twiddles(const at::Tensor& like, const FactoredSignal& grid, bool forward) {
  const auto& has = as_shard_tensor(like)->layout();
  const auto cut = [&](int64_t m) { return has.placement(m).is_shard(grid.dim + 1); };
  const auto layout = Layout::replicated(has.mesh_ptr())->with_where(cut, Placement::shard(1));
  const auto columns = layout->intervals(1, grid.columns, layout->mesh().coordinate())[0];
  const auto numbers = as_shard_tensor(like)->local().options().dtype(at::kLong);
  const auto n = grid.rows * grid.columns;
  const auto turns = at::arange(grid.rows, numbers)
                         .unsqueeze(1)
                         .mul(at::arange(columns.start, columns.end(), numbers))
                         .remainder(n)
                         .to(at::kDouble);
  const auto angles = turns.mul((forward ? -2 : 2) * std::numbers::pi / static_cast<double>(n));
  const auto local = at::polar(at::ones_like(angles), angles).to(like.scalar_type());
  std::vector<int64_t> sizes{grid.rows, grid.columns}, broad = sizes;
  broad.resize(like.dim() - grid.dim, 1);
  return wrap(local, layout, sizes, {grid.columns, 1}).view(broad);
}

// Of the first `kept` frequencies. Calls no op that torch composes of others: in a graph such a call has no rule. Three
// exchanges, and one before if a rank's piece is not whole rows. No rank ever has more than its part.
at::Tensor transformed(
    const std::string& op,
    const at::Tensor& self,
    const FactoredSignal& grid,
    int64_t normalization,
    bool forward,
    int64_t kept) {
  const auto d = grid.dim;
  const auto exchanged = [&](const at::Tensor& t, int64_t from, int64_t to) {
    return moved(t, recut(t, from, to), MoveCause{op, "self", "rows of one signal are exchanged for columns"});
  };
  const auto columns = (kept + grid.rows - 1) / grid.rows;
  auto split = self.sym_sizes().vec(), joined = split;
  split[d] = grid.rows;
  split.insert(split.begin() + d + 1, grid.columns);
  joined[d] = grid.rows * columns;
  auto t = exchanged(self.view_symint(split), d, d + 1);
  t = t.is_complex() ? t : at::_to_copy(t, c10::toComplexType(t.scalar_type()));
  t = at::_fft_c2c(t, {d}, normalization, forward);
  t = exchanged(t * twiddles(t, grid, forward), d + 1, d);
  t = at::slice(at::_fft_c2c(t, {d + 1}, normalization, forward), d + 1, 0, columns);
  t = at::clone(exchanged(t, d, d + 1).transpose(d, d + 1), at::MemoryFormat::Contiguous);
  t = at::slice(t.view_symint(joined), d, 0, kept);  // frequency row + rows * column
  return at::clone(t, at::MemoryFormat::Contiguous); // not a view, as torch's
}

// From real numbers: only the requested frequencies. To real numbers: all frequencies; the missing ones are the conjugates of
// the mirrored ones.
template <Transform kind>
std::optional<at::Tensor> of_one_signal(const at::Tensor& self, const Sizes& dims, c10::ArrayRef<c10::IValue> arguments) {
  const auto normalization = arguments[2].toInt();
  if constexpr (kind == Transform::C2R) {
    const auto size = arguments[3].toSymInt();
    const auto grid = grid_of(self, dims, size);
    if (!grid || self.sym_size(grid->dim) != size / 2 + 1) {
      return std::nullopt;
    }
    const auto d = grid->dim, n = grid->rows * grid->columns;
    const auto rest = at::_conj(at::slice(self, d, 1, n - n / 2).flip(d));
    const auto all = transformed("aten::_fft_c2r", at::cat({self, rest}, d), *grid, normalization, false, n);
    return at::clone(at::view_as_real(all).select(-1, 0), at::MemoryFormat::Contiguous);
  } else {
    const auto grid = dims.size() == 1 ? grid_of(self, dims, self.sym_size(dims[0])) : std::nullopt;
    if (!grid) {
      return std::nullopt;
    }
    const auto n = grid->rows * grid->columns;
    if constexpr (kind == Transform::C2C) {
      return transformed("aten::_fft_c2c", self, *grid, normalization, arguments[3].toBool(), n);
    } else {
      return transformed("aten::_fft_r2c", self, *grid, normalization, true, arguments[3].toBool() ? n / 2 + 1 : n);
    }
  }
}

// ---- several signals ----

struct TransformStages {
  Sizes first, rest;
};
// Nothing if one call sends no more. `dims`: the transformed dims, in the call's order.
std::optional<TransformStages> stages_of(Transform kind, const Layout& layout, c10::SymIntArrayRef sizes, const Sizes& dims) {
  Sizes cut, whole, others; // of `dims`; the other dims
  for (int64_t d = 0; d < static_cast<int64_t>(sizes.size()); ++d) {
    if (!has(dims, d)) {
      others.push_back(d);
    }
  }
  for (const auto d : dims) {
    (layout.shards(d) ? cut : whole).push_back(d);
  }
  if (cut.empty() || dims.size() == 1) {
    return std::nullopt;
  }
  const auto last = dims.back();
  auto held = sizes.vec(); // before an exchange
  held[last] = kind == Transform::R2C ? held[last] / 2 + 1 : held[last];
  const auto take_cuts = [&](const Sizes& by) {
    for (int64_t m = 0; m < layout.ndim(); ++m) {
      const auto& p = layout.placement(m);
      if (p.is_shard() && has(cut, p.dim) && !takes_cut(layout, held, by, m)) {
        return false;
      }
    }
    return true;
  };
  const Sizes last_alone{last}, before(dims.begin(), dims.end() - 1);
  if (kind == Transform::C2R) {
    const bool others_cut = cut.size() > 1 || cut[0] != last;
    return take_cuts(others_cut ? others : before) == others_cut ? std::nullopt
                                                                 : std::optional(TransformStages{before, last_alone});
  }
  const bool may_begin = kind == Transform::C2C ? !whole.empty() : !layout.shards(last);
  if (may_begin && take_cuts(whole)) {
    return TransformStages{whole, cut};
  }
  return take_cuts(others) ? std::nullopt : std::optional(TransformStages{last_alone, before});
}

// `arguments`: self, dims, normalization, and one more.
template <Transform kind>
std::optional<at::Tensor> as_calls(c10::ArrayRef<c10::IValue> arguments) {
  const auto& self = arguments[0].toTensor();
  const auto* impl = as_shard_tensor(self);
  if (!impl) {
    return std::nullopt;
  }
  Sizes dims;
  for (const auto& given : arguments[1].toSymIntVector()) {
    const auto d = given.guard_int(__FILE__, __LINE__), at = d < 0 ? d + self.dim() : d;
    if (at < 0 || at >= self.dim() || has(dims, at)) {
      return std::nullopt;
    }
    dims.push_back(at);
  }
  if (auto out = of_one_signal<kind>(self, dims, arguments)) {
    return out;
  }
  const auto stages = stages_of(kind, impl->layout(), self.sym_sizes(), dims);
  if (!stages) {
    return std::nullopt;
  }
  const auto normalization = arguments[2].toInt();
  const auto& [first, rest] = *stages;
  if constexpr (kind == Transform::C2C) {
    const auto forward = arguments[3].toBool();
    return at::_fft_c2c(at::_fft_c2c(self, first, normalization, forward), rest, normalization, forward);
  } else if constexpr (kind == Transform::R2C) {
    const auto onesided = arguments[3].toBool();
    return at::_fft_c2c(at::_fft_r2c(self, first, normalization, onesided), rest, normalization, /*forward=*/true);
  } else {
    const auto last = arguments[3].toSymInt();
    return at::_fft_c2r_symint(at::_fft_c2c(self, first, normalization, /*forward=*/false), rest, normalization, last);
  }
}

} // namespace

void register_spectral(Registry& r) {
  Options o{.asks_order = true};
  r.add("spectral", {"_fft_c2c.out", "_fft_c2r.out", "_fft_r2c.out"}, transform, o);
  o.calls = as_calls<Transform::C2C>;
  r.add("spectral", {"_fft_c2c"}, transform, o);
  o.calls = as_calls<Transform::C2R>;
  r.add("spectral", {"_fft_c2r"}, transform, o);
  o.calls = as_calls<Transform::R2C>;
  o.autograd = formulas::fft_r2c;
  r.add("spectral", {"_fft_r2c"}, transform, o);
  r.add("spectral", {"istft"}, kAsOtherOps, {.autograd = formulas::istft});
  r.add("spectral", {"stft"}, kAsOtherOps, {.autograd = formulas::stft});
}

} // namespace shardtensor::rules
