#include "rules/resolve.h"

#include "redistribute/plan.h"

#include <algorithm>
#include <numeric>

namespace shardtensor::rules {

namespace {

// How one mesh dim is used by the op.
struct Choice {
  enum class Kind : uint8_t { Shard, Partial, Replicate };
  Kind kind = Kind::Replicate;
  int64_t factor = kNone; // Shard
  int64_t donor = -1;     // Shard: the operand whose cut the others follow
  int64_t donor_dim = -1;
  int32_t split_factor = 1;
  const Linear* group = nullptr; // Partial
  Placement partial;             // Partial
};

int64_t dim_of(const Dims& dims, int64_t factor) {
  for (size_t d = 0; d < dims.size(); ++d) {
    if (dims[d].factor == factor) {
      return static_cast<int64_t>(d);
    }
  }
  return -1;
}

class Resolver {
 public:
  Resolver(const Call& call, const Rule& rule) : call_(call), rule_(rule), mesh_(call.mesh) {
    for (const auto& t : call.tensors) {
      bytes_.push_back(t.bytes);
    }
  }

  c10::intrusive_ptr<Solution> run() {
    decide();
    if (!reducible()) {
      summands_pass_ = false;
      decide();
    }
    auto s = c10::make_intrusive<Solution>();
    s->factor_mesh_dims.assign(rule_.factors.size(), 0);
    bool kernel = rule_.always_kernel;
    for (int64_t m = 0; m < mesh_.ndim(); ++m) {
      const auto& c = choices_[m];
      if (c.kind == Choice::Kind::Shard) {
        s->factor_mesh_dims[c.factor] |= uint64_t{1} << m;
        kernel |= rule_.factors[c.factor].kernel;
        s->shards = true;
      }
    }
    s->kernel_if = kernel ? nullptr : rule_.kernel_if;
    s->kernel = kernel || rule_.kernel_if ? rule_.kernel : nullptr;
    s->put_back = kernel ? rule_.put_back : nullptr;
    s->notes = rule_.notes;
    for (size_t i = 0; i < call_.tensors.size(); ++i) {
      const auto& t = call_.tensors[i];
      auto need = operand_layout(i);
      if (!need || need.get() == t.layout) {
        s->operands.emplace_back();
        continue;
      }
      s->moves = true;
      if (t.mutated) {
        s->write_back.add(i);
      }
      s->operands.push_back(std::move(need));
    }
    for (size_t r = 0; r < rule_.results.size(); ++r) {
      s->results.push_back(result(rule_.results[r]));
    }
    s->geometry = !rule_.results.empty() &&
                  std::all_of(rule_.results.begin(), rule_.results.end(), [](const Result& r) { return r.geometry.has_value(); });
    s->replicated = Layout::replicated(call_.tensors[0].layout->mesh_ptr());
    s->size_args = rule_.size_args;
    if (s->shards) {
      find_alike(*s);
    }
    s->sized = weighed_ || (call_.reads() & Reads::kSizes);
    return s;
  }

 private:
  void decide() {
    choices_.clear();
    cuts_.clear();
    for (int64_t m = 0; m < mesh_.ndim(); ++m) {
      choices_.push_back(choose(m));
      cuts_.push_back(factor_cut(m));
    }
  }

  // Without a kernel the op itself compares what is not sharded, whatever the pieces.
  void find_alike(Solution& s) const {
    for (int64_t f = 0; f < static_cast<int64_t>(rule_.factors.size()); ++f) {
      if (!s.factor_mesh_dims[f] && (!s.kernel || rule_.factors[f].whole)) {
        continue;
      }
      std::optional<Solution::Indexed> first;
      for (size_t i = 0; i < call_.tensors.size(); ++i) {
        const auto& dims = rule_.operands[i].dims;
        const auto d = dim_of(dims, f);
        if (d < 0 || dims[d].window || is_output(i)) {
          continue;
        }
        const Solution::Indexed here{static_cast<int32_t>(i), static_cast<int16_t>(d), dims[d].inner};
        if (first) {
          s.alike.emplace_back(*first, here);
        } else {
          first = here;
        }
      }
    }
  }

  // Whether no operand and no result would hold summands of two kinds, as where maxima pass through while a sum is cut.
  bool reducible() const {
    for (int64_t m = 1; m < mesh_.ndim(); ++m) {
      for (int64_t k = 0; k < m; ++k) {
        for (size_t i = 0; i < call_.tensors.size(); ++i) {
          if (!placement_of(i, k, choices_[k]).commutes_with(placement_of(i, m, choices_[m]))) {
            return false;
          }
        }
        for (const auto& r : rule_.results) {
          if (!placement_of(r, k).commutes_with(placement_of(r, m))) {
            return false;
          }
        }
      }
    }
    return true;
  }

  Placement placement_of(size_t i, int64_t m, const Choice& c) const {
    const auto& operand = rule_.operands[i];
    switch (c.kind) {
      case Choice::Kind::Shard: {
        const auto d = dim_of(operand.dims, c.factor);
        if (d >= 0) {
          return Placement::shard(d, c.split_factor);
        }
        return operand.summand || call_.tensors[i].mutated ? summands(c.factor, operand.reduce) : Placement::replicate();
      }
      case Choice::Kind::Partial:
        return c.group->operands.has(i) || is_output(i) ? c.partial : Placement::replicate();
      case Choice::Kind::Replicate:
        return Placement::replicate();
    }
    return {};
  }

  // What a result that lacks the sharded factor holds.
  Placement summands(int64_t factor, const std::optional<std::optional<ReduceOp>>& override_) const {
    const auto& f = rule_.factors[factor];
    const auto reduce = override_ ? *override_ : f.reduce;
    return reduce ? Placement::partial(*reduce, f.norm_order) : Placement::replicate();
  }

  bool is_output(size_t i) const {
    return call_.tensors[i].output;
  }

  // Bytes that the operands send if mesh dim m is used so, the others staying as they are.
  double cost(int64_t m, const Choice& c) const {
    double sum = 0;
    for (size_t i = 0; i < call_.tensors.size(); ++i) {
      if (rule_.operands[i].free) {
        continue;
      }
      const auto& t = call_.tensors[i];
      const auto want = placement_of(i, m, c);
      const auto& have = t.layout->placement(m);
      if (want == have) {
        if (c.kind == Choice::Kind::Shard && have.is_shard() && !follows_donor(i, m, c)) {
          sum += recut_cost(i, m);
        }
        continue;
      }
      sum += step_cost(i, m, have, want);
      if (t.mutated) {
        sum += kLatency + step_cost(i, m, want, have);
      }
    }
    return sum;
  }

  double held(size_t i, int64_t m) const {
    double b = bytes_[i];
    for (int64_t k = 0; k < mesh_.ndim(); ++k) {
      if (k != m && call_.tensors[i].layout->placement(k).is_shard()) {
        b /= static_cast<double>(mesh_.size(k));
      }
    }
    return b;
  }
  double recut_cost(size_t i, int64_t m) const {
    return cost_of(StepKind::AllToAll, held(i, m) / static_cast<double>(mesh_.size(m)), mesh_.size(m));
  }
  double step_cost(size_t i, int64_t m, const Placement& have, const Placement& want) const {
    if (have.is_replicate()) {
      return 0;
    }
    if (have.is_partial()) {
      return cost_of(want.is_shard() ? StepKind::ReduceScatter : StepKind::AllReduce, held(i, m), mesh_.size(m));
    }
    const auto piece = held(i, m) / static_cast<double>(mesh_.size(m));
    return cost_of(want.is_shard() ? StepKind::AllToAll : StepKind::AllGather, piece, mesh_.size(m));
  }

  // Whether operand i, sharded on the factor at mesh dim m, already has the donor's cut.
  bool follows_donor(size_t i, int64_t m, const Choice& c) const {
    const auto& donor = *call_.tensors[c.donor].layout;
    const auto& mine = *call_.tensors[i].layout;
    const auto& donor_dim = rule_.operands[c.donor].dims[c.donor_dim];
    const auto& my_dim = rule_.operands[i].dims[dim_of(rule_.operands[i].dims, c.factor)];
    if (donor_dim.window || my_dim.window) {
      return true; // cut_around() does what it can
    }
    if (donor_dim.inner != 1 || my_dim.inner != 1) {
      return aligned(static_cast<size_t>(c.donor), c.donor_dim, m);
    }
    return same_cut(donor.cut(m), mine.cut(m));
  }

  // Whether every piece of operand i along dim d holds whole indices of its factor.
  bool aligned(size_t i, int64_t d, int64_t m) const {
    const auto inner = rule_.operands[i].dims[d].inner;
    const auto& t = call_.tensors[i];
    if (inner <= 1) {
      return true;
    }
    if (t.layout->is_even() && t.size(d) % (inner * mesh_.size()) == 0) {
      return true;
    }
    for (const auto s : piece_sizes(*t.layout, d, t.size(d), m)) {
      if (s % inner) {
        return false;
      }
    }
    return true;
  }

  // The sizes of a cut as a table, even ones too: one row per coordinate of the earlier mesh dims that cut the dim.
  std::vector<int64_t> piece_sizes(const Layout& layout, int64_t d, int64_t size, int64_t m) const {
    std::vector<int64_t> out;
    each_row(layout, d, m, [&](Coordinate& c) {
      const auto extent = layout.extent_before(m, d, size, c);
      for (c[m] = 0; c[m] < mesh_.size(m); ++c[m]) {
        out.push_back(layout.split_size(m, extent, c));
      }
    });
    return out;
  }

  template <typename F>
  void each_row(const Layout& layout, int64_t d, int64_t m, F f) const {
    Coordinate c(mesh_.ndim(), 0);
    while (true) {
      f(c);
      int64_t k = m - 1;
      for (; k >= 0; --k) {
        if (!layout.placement(k).is_shard(d)) {
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

  bool can_shard(int64_t factor, int32_t split_factor) const {
    const auto& f = rule_.factors[factor];
    if (f.whole || (f.kernel && split_factor > 1)) {
      return false;
    }
    if (split_factor > 1) {
      const auto bent = [&](const Dims& dims) {
        const auto d = dim_of(dims, factor);
        return d >= 0 && (dims[d].inner != 1 || dims[d].window);
      };
      return std::none_of(rule_.operands.begin(), rule_.operands.end(), [&](const Operand& o) { return bent(o.dims); }) &&
             std::none_of(rule_.results.begin(), rule_.results.end(), [&](const Result& r) { return bent(r.dims); });
    }
    return true;
  }

  // What the op writes must be able to hold the result: a written operand that stays whole cannot take summands.
  bool holds_result(int64_t m, const Choice& c) const {
    for (size_t i = 0; i < call_.tensors.size(); ++i) {
      if (!call_.tensors[i].mutated) {
        continue;
      }
      if (c.kind == Choice::Kind::Shard && call_.tensors[i].layout->placement(m).reduce == ReduceOp::Norm) {
        return false; // what goes back to it must be on all ranks: see make_partial()
      }
      if (is_output(i)) {
        continue;
      }
      if (c.kind == Choice::Kind::Partial && !c.group->operands.has(i)) {
        return false;
      }
      if (c.kind == Choice::Kind::Shard && dim_of(rule_.operands[i].dims, c.factor) < 0 &&
          summands(c.factor, rule_.operands[i].reduce).is_partial() && !rule_.operands[i].summand) {
        return false;
      }
    }
    return true;
  }

  // A sum of bools is true or false, not a number: what an op makes of the summands does not add up to what it makes of it.
  bool adds_up(const Linear& group, const Placement& p) const {
    if (group.any_reduction || (p.reduce != ReduceOp::Sum && p.reduce != ReduceOp::Avg)) {
      return true;
    }
    for (size_t i = 0; i < call_.tensors.size(); ++i) {
      if (group.operands.has(i) && call_.tensors[i].dtype == at::kBool && !is_output(i)) {
        return false;
      }
    }
    return true;
  }

  // True if every operand of the group that the op reads is placed as `p`. (A norm's summand is never negative; another value
  // may be.)
  bool all_hold(const Linear& group, int64_t m, const Placement& p) const {
    for (size_t i = 0; i < call_.tensors.size(); ++i) {
      if (group.operands.has(i) && !is_output(i) && call_.tensors[i].layout->placement(m) != p) {
        return false;
      }
    }
    return true;
  }

  Choice choose(int64_t m) {
    c10::SmallVector<Choice, 4> candidates;
    for (size_t i = 0; i < call_.tensors.size(); ++i) {
      const auto& p = call_.tensors[i].layout->placement(m);
      if (p.is_shard() && p.dim < static_cast<int64_t>(rule_.operands[i].dims.size())) {
        const auto f = rule_.operands[i].dims[p.dim].factor;
        if (f == kNone || !can_shard(f, p.split_factor)) {
          continue;
        }
        auto* known = std::find_if(candidates.begin(), candidates.end(), [&](const Choice& c) {
          return c.kind == Choice::Kind::Shard && c.factor == f;
        });
        Choice c;
        c.kind = Choice::Kind::Shard;
        c.factor = f;
        c.donor = static_cast<int64_t>(i);
        c.donor_dim = p.dim;
        c.split_factor = p.split_factor;
        if (known == candidates.end()) {
          candidates.push_back(c);
        } else if (!call_.tensors[known->donor].mutated && (call_.tensors[i].mutated || bytes_[i] > bytes_[known->donor])) {
          *known = c;
        }
      } else if (p.is_partial() && !rule_.operands[i].free && summands_pass_) {
        for (const auto& group : rule_.linear) {
          if (!group.operands.has(i) || !group.passes(p) || !adds_up(group, p) ||
              (p.reduce == ReduceOp::Norm && !all_hold(group, m, p))) {
            continue;
          }
          Choice c;
          c.kind = Choice::Kind::Partial;
          c.group = &group;
          c.partial = p;
          candidates.push_back(c);
        }
      }
    }
    candidates.erase(
        std::remove_if(candidates.begin(), candidates.end(), [&](const Choice& c) { return !holds_result(m, c); }),
        candidates.end());
    candidates.emplace_back();
    add_spread(m, candidates);
    if (candidates.size() == 1) {
      return candidates[0];
    }
    size_t best = 0;
    double least = cost(m, candidates[0]);
    for (size_t i = 1; i < candidates.size() && least > 0; ++i) {
      const auto next = cost(m, candidates[i]);
      if (next < least) {
        least = next;
        best = i;
      }
    }
    weighed_ |= least > 0;
    return candidates[best];
  }

  // To shard a factor that no operand is sharded on has no donor: the cut is even.
  void add_spread(int64_t m, c10::SmallVectorImpl<Choice>& candidates) const {
    const auto moves = [&](size_t i) { return call_.tensors[i].layout->placement(m).is_shard() && !rule_.operands[i].free; };
    bool any = false;
    for (size_t i = 0; i < call_.tensors.size(); ++i) {
      any |= moves(i);
    }
    for (const auto f : rule_.spread) {
      const bool known = std::any_of(candidates.begin(), candidates.end(), [&](const Choice& c) { return c.factor == f; });
      if (any && !known && factor_size(f) >= mesh_.size(m)) {
        Choice c;
        c.kind = Choice::Kind::Shard;
        c.factor = f;
        candidates.push_back(c);
      }
    }
  }

  // The earlier mesh dims that shard the factor must be the ones that cut the donor's dim, for its rows to mean the same.
  bool nested_alike(int64_t m) const {
    const auto& c = choices_[m];
    for (int64_t k = 0; k < m; ++k) {
      const bool now = call_.tensors[c.donor].layout->placement(k).is_shard(c.donor_dim);
      const bool then = choices_[k].kind == Choice::Kind::Shard && choices_[k].factor == c.factor;
      if (now != then || (now && choices_[k].donor < 0) ||
          (now && choices_[k].donor != c.donor &&
           !same_cut(call_.tensors[choices_[k].donor].layout->cut(k), call_.tensors[c.donor].layout->cut(k)))) {
        return false;
      }
    }
    return true;
  }

  // The cut in units of the factor: null is even in those units.
  Cut factor_cut(int64_t m) const {
    const auto& c = choices_[m];
    if (c.kind != Choice::Kind::Shard) {
      return nullptr;
    }
    if (has_windows(c.factor)) {
      return cut_around(m, c.factor);
    }
    if (c.donor < 0 || !nested_alike(m)) {
      return nullptr;
    }
    const auto& t = call_.tensors[c.donor];
    const auto inner = rule_.operands[c.donor].dims[c.donor_dim].inner;
    if (inner <= 1) {
      return t.layout->cut(m);
    }
    if (!aligned(static_cast<size_t>(c.donor), c.donor_dim, m)) {
      return nullptr; // rebalanced to even
    }
    auto sizes = piece_sizes(*t.layout, c.donor_dim, t.size(c.donor_dim), m);
    for (auto& s : sizes) {
      s /= inner;
    }
    return std::make_shared<const std::vector<int64_t>>(std::move(sizes));
  }

  // Whether some operand has a part of the factor only.
  bool has_windows(int64_t f) const {
    return std::any_of(rule_.operands.begin(), rule_.operands.end(), [&](const Operand& o) {
      const auto d = dim_of(o.dims, f);
      return d >= 0 && o.dims[d].window;
    });
  }

  Interval piece_of(const Layout& layout, int64_t d, int64_t size, const Coordinate& c, int64_t end) const {
    Interval piece{0, size};
    for (int64_t k = 0; k < end; ++k) {
      if (layout.placement(k).is_shard(d)) {
        const auto inside = layout.split(k, piece.length, c);
        piece = {piece.start + inside[0].start, inside[0].length};
      }
    }
    return piece;
  }

  // A cut of the factor at mesh dim m that leaves the pieces of all operands where they are, as even as that allows.
  // Null, which is even, where there is none (cat of two tensors with rows on the same ranks).
  Cut cut_around(int64_t m, int64_t f) const {
    const auto outer = factor_layout(f);
    std::vector<int64_t> out;
    bool fits = true;
    each_row(*outer, 0, m, [&](Coordinate& c) {
      const auto whole = piece_of(*outer, 0, factor_size(f), c, m);
      const auto n = mesh_.size(m);
      std::vector<int64_t> least(n, whole.start), most(n, whole.start + whole.length);
      for (size_t i = 0; i < rule_.operands.size(); ++i) {
        const auto d = dim_of(rule_.operands[i].dims, f);
        if (d >= 0 && call_.tensors[i].layout->placement(m).is_shard(d)) {
          fits = fits && bound_boundaries(i, d, m, c, whole, least, most);
        }
      }
      int64_t start = whole.start;
      for (int64_t j = 1; j <= n; ++j) {
        const auto even = j < n ? whole.start + chunk(whole.length, n, j).start : whole.start + whole.length;
        fits = fits && (j == n || least[j] <= most[j]);
        const auto next = j < n ? std::max(least[j], std::min(most[j], even)) : even;
        out.push_back(next - start);
        start = next;
      }
    });
    return fits ? std::make_shared<const std::vector<int64_t>>(std::move(out)) : nullptr;
  }

  // Piece j of the factor's interval `whole` may begin in [least[j], most[j]] for operand i's pieces to stay. False: they cannot.
  bool bound_boundaries(
      size_t i, int64_t d, int64_t m, Coordinate& c, Interval whole, std::vector<int64_t>& least, std::vector<int64_t>& most)
      const {
    const auto& t = call_.tensors[i];
    const auto& dim = rule_.operands[i].dims[d];
    for (int64_t k = 0; k < m; ++k) {
      const bool then = choices_[k].kind == Choice::Kind::Shard && choices_[k].factor == dim.factor;
      if (t.layout->placement(k).is_shard(d) != then) {
        return false;
      }
    }
    const auto w = dim.window ? *dim.window : Dim::Window{0, 1, t.size(d)};
    const auto held = piece_of(*t.layout, d, t.size(d), c, m);
    const auto end = held.start + held.length;
    if (held.length != window_count(w, whole) || (held.length && (w.start + held.start * w.step < whole.start ||
                                                                  w.start + (end - 1) * w.step >= whole.start + whole.length))) {
      return false;
    }
    for (c[m] = 1; c[m] < mesh_.size(m); ++c[m]) {
      const auto runs = t.layout->split(m, held.length, c);
      const auto at = held.start + runs[0].start;
      if (at > held.start) {
        least[c[m]] = std::max(least[c[m]], w.start + (at - 1) * w.step + 1);
      }
      if (at < end) {
        most[c[m]] = std::min(most[c[m]], w.start + at * w.step);
      }
    }
    c[m] = 0;
    return true;
  }

  int64_t factor_size(int64_t f) const {
    if (rule_.factors[f].size >= 0) {
      return rule_.factors[f].size;
    }
    for (size_t i = 0; i < rule_.operands.size(); ++i) {
      const auto d = dim_of(rule_.operands[i].dims, f);
      if (d >= 0) {
        return call_.tensors[i].size(d) / std::max<int64_t>(rule_.operands[i].dims[d].inner, 1);
      }
    }
    return 0;
  }

  // The layout of the factor alone, as if it were dim 0 of a tensor: what windows and inner sizes are computed from.
  LayoutPtr factor_layout(int64_t f) const {
    Placements placements(mesh_.ndim(), Placement::replicate());
    Cuts cuts(mesh_.ndim());
    for (size_t m = 0; m < cuts_.size(); ++m) { // those decided so far
      if (choices_[m].kind == Choice::Kind::Shard && choices_[m].factor == f) {
        placements[m] = Placement::shard(0, choices_[m].split_factor);
        cuts[m] = cuts_[m];
      }
    }
    return Layout::make(call_.tensors[0].layout->mesh_ptr(), std::move(placements), std::move(cuts));
  }

  Cut dim_cut(const Dim& dim, int64_t m) const {
    if (dim.inner == 1 && !dim.window) {
      return cuts_[m];
    }
    const auto layout = factor_layout(dim.factor);
    const auto size = factor_size(dim.factor);
    if (!dim.window && layout->is_even() && size % mesh_.size() == 0) {
      return nullptr;
    }
    // The size of each piece at mesh dim m: the sum over what the later mesh dims cut it into.
    std::vector<int64_t> out;
    each_row(*layout, 0, m, [&](Coordinate& c) {
      for (c[m] = 0; c[m] < mesh_.size(m); ++c[m]) {
        out.push_back(measure(*layout, size, c, m, dim));
      }
    });
    return std::make_shared<const std::vector<int64_t>>(std::move(out));
  }

  // How many indices of the result dim the piece at mesh dims [0, m] makes.
  int64_t measure(const Layout& layout, int64_t size, const Coordinate& c, int64_t m, const Dim& dim) const {
    const auto piece = piece_of(layout, 0, size, c, m + 1);
    return (dim.window ? window_count(*dim.window, piece) : piece.length) * dim.inner;
  }

  static int64_t window_count(const Dim::Window& w, const Interval& piece) {
    const auto before = [&](int64_t at) { // indices of the window below `at`
      const auto n = at <= w.start ? 0 : (at - w.start + w.step - 1) / w.step;
      return std::min(n, w.length);
    };
    return before(piece.start + piece.length) - before(piece.start);
  }

  LayoutPtr operand_layout(size_t i) const {
    const auto& operand = rule_.operands[i];
    if (operand.free) {
      return nullptr;
    }
    Placements placements;
    Cuts cuts(mesh_.ndim());
    for (int64_t m = 0; m < mesh_.ndim(); ++m) {
      placements.push_back(placement_of(i, m, choices_[m]));
      if (placements[m].is_shard()) {
        cuts[m] = dim_cut(operand.dims[placements[m].dim], m);
      }
    }
    return Layout::make(call_.tensors[i].layout->mesh_ptr(), std::move(placements), std::move(cuts));
  }

  // The operand that an elementwise op takes the order of its result's dims from.
  int64_t like(const Result& r) const {
    const auto same = [](const Dim& a, const Dim& b) {
      return a.factor == b.factor && a.inner == b.inner && !a.window && !b.window;
    };
    for (size_t i = 0; i < rule_.operands.size(); ++i) {
      const auto& dims = rule_.operands[i].dims;
      if (std::equal(dims.begin(), dims.end(), r.dims.begin(), r.dims.end(), same)) {
        return static_cast<int64_t>(i);
      }
    }
    return -1;
  }

  Placement placement_of(const Result& r, int64_t m) const {
    const auto& c = choices_[m];
    if (c.kind != Choice::Kind::Shard) {
      return c.kind == Choice::Kind::Partial ? c.partial : Placement::replicate();
    }
    const auto d = dim_of(r.dims, c.factor);
    if (d >= 0) {
      return Placement::shard(d, c.split_factor);
    }
    if (r.same_over >> c.factor & 1) {
      return Placement::replicate();
    }
    const auto out = summands(c.factor, r.reduce);
    TORCH_INTERNAL_ASSERT(
        out.is_partial() || r.reduce || rule_.factors[c.factor].kernel || rule_.always_kernel, "the rule of ",
        call_.schema.name(), ": factor ", c.factor, " is sharded, a result lacks it, and nothing reduces it");
    return out;
  }

  Solution::Result result(const Result& r) const {
    Placements placements;
    Cuts cuts(mesh_.ndim());
    bool sharded = false;
    for (int64_t m = 0; m < mesh_.ndim(); ++m) {
      placements.push_back(placement_of(r, m));
      if (placements[m].is_shard()) {
        cuts[m] = dim_cut(r.dims[placements[m].dim], m);
        sharded = true;
      }
    }
    Solution::Result out;
    out.strides = r.strides;
    out.order = r.order;
    out.like = like(r);
    out.geometry = r.geometry;
    out.layout = Layout::make(call_.tensors[0].layout->mesh_ptr(), std::move(placements), std::move(cuts));
    if (!r.sizes.empty() || (sharded && r.dims.empty())) {
      for (auto size : r.sizes) {
        out.sizes.push_back({-2, 0, size});
      }
    } else if (sharded) {
      for (size_t d = 0; d < r.dims.size(); ++d) {
        out.sizes.push_back(source_of(r.dims[d], out.layout->shards(static_cast<int64_t>(d))));
      }
    }
    return out;
  }

  Solution::SizeSource source_of(const Dim& dim, bool sharded) const {
    if (sharded) {
      for (size_t i = 0; i < rule_.operands.size(); ++i) {
        const auto d = dim_of(rule_.operands[i].dims, dim.factor);
        if (d >= 0 && !rule_.operands[i].dims[d].window && rule_.operands[i].dims[d].inner == dim.inner) {
          return {static_cast<int32_t>(i), static_cast<int16_t>(d), 0};
        }
      }
    }
    return {};
  }

  const Call& call_;
  const Rule& rule_;
  const Mesh& mesh_;
  c10::SmallVector<double, 4> bytes_;
  c10::SmallVector<Choice, 3> choices_;
  c10::SmallVector<Cut, 3> cuts_;
  bool weighed_ = false;
  bool summands_pass_ = true; // through ops that are linear in them
};

} // namespace

c10::intrusive_ptr<Solution> resolve(const Call& call, const Rule& rule) {
  TORCH_INTERNAL_ASSERT(
      rule.operands.size() == call.tensors.size(), "the rule of ", call.schema.name(), " describes ", rule.operands.size(),
      " operands of ", call.tensors.size());
  for (size_t i = 0; i < rule.operands.size(); ++i) {
    TORCH_INTERNAL_ASSERT(
        rule.operands[i].free || static_cast<int64_t>(rule.operands[i].dims.size()) == call.tensors[i].dim(), "the rule of ",
        call.schema.name(), " describes ", rule.operands[i].dims.size(), " dims of operand ", i, ", which has ",
        call.tensors[i].dim());
  }
  return Resolver(call, rule).run();
}

} // namespace shardtensor::rules
