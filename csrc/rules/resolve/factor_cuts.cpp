#include "rules/resolve/factor_cuts.h"

#include "tensor/symbolic.h"

#include <algorithm>

namespace shardtensor::rules {

namespace {

// Writes a cut whose sizes are symbols as formulas of the dim's size, if possible. With several rows of symbols, the size
// itself becomes a number.
Cut cut_of(const SymSizes& pieces, const c10::SymInt& size, int64_t per_row) {
  if (std::any_of(pieces.begin(), pieces.end(), [](const auto& n) { return !n.maybe_as_int(); })) {
    if (static_cast<int64_t>(pieces.size()) == per_row) {
      if (auto follows = cut_that_follows(pieces, size)) {
        return follows;
      }
      auto out = std::make_shared<PieceSizes>(std::vector<int64_t>(pieces.size(), 0));
      out->symbols = pieces;
      return out;
    }
    size.guard_int(__FILE__, __LINE__);
  }
  const auto numbers = guarded(pieces);
  return std::make_shared<const PieceSizes>(numbers.begin(), numbers.end());
}

auto cutting_dim(const Layout& layout, int64_t d) {
  return [&layout, d](int64_t k) { return layout.placement(k).is_shard(d); };
}

} // namespace

template <typename Cuts, typename F>
void FactorCuts::each_row(Cuts cuts, int64_t m, F f) const {
  Coordinate c(mesh_.ndim(), 0);
  while (true) {
    f(c);
    int64_t k = m - 1;
    for (; k >= 0; --k) {
      if (!cuts(k)) {
        continue;
      }
      if (++c[k] < mesh_.size(k)) {
        break;
      }
      c[k] = 0;
    }
    if (k < 0) {
      return;
    }
  }
}

bool FactorCuts::aligned(size_t i, int64_t d, int64_t m) const {
  const auto& inner = rule_.operands[i].dims[d].inner;
  const auto& t = call_.tensors[i];
  if (inner <= 1) {
    return true;
  }
  if (even_and_divisible(i, d)) {
    return true;
  }
  const auto sizes = piece_sizes(*t.layout, d, t.sym_size(d), m);
  const auto unit = inner.guard_int(__FILE__, __LINE__);
  return std::all_of(sizes.begin(), sizes.end(), [&](const auto& n) { return divides(unit, n); });
}

bool FactorCuts::even_and_divisible(size_t i, int64_t d) const {
  const auto& t = call_.tensors[i];
  return t.layout->is_even() && t.sym_size(d) % (rule_.operands[i].dims[d].inner * mesh_.size()) == 0;
}

SymSizes FactorCuts::piece_sizes(const Layout& layout, int64_t d, const c10::SymInt& size, int64_t m) const {
  SymSizes out;
  each_row(cutting_dim(layout, d), m, [&](Coordinate& c) {
    for (c[m] = 0; c[m] < mesh_.size(m); ++c[m]) {
      out.push_back(sym_extent_before(layout, m + 1, d, size, c));
    }
  });
  return out;
}

bool FactorCuts::nested_alike(int64_t m) const {
  const auto& c = choices_[m];
  for (int64_t k = 0; k < m; ++k) {
    const bool now = call_.tensors[c.donor].layout->placement(k).is_shard(c.donor_dim);
    const bool then = choices_[k].role == Choice::Role::Shard && choices_[k].factor == c.factor;
    if (now != then || (now && choices_[k].donor < 0) ||
        (now && choices_[k].donor != c.donor &&
         !same_cut(call_.tensors[choices_[k].donor].layout->cut(k), call_.tensors[c.donor].layout->cut(k)))) {
      return false;
    }
  }
  return true;
}

Cut FactorCuts::factor_cut(int64_t m) const {
  const auto& c = choices_[m];
  if (c.role != Choice::Role::Shard) {
    return nullptr;
  }
  if (has_windows(c.factor)) {
    return cut_around(m, c.factor);
  }
  if (c.donor < 0 || !nested_alike(m)) {
    return nullptr;
  }
  if (rule_.operands[c.donor].dims[c.donor_dim].reach != kNone) {
    return cut_of_readers(c, m);
  }
  const auto& t = call_.tensors[c.donor];
  const auto& inner = rule_.operands[c.donor].dims[c.donor_dim].inner;
  if (inner <= 1) {
    const auto& cut = t.layout->cut(m);
    const bool makes_views = !rule_.results.empty() && rule_.results[0].geometry;
    return cut && !cut->symbols.empty() && !makes_views ? nullptr : cut;
  }
  if (!aligned(static_cast<size_t>(c.donor), c.donor_dim, m)) {
    return nullptr; // rebalanced to even
  }
  if (even_and_divisible(static_cast<size_t>(c.donor), c.donor_dim)) {
    return nullptr;
  }
  auto sizes = piece_sizes(*t.layout, c.donor_dim, t.sym_size(c.donor_dim), m);
  for (auto& n : sizes) {
    n = n / inner;
  }
  return cut_of(sizes, t.sym_size(c.donor_dim) / inner, mesh_.size(m));
}

Cut FactorCuts::cut_of_readers(const Choice& c, int64_t m) const {
  const auto& t = call_.tensors[c.donor];
  const auto& reach = rule_.reaches[rule_.operands[c.donor].dims[c.donor_dim].reach];
  const auto size = t.size(c.donor_dim), count = factor_size(c.factor).guard_int(__FILE__, __LINE__);
  const auto each = rule_.operands[c.donor].dims[c.donor_dim].inner.guard_int(__FILE__, __LINE__);
  std::vector<int64_t> out;
  each_row(cutting_dim(*t.layout, c.donor_dim), m, [&](Coordinate& at) {
    for (at[m] = 0; at[m] < mesh_.size(m); ++at[m]) {
      const auto piece = in_units(piece_of(*t.layout, c.donor_dim, size, at, m + 1).numbers(), each);
      out.push_back(cut_through(reach, piece, size / each, count).length);
    }
  });
  return std::make_shared<const PieceSizes>(std::move(out));
}

bool FactorCuts::has_windows(int64_t f) const {
  return std::any_of(rule_.operands.begin(), rule_.operands.end(), [&](const Operand& o) {
    const auto d = dim_of(o.dims, f);
    return d >= 0 && (o.dims[d].window || o.dims[d].factor != f);
  });
}

c10::SymInt window_before(const Dim::SymWindow& w, const c10::SymInt& at) {
  if (at <= w.start) {
    return 0;
  }
  const auto beyond = plus(at, plus(-w.start, w.step - 1));
  const auto n = w.step == 1 ? beyond : beyond / w.step;
  return n < w.length ? n : w.length;
}

SymInterval FactorCuts::piece_of(
    const Layout& layout, int64_t d, const c10::SymInt& size, const Coordinate& c, int64_t end) const {
  SymInterval piece{0, size};
  for (int64_t k = 0; k < end; ++k) {
    if (layout.placement(k).is_shard(d)) {
      const auto inside = sym_piece(layout, k, piece.length, c);
      piece = {plus(piece.start, inside.start), inside.length};
    }
  }
  return piece;
}

Cut FactorCuts::cut_around(int64_t m, int64_t f) const {
  const auto outer = factor_layout(f);
  const auto size = factor_size(f);
  SymSizes out;
  bool fits = true, even = true;
  each_row(cutting_dim(*outer, 0), m, [&](Coordinate& c) {
    const auto whole = piece_of(*outer, 0, size, c, m);
    const auto n = mesh_.size(m);
    const auto end = whole.end();
    SymSizes least(n, whole.start), most(n, end);
    for (size_t i = 0; i < rule_.operands.size(); ++i) {
      const auto d = dim_of(rule_.operands[i].dims, f);
      if (d >= 0 && call_.tensors[i].layout->placement(m).is_shard(d)) {
        fits = fits && bound_boundaries(i, d, m, c, whole, least, most);
      }
    }
    auto start = whole.start;
    for (int64_t j = 1; j <= n && fits; ++j) {
      auto next = end;
      if (j < n) {
        fits = least[j] <= most[j];
        next = plus(whole.start, sym_chunk(whole.length, n, j).start);
        if (next < least[j] || next > most[j]) {
          next = next < least[j] ? least[j] : most[j];
          even = false;
        }
      }
      out.push_back(plus(next, -start));
      start = next;
    }
  });
  if (!fits || even) {
    return nullptr;
  }
  auto cut = cut_of(out, size, mesh_.size(m));
  return cut->symbols.empty() ? cut : nullptr;
}

bool FactorCuts::bound_boundaries(
    size_t i, int64_t d, int64_t m, Coordinate& c, const SymInterval& whole, SymSizes& least, SymSizes& most) const {
  const auto& t = call_.tensors[i];
  const auto& dim = rule_.operands[i].dims[d];
  for (int64_t k = 0; k < m; ++k) {
    const bool then = choices_[k].role == Choice::Role::Shard && choices_[k].factor == dim.factor;
    if (t.layout->placement(k).is_shard(d) != then) {
      return false;
    }
  }
  if (!dim.at.empty()) {
    return bound_holder(i, d, m, c, whole, least, most);
  }
  const auto size = t.sym_size(d);
  const auto w = dim.window ? *dim.window : Dim::SymWindow(0, 1, size);
  const auto place = [&](const c10::SymInt& at) { return plus(w.start, w.step == 1 ? at : at * w.step); };
  const auto held = piece_of(*t.layout, d, size, c, m);
  const auto end = held.end();
  if (held.length != window_count(w, whole) ||
      (held.length != 0 && (place(held.start) < whole.start || place(end - 1) >= whole.end()))) {
    return false;
  }
  for (c[m] = 1; c[m] < mesh_.size(m); ++c[m]) {
    const auto at = piece_of(*t.layout, d, size, c, m + 1).start;
    if (const auto after = at > held.start ? plus(place(at - 1), 1) : least[c[m]]; after > least[c[m]]) {
      least[c[m]] = after;
    }
    if (const auto until = at < end ? place(at) : most[c[m]]; until < most[c[m]]) {
      most[c[m]] = until;
    }
  }
  c[m] = 0;
  return true;
}

bool FactorCuts::bound_holder(
    size_t i, int64_t d, int64_t m, Coordinate& c, const SymInterval& whole, SymSizes& least, SymSizes& most) const {
  const auto& t = call_.tensors[i];
  const auto& index = rule_.operands[i].dims[d].at[0].index;
  const auto size = t.sym_size(d);
  const auto held = piece_of(*t.layout, d, size, c, m);
  if (held.length == 0) {
    return index < whole.start || index >= whole.end();
  }
  for (c[m] = 1; c[m] < mesh_.size(m); ++c[m]) {
    const bool before = piece_of(*t.layout, d, size, c, m + 1).start > held.start; // than this rank is the holder
    (before ? least : most)[c[m]] = before ? plus(index, 1) : index;
  }
  c[m] = 0;
  return index >= whole.start && index < whole.end();
}

c10::SymInt FactorCuts::factor_size(int64_t f) const {
  if (rule_.factors[f].size >= 0) {
    return rule_.factors[f].size;
  }
  for (size_t i = 0; i < rule_.operands.size(); ++i) {
    const auto d = dim_of(rule_.operands[i].dims, f);
    if (d >= 0 && rule_.operands[i].dims[d].factor == f) {
      const auto& inner = rule_.operands[i].dims[d].inner;
      return call_.tensors[i].sym_size(d) / (inner == 0 ? c10::SymInt(1) : inner);
    }
  }
  return 0;
}

LayoutPtr FactorCuts::factor_layout(int64_t f) const {
  Placements placements(mesh_.ndim(), Placement::replicate());
  Cuts cuts(mesh_.ndim());
  for (size_t m = 0; m < cuts_.size(); ++m) { // the mesh dims decided so far
    if (choices_[m].role == Choice::Role::Shard && choices_[m].factor == f) {
      placements[m] = Placement::shard(0, choices_[m].split_factor);
      cuts[m] = cuts_[m];
    }
  }
  return Layout::make(call_.tensors[0].layout->mesh_ptr(), std::move(placements), std::move(cuts));
}

bool FactorCuts::cuts_along(int64_t m, const Dim& dim) const {
  return choices_[m].role == Choice::Role::Shard && dim.lies_along(choices_[m].factor);
}

Cut FactorCuts::dim_cut(const Dim& dim, int64_t m) const {
  if (dim.inner == 1 && !dim.window && dim.at.empty()) {
    return cuts_[m];
  }
  const auto size = dim.factor == kNone ? c10::SymInt(1) : factor_size(dim.factor);
  const auto layout = dim.factor == kNone ? Layout::replicated(call_.tensors[0].layout->mesh_ptr()) : factor_layout(dim.factor);
  if (!dim.window && dim.at.empty() && layout->is_even() && size % mesh_.size() == 0) {
    return nullptr;
  }
  c10::SmallVector<std::pair<LayoutPtr, c10::SymInt>, 1> places; // the layouts and indices of the factors of Dim::at
  for (const auto& at : dim.at) {
    places.emplace_back(factor_layout(at.factor), factor_size(at.factor));
  }
  const auto lies_at = [&](const Coordinate& c) {
    for (size_t i = 0; i < places.size(); ++i) {
      const auto piece = piece_of(*places[i].first, 0, places[i].second, c, m + 1);
      if (dim.at[i].index < piece.start || dim.at[i].index >= piece.end()) {
        return false;
      }
    }
    return true;
  };
  // The size of each piece at mesh dim m: the sum over the pieces that later mesh dims cut it into.
  SymSizes out;
  each_row(
      [&](int64_t k) { return cuts_along(k, dim); }, m,
      [&](Coordinate& c) {
        for (c[m] = 0; c[m] < mesh_.size(m); ++c[m]) {
          out.push_back(lies_at(c) ? measure(*layout, size, c, m, dim) : c10::SymInt(0));
        }
      });
  const auto of_factor = dim.window ? dim.window->length : size;
  return cut_of(out, dim.inner == 1 ? of_factor : of_factor * dim.inner, mesh_.size(m));
}

c10::SymInt FactorCuts::measure(
    const Layout& layout, const c10::SymInt& size, const Coordinate& c, int64_t m, const Dim& dim) const {
  const auto piece = piece_of(layout, 0, size, c, m + 1);
  const auto count = dim.window ? window_count(*dim.window, piece) : piece.length;
  if (!count.maybe_as_int()) {
    (void)dim.inner.guard_int(__FILE__, __LINE__); // otherwise the piece would depend on two sizes
  }
  return dim.inner == 1 ? count : count * dim.inner;
}

c10::SymInt FactorCuts::window_count(const Dim::SymWindow& w, const SymInterval& piece) {
  const auto before = window_before(w, piece.start), until = window_before(w, piece.end());
  return plus(until, -before);
}

} // namespace shardtensor::rules
