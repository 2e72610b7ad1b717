#include "rules/resolve/chooser.h"

#include "redistribute/plan.h"
#include "rules/exact_dtypes.h"
#include "rules/resolve/factor_cuts.h"

#include <algorithm>
#include <cmath>

namespace shardtensor::rules {

namespace {

class Chooser {
 public:
  Chooser(const Choices& so_far, bool summands_pass)
      : so_far_(so_far),
        call_(so_far.call),
        rule_(so_far.rule),
        mesh_(so_far.call.mesh),
        cutting_(so_far),
        summands_pass_(summands_pass) {}

  Choice choose(int64_t m) {
    c10::SmallVector<Choice, 4> candidates;
    for (size_t i = 0; i < call_.tensors.size(); ++i) {
      const auto& p = call_.tensors[i].layout->placement(m);
      if (p.is_shard() && p.dim < static_cast<int64_t>(rule_.operands[i].dims.size())) {
        const auto& dim = rule_.operands[i].dims[p.dim];
        const auto f = dim.at.empty() ? int64_t{dim.factor} : dim.at[0].factor;
        if (f == kNone || !can_shard(f, p.split_factor)) {
          continue;
        }
        auto* known = std::find_if(candidates.begin(), candidates.end(), [&](const Choice& c) {
          return c.role == Choice::Role::Shard && c.factor == f;
        });
        const Choice c{
            .role = Choice::Role::Shard,
            .factor = f,
            .donor = static_cast<int64_t>(i),
            .donor_dim = p.dim,
            .split_factor = p.split_factor};
        if (known == candidates.end()) {
          candidates.push_back(c);
        } else if (is_better_donor(c, *known)) {
          *known = c;
        }
      } else if (p.is_partial() && !rule_.operands[i].free && summands_pass_) {
        for (const auto& group : rule_.linear) {
          if (!group.operands.has(i) || !group.passes(p) || !adds_up(group, p, call_) ||
              (p.reduce == ReduceOp::Norm && !all_hold(group, m, p))) {
            continue;
          }
          candidates.push_back({.role = Choice::Role::Partial, .group = &group, .partial = as_sum(group, m, p)});
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
    for (const auto& c : candidates) {
      if (cost(m, c) == 0) {
        return c; // whatever it costs
      }
    }
    weighed_ = true;
    size_t best = 0;
    for (size_t i = 1; i < candidates.size(); ++i) {
      best = is_cheaper(m, candidates[i], candidates[best]) ? i : best;
    }
    return candidates[best];
  }

  bool weighed() const {
    return weighed_;
  }

 private:
  bool has_symbols() const {
    return std::any_of(call_.tensors.begin(), call_.tensors.end(), [](const TensorArg& t) { return t.has_symbols(); });
  }

  // Summands stay picked if the op only moves values, unless it also takes other summands.
  Placement as_sum(const LinearGroup& group, int64_t m, Placement p) const {
    for (size_t i = 0; p.picked && i < call_.tensors.size(); ++i) {
      const auto& other = call_.tensors[i].layout->placement(m);
      const bool read = group.operands.has(i) && !call_.tensors[i].output;
      p.picked = group.moves && (!read || !other.is_partial() || other.picked);
    }
    return p;
  }

  // Chooses among choices that communicate. The ranks must choose alike, and a symbol on one rank may be a number on another.
  // So each comparison of symbols guards the graph: it holds only for sizes for which this choice is the best.
  bool is_cheaper(int64_t m, const Choice& a, const Choice& b) const {
    if (!has_symbols()) {
      const auto sums = [&](const Choice& c) {
        double out = 0;
        for (const auto& r : rule_.results) {
          out += cost_of_sum(m, c, r, static_cast<double>(bytes_of(r).expect_int()));
        }
        return out;
      };
      return cost(m, a) + sums(a) < cost(m, b) + sums(b);
    }
    // Costs are linear in the bytes of each operand and result.
    constexpr double kUnit = 1024; // costs are integers in units of 1 / kUnit
    const auto scaled = [](double x) { return static_cast<int64_t>(std::llround(x * kUnit)); };
    double constant = 0;
    std::optional<c10::SymInt> difference;
    const auto add = [&](const auto& at, const auto& bytes) {
      const auto slope = at(2) - at(1);
      constant += at(1) - slope;
      if (const auto each = scaled(slope)) {
        const auto more = bytes() * each;
        difference = difference ? *difference + more : more;
      }
    };
    for (size_t i = 0; i < call_.tensors.size(); ++i) {
      add([&](double n) { return cost(m, a, i, n) - cost(m, b, i, n); }, [&] { return call_.tensors[i].sym_bytes(); });
    }
    for (const auto& r : rule_.results) {
      add([&](double n) { return cost_of_sum(m, a, r, n) - cost_of_sum(m, b, r, n); }, [&] { return bytes_of(r); });
    }
    return difference ? *difference < -scaled(constant) : constant < 0;
  }

  // If an operand holds summands, a choice may reduce them. If it leaves summands in the result, their reduction is still to
  // come, and counts.
  double cost_of_sum(int64_t m, const Choice& c, const Result& r, double bytes) const {
    const bool leaves = so_far_.placement_of(r, c).is_partial();
    return leaves && has_summands(m) ? cost_of(StepKind::AllReduce, bytes, mesh_.size(m)) : 0;
  }

  bool has_summands(int64_t m) const {
    return std::any_of(
        call_.tensors.begin(), call_.tensors.end(), [&](const TensorArg& t) { return t.layout->placement(m).is_partial(); });
  }

  // Approximate: a dim whose size only the op knows counts as 1, and the dtype is the first operand's.
  c10::SymInt bytes_of(const Result& r) const {
    c10::SymInt out = static_cast<int64_t>(c10::elementSize(call_.tensors[0].dtype));
    for (size_t d = 0; d < r.dims.size(); ++d) {
      const auto& dim = r.dims[d];
      if (!r.sizes.empty()) {
        out = out * r.sizes[d];
      } else if (dim.factor != kNone) {
        out = out * cutting_.factor_size(dim.factor) * dim.inner;
      }
    }
    return out;
  }

  bool is_better_donor(const Choice& c, const Choice& known) const {
    const bool windows = reach_of(c.donor, c.donor_dim), known_windows = reach_of(known.donor, known.donor_dim);
    if (windows != known_windows) {
      return known_windows; // operands that are read through windows communicate anyway
    }
    return !call_.tensors[known.donor].mutated &&
           (call_.tensors[c.donor].mutated || is_larger(static_cast<size_t>(c.donor), static_cast<size_t>(known.donor)));
  }

  const Reach* reach_of(int64_t operand, int64_t d) const {
    const auto at = rule_.operands[operand].dims[d].reach;
    return at == kNone ? nullptr : &rule_.reaches[at];
  }

  // Whether operand i is the larger of two donors. Between two of one layout it does not matter, so symbols need no guard.
  bool is_larger(size_t i, size_t known) const {
    const auto &a = call_.tensors[i], &b = call_.tensors[known];
    const bool symbols = a.has_symbols() || b.has_symbols();
    return symbols ? a.layout != b.layout && a.sym_bytes() > b.sym_bytes() : a.bytes > b.bytes;
  }

  // Bytes that the operands send if mesh dim m is used as in `c` and the other mesh dims stay.
  double cost(int64_t m, const Choice& c) const {
    double sum = 0;
    for (size_t i = 0; i < call_.tensors.size(); ++i) {
      sum += cost(m, c, i, call_.tensors[i].bytes);
    }
    return sum;
  }

  // The same for operand i alone, if it exists.
  double cost(int64_t m, const Choice& c, size_t i, double bytes) const {
    if (rule_.operands[i].free) {
      return 0;
    }
    const auto& t = call_.tensors[i];
    const auto want = so_far_.placement_of(i, c);
    const auto& have = t.layout->placement(m);
    const auto b = held(i, m, bytes);
    if (want == have && have.is_shard() && reach_of(static_cast<int64_t>(i), have.dim)) {
      const bool weighed = !rule_.operands[i].kept_cut || !t.has_symbols(); // the bytes that a kernel itself fetches
      return weighed ? halo_cost(i, have.dim, m, c, b) : 0;
    }
    if (want == have) {
      const bool moves = c.role == Choice::Role::Shard && have.is_shard() && !follows_donor(i, m, c);
      return moves ? cost_of(StepKind::AllToAll, b / static_cast<double>(mesh_.size(m)), mesh_.size(m)) : 0;
    }
    const auto back = t.mutated ? kLatency + step_cost(m, want, have, b) : 0;
    return step_cost(m, have, want, b) + back;
  }

  // Bytes of the largest halo that a rank receives. Messages between neighbours start together, and the results stay cut, so a
  // call costs less than a gather.
  double halo_cost(size_t i, int64_t d, int64_t m, const Choice& c, double held) const {
    constexpr double kStart = kLatency / 2;
    const auto& t = call_.tensors[i];
    const auto& donor = call_.tensors[c.donor];
    const auto size = t.size(d), donor_size = donor.size(c.donor_dim);
    const auto count = cutting_.factor_size(c.factor).guard_int(__FILE__, __LINE__);
    const auto* donor_reach = reach_of(c.donor, c.donor_dim);
    const auto each = rule_.operands[i].dims[d].inner.guard_int(__FILE__, __LINE__); // a reach counts in units of it
    const auto donor_each = rule_.operands[c.donor].dims[c.donor_dim].inner.guard_int(__FILE__, __LINE__);
    int64_t most = 0;
    Coordinate at(mesh_.ndim(), 0);
    for (; at[m] < mesh_.size(m); ++at[m]) {
      const auto mine = t.layout->intervals(d, size, at)[0];
      auto run = donor.layout->intervals(c.donor_dim, donor_size, at)[0];
      run = in_units(run, donor_each);
      run = donor_reach ? cut_through(*donor_reach, run, donor_size / donor_each, count) : run;
      auto inside = read(*reach_of(static_cast<int64_t>(i), d), run, size / each).inside;
      inside = {inside.start * each, inside.length * each};
      auto lacking = inside.length;
      for (const auto& turn : wrapped_runs(inside, size)) {
        lacking -= intersection(mine, turn.inside).length;
      }
      most = std::max(most, lacking);
    }
    return most ? kStart + held * static_cast<double>(most) / static_cast<double>(size) : 0;
  }

  // The part of operand i that a rank holds before mesh dim m cuts it.
  double held(size_t i, int64_t m, double b) const {
    for (int64_t k = 0; k < mesh_.ndim(); ++k) {
      if (k != m && call_.tensors[i].layout->placement(k).is_shard()) {
        b /= static_cast<double>(mesh_.size(k));
      }
    }
    return b;
  }

  double step_cost(int64_t m, const Placement& have, const Placement& want, double held) const {
    if (have.is_replicate()) {
      return 0;
    }
    if (have.serves_as(want)) {
      return 0;
    }
    if (have.is_partial()) {
      return cost_of(want.is_shard() ? StepKind::ReduceScatter : StepKind::AllReduce, held, mesh_.size(m));
    }
    const auto piece = held / static_cast<double>(mesh_.size(m));
    return cost_of(want.is_shard() ? StepKind::AllToAll : StepKind::AllGather, piece, mesh_.size(m));
  }

  // Whether operand i, sharded on the factor at mesh dim m, already has the donor's cut.
  bool follows_donor(size_t i, int64_t m, const Choice& c) const {
    const auto& donor = *call_.tensors[c.donor].layout;
    const auto& mine = *call_.tensors[i].layout;
    const auto& donor_dim = rule_.operands[c.donor].dims[c.donor_dim];
    const auto& my_dim = rule_.operands[i].dims[dim_of(rule_.operands[i].dims, c.factor)];
    if (donor_dim.window || my_dim.window || !donor_dim.at.empty() || !my_dim.at.empty()) {
      return true; // cut_around() keeps the pieces if it can
    }
    if (donor_dim.inner != 1 || my_dim.inner != 1) {
      return cutting_.aligned(static_cast<size_t>(c.donor), c.donor_dim, m);
    }
    return same_cut(donor.cut(m), mine.cut(m));
  }

  bool can_shard(int64_t factor, int32_t split_factor) const {
    const auto& f = rule_.factors[factor];
    if (f.whole || (f.kernel && split_factor > 1)) {
      return false;
    }
    if (split_factor > 1) {
      const auto bent = [&](const Dims& dims) {
        const auto d = dim_of(dims, factor);
        return d >= 0 && (dims[d].inner != 1 || dims[d].window || dims[d].reach != kNone || !dims[d].at.empty());
      };
      return std::none_of(rule_.operands.begin(), rule_.operands.end(), [&](const Operand& o) { return bent(o.dims); }) &&
             std::none_of(rule_.results.begin(), rule_.results.end(), [&](const Result& r) { return bent(r.dims); });
    }
    return true;
  }

  // Whether every written operand can hold the result: a written operand that stays whole cannot take summands.
  bool holds_result(int64_t m, const Choice& c) const {
    for (size_t i = 0; i < call_.tensors.size(); ++i) {
      if (!call_.tensors[i].mutated) {
        continue;
      }
      if (c.role == Choice::Role::Shard && call_.tensors[i].layout->placement(m).reduce == ReduceOp::Norm) {
        return false; // make_partial() needs the written value on all ranks
      }
      if (call_.tensors[i].output) {
        continue;
      }
      if (c.role == Choice::Role::Partial && !c.group->operands.has(i)) {
        return false;
      }
      if (c.role == Choice::Role::Shard && dim_of(rule_.operands[i].dims, c.factor) < 0 &&
          so_far_.summands(c.factor, rule_.operands[i].reduce).is_partial() && !rule_.operands[i].summand) {
        return false;
      }
    }
    return true;
  }

  // True if every operand of the group that the op reads is placed as `p`. (A norm's summand is never negative; another value
  // may be.)
  bool all_hold(const LinearGroup& group, int64_t m, const Placement& p) const {
    for (size_t i = 0; i < call_.tensors.size(); ++i) {
      if (group.operands.has(i) && !call_.tensors[i].output && call_.tensors[i].layout->placement(m) != p) {
        return false;
      }
    }
    return true;
  }

  // Adds choices that shard a factor of Rule::spread. No operand is sharded on it, so there is no donor and the cut is even.
  void add_spread(int64_t m, c10::SmallVectorImpl<Choice>& candidates) const {
    const auto moves = [&](size_t i) { return call_.tensors[i].layout->placement(m).is_shard() && !rule_.operands[i].free; };
    bool any = false;
    for (size_t i = 0; i < call_.tensors.size(); ++i) {
      any |= moves(i);
    }
    for (const auto f : rule_.spread) {
      const bool known = std::any_of(candidates.begin(), candidates.end(), [&](const Choice& c) { return c.factor == f; });
      if (any && !known && cutting_.factor_size(f) >= mesh_.size(m) * pieces_of(f, m)) {
        candidates.push_back({.role = Choice::Role::Shard, .factor = f});
      }
    }
  }

  // Into how many pieces other mesh dims than m cut factor f: those decided before, and those that cut an operand along it.
  int64_t pieces_of(int64_t f, int64_t m) const {
    int64_t pieces = 1;
    for (int64_t k = 0; k < mesh_.ndim(); ++k) {
      const bool decided = k < m && so_far_.made[k].role == Choice::Role::Shard && so_far_.made[k].factor == f;
      bool cuts = false;
      for (size_t i = 0; i < call_.tensors.size() && k > m; ++i) {
        const auto& p = call_.tensors[i].layout->placement(k);
        const auto& dims = rule_.operands[i].dims;
        cuts = cuts || (p.is_shard() && p.dim < static_cast<int64_t>(dims.size()) && dims[p.dim].factor == f);
      }
      pieces *= decided || cuts ? mesh_.size(k) : 1;
    }
    return pieces;
  }

  const Choices& so_far_;
  const Call& call_;
  const Rule& rule_;
  const Mesh& mesh_;
  FactorCuts cutting_;
  bool summands_pass_;
  bool weighed_ = false;
};

} // namespace

Choice choose(const Choices& so_far, int64_t m, bool summands_pass, bool& weighed) {
  Chooser chooser(so_far, summands_pass);
  auto choice = chooser.choose(m);
  weighed |= chooser.weighed();
  return choice;
}

} // namespace shardtensor::rules
