#include "redistribute/plan.h"

#include "redistribute/plan_cache.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <queue>
#include <tuple>
#include <vector>

namespace shardtensor {

namespace {

// State of one mesh dim during the search. Even an unchanged placement is redone if an earlier mesh dim that cuts the same
// tensor dim changes.
enum DimStage : uint8_t { kFrom, kWhole, kTo, kStages };
using DimStages = c10::SmallVector<uint8_t, 4>;

bool same_at(const Layout& a, const Layout& b, int64_t m) {
  return a.placement(m) == b.placement(m) && same_cut(a.cut(m), b.cut(m));
}

// The mesh dims whose pieces change: their own placement changes, or that of an earlier mesh dim that cuts the same tensor dim.
uint64_t changing(const Layout& from, const Layout& to) {
  uint64_t out = 0;
  for (int64_t m = 0; m < from.ndim(); ++m) {
    bool moves = !same_at(from, to, m);
    for (int64_t i = 0; i < m && !moves && from.placement(m).is_shard(); ++i) {
      const auto dim = from.placement(m).dim;
      moves = (out >> i & 1) && (from.placement(i).is_shard(dim) || to.placement(i).is_shard(dim));
    }
    if (moves) {
      out |= uint64_t{1} << m;
    }
  }
  return out;
}

// Whether a piece can be padded with neutral values into a summand. An average would need the piece scaled up first, which
// overflows or rounds. A norm's summand must not be negative, and only the piece's rank would know if it is.
bool can_pad(const Placement& summand) {
  return summand.is_partial() && summand.reduce != ReduceOp::Avg && summand.reduce != ReduceOp::Norm;
}

double transfer_cost(double lacking, int64_t ranks) {
  const auto many = std::max<int64_t>(0, ranks - 1 - kFewPeers);
  return kTransferLatency + kPeerLatency * static_cast<double>(many) + kTransferByte * lacking;
}

// Finds the least cost from the first state to every other. There are 3^(mesh dims) states, with few edges each.
class Search {
 public:
  Search(const Layout& from, const Layout& to, double bytes, bool transfers)
      : from_(from), to_(to), bytes_(bytes), transfers_(transfers), n_(from.ndim()), open_(changing(from, to)) {}

  Plan run() {
    size_t states = 1;
    for (int64_t m = 0; m < n_; ++m) {
      states *= kStages;
    }
    nodes_.assign(states, Node{});
    nodes_[0].cost = 0;
    reached_.push({0, 0, 0});
    while (!reached_.empty()) {
      const auto at = std::get<2>(reached_.top());
      reached_.pop();
      if (nodes_[at].done) {
        continue;
      }
      nodes_[at].done = true;
      const auto stages = stages_of(at);
      if (arrived(stages)) {
        return path_to(at);
      }
      for (int64_t m = 0; m < n_; ++m) {
        leave(at, stages, m);
      }
      leave_at_once(at, stages);
    }
    TORCH_INTERNAL_ASSERT(false, "no way from ", from_.str(), " to ", to_.str());
  }

 private:
  struct Node {
    double cost = std::numeric_limits<double>::infinity();
    size_t before = 0;
    Step step{};
    int32_t steps = 0;
    bool done = false;
  };
  // Ordered by cost, then by the number of steps, then by the state's number, so that all ranks find the same way.
  using SearchNode = std::tuple<double, int32_t, size_t>;

  DimStages stages_of(size_t state) const {
    DimStages out;
    for (int64_t m = 0; m < n_; ++m, state /= kStages) {
      out.push_back(static_cast<uint8_t>(state % kStages));
    }
    return out;
  }
  size_t index_of(const DimStages& stages) const {
    size_t out = 0;
    for (int64_t m = n_ - 1; m >= 0; --m) {
      out = out * kStages + stages[m];
    }
    return out;
  }

  bool is_open(int64_t m) const {
    return open_ >> m & 1;
  }
  bool final(const DimStages& stages, int64_t m) const {
    return stages[m] == kTo || (stages[m] == kFrom && !is_open(m));
  }
  bool arrived(const DimStages& stages) const {
    for (int64_t m = 0; m < n_; ++m) {
      if (!final(stages, m) && !(stages[m] == kWhole && to_.placement(m).is_replicate())) {
        return false;
      }
    }
    return true;
  }
  bool shards(const DimStages& stages, int64_t m, int64_t dim) const {
    return stages[m] == kFrom ? from_.placement(m).is_shard(dim) : stages[m] == kTo && to_.placement(m).is_shard(dim);
  }
  // Whether no later mesh dim cuts the pieces of mesh dim m along tensor dim `dim`.
  bool innermost(const DimStages& stages, int64_t m, int64_t dim) const {
    for (int64_t i = m + 1; i < n_; ++i) {
      if (shards(stages, i, dim)) {
        return false;
      }
    }
    return true;
  }
  // Whether the earlier mesh dims cut tensor dim `dim` as they do in `to`, so that m's cut has its final meaning.
  bool settled(const DimStages& stages, int64_t m, int64_t dim) const {
    for (int64_t i = 0; i < m; ++i) {
      if (!final(stages, i) && (shards(stages, i, dim) || to_.placement(i).is_shard(dim))) {
        return false;
      }
    }
    return true;
  }
  Placement placement_at(const DimStages& stages, int64_t m) const {
    return stages[m] == kWhole ? Placement::replicate() : (stages[m] == kFrom ? from_ : to_).placement(m);
  }
  double held(const DimStages& stages) const {
    double out = bytes_;
    for (int64_t m = 0; m < n_; ++m) {
      if (placement_at(stages, m).is_shard()) {
        out /= static_cast<double>(from_.mesh().size(m));
      }
    }
    return out;
  }

  // Whether mesh dim m's final placement commutes with all present summands.
  bool may_join(const DimStages& stages, int64_t m) const {
    for (int64_t i = 0; i < n_; ++i) {
      if (i != m && !to_.placement(m).commutes_with(placement_at(stages, i))) {
        return false;
      }
    }
    return true;
  }

  void leave(size_t at, const DimStages& stages, int64_t m) {
    const auto& now = from_.placement(m);
    const auto& want = to_.placement(m);
    const bool can_cut = want.is_shard() && innermost(stages, m, want.dim) && settled(stages, m, want.dim);
    if (stages[m] == kWhole || (stages[m] == kFrom && now.is_replicate())) {
      if (can_cut) {
        go(at, stages, m, StepKind::Slice, kTo);
      } else if (want.is_partial() && may_join(stages, m)) {
        go(at, stages, m, StepKind::MakePartial, kTo);
      }
    } else if (stages[m] == kFrom && now.is_partial() && is_open(m)) {
      if (now.serves_as(want)) {
        go(at, stages, m, StepKind::MakePartial, kTo);
      }
      go(at, stages, m, StepKind::AllReduce, kWhole);
      if (can_cut) {
        go(at, stages, m, StepKind::ReduceScatter, kTo);
      }
    } else if (stages[m] == kFrom && now.is_shard() && innermost(stages, m, now.dim)) {
      go(at, stages, m, StepKind::AllGather, kWhole);
      if (can_cut && is_open(m)) {
        go(at, stages, m, StepKind::AllToAll, kTo);
      }
      if (can_pad(want) && may_join(stages, m)) {
        go(at, stages, m, StepKind::Pad, kTo);
      }
    }
  }

  void go(size_t at, DimStages stages, int64_t m, StepKind kind, DimStage stage) {
    const auto cost = cost_of(kind, held(stages), from_.mesh().size(m));
    stages[m] = stage;
    reach(at, stages, {kind, m}, cost);
  }

  // One transfer to the end. If the end has new summands, a last local step makes them.
  void leave_at_once(size_t at, const DimStages& stages) {
    if (!transfers_) {
      return;
    }
    auto end = stages;
    for (int64_t m = 0; m < n_; ++m) {
      if (is_open(m) && stages[m] == kFrom && from_.placement(m).is_partial()) {
        return;
      }
      if (is_open(m) && stages[m] != kTo) {
        end[m] = to_.placement(m).is_partial() ? kWhole : kTo;
      }
    }
    const auto lacking = held(end) * (1 - overlap(stages, end));
    if (lacking > 0) {
      reach(at, end, {StepKind::Transfer, -1}, transfer_cost(lacking, exchanging(stages, end)));
    }
  }

  // An upper bound on the number of ranks that exchange pieces with each other, assuming even cuts.
  int64_t exchanging(const DimStages& stages, const DimStages& end) const {
    int64_t out = 1;
    for (int64_t m = 0; m < n_; ++m) {
      out *= stages[m] != end[m] ? from_.mesh().size(m) : 1;
    }
    return out;
  }

  // The average share of its new piece that a rank already holds, assuming even cuts. Mesh dims with the same cut on both
  // sides count as 1. For a tensor dim that is cut differently, or nested in such a cut, the share is the old piece's share of
  // that dim.
  double overlap(const DimStages& stages, const DimStages& end) const {
    double out = 1;
    uint64_t apart = 0; // tensor dims
    for (int64_t m = 0; m < n_; ++m) {
      const auto held = placement_at(stages, m), wanted = placement_at(end, m);
      const bool same = held == wanted && (stages[m] == end[m] || same_at(from_, to_, m));
      for (const auto* p : {&held, &wanted}) {
        if (!same && p->is_shard()) {
          apart |= uint64_t{1} << p->dim;
        }
      }
      if (held.is_shard() && (apart >> held.dim & 1)) {
        out /= static_cast<double>(from_.mesh().size(m));
      }
    }
    return out;
  }

  void reach(size_t from, const DimStages& stages, const Step& step, double cost) {
    cost += nodes_[from].cost;
    const auto steps = nodes_[from].steps + 1;
    const auto index = index_of(stages);
    auto& next = nodes_[index];
    if (!next.done && (cost < next.cost || (cost == next.cost && steps < next.steps))) {
      next = Node{cost, from, step, steps, false};
      reached_.push({cost, steps, index});
    }
  }

  Plan path_to(size_t at) const {
    Plan plan;
    plan.cost = nodes_[at].cost;
    for (; at != 0; at = nodes_[at].before) {
      plan.steps.insert(plan.steps.begin(), nodes_[at].step);
    }
    return plan;
  }

  const Layout& from_;
  const Layout& to_;
  double bytes_;
  bool transfers_;
  int64_t n_;
  uint64_t open_;
  std::vector<Node> nodes_;
  std::priority_queue<SearchNode, std::vector<SearchNode>, std::greater<>> reached_;
};

} // namespace

const char* name_of(StepKind kind) {
  static constexpr std::array<const char*, 8> names = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all",
                                                       "slice",      "make_partial",   "pad",        "transfer"};
  return names[static_cast<size_t>(kind)];
}

double cost_of(StepKind kind, double held, int64_t n) {
  if (n == 1) {
    return 0;
  }
  const double others = static_cast<double>(n - 1);
  const double share = held * others / static_cast<double>(n);
  switch (kind) {
    case StepKind::AllReduce:
      return kLatency + 2 * share;
    case StepKind::ReduceScatter:
    case StepKind::AllToAll:
      return kLatency + share;
    case StepKind::AllGather:
      return kLatency + held * others;
    case StepKind::Transfer:
      return transfer_cost(held, n);
    case StepKind::Slice:
    case StepKind::MakePartial:
    case StepKind::Pad:
      return 0;
  }
  return 0;
}

LayoutPtr transfer_target(const Layout& now, const Layout& to) {
  auto out = LayoutPtr::reclaim_copy(&to);
  for (int64_t m = 0; m < to.ndim(); ++m) {
    if (to.placement(m).is_partial() && (&now.mesh() != &to.mesh() || now.placement(m) != to.placement(m))) {
      out = out->with(m, Placement::replicate());
    }
  }
  return out;
}

LayoutPtr layout_after(const Step& step, const Layout& now, const Layout& to) {
  const auto m = step.mesh_dim;
  switch (step.kind) {
    case StepKind::AllReduce:
    case StepKind::AllGather:
      return now.with(m, Placement::replicate());
    case StepKind::ReduceScatter:
    case StepKind::AllToAll:
    case StepKind::Slice:
    case StepKind::MakePartial:
    case StepKind::Pad:
      return now.with(m, to.placement(m), to.cut(m));
    case StepKind::Transfer:
      return transfer_target(now, to);
  }
  return {};
}

Plan make_plan(const Layout& from, const Layout& to, double bytes, bool transfers) {
  if (&from == &to) {
    return {};
  }
  auto plan = Search(from, to, bytes, transfers).run();
  auto now = LayoutPtr::reclaim_copy(&from);
  for (size_t i = 0; i + 1 < plan.steps.size(); ++i) {
    now = layout_after(plan.steps[i], *now, to);
    plan.between.push_back(now);
  }
  return plan;
}

std::shared_ptr<const Plan> plan_for(const Layout& from, const Layout& to, double bytes, bool transfers) {
  const auto power = std::ilogb(std::max(bytes, 1.0));
  const auto make = [&] { return make_plan(from, to, std::ldexp(1.0, power), transfers); };
  return cached<Plan>(from, to, CachedKind::Plan, {power, static_cast<int64_t>(transfers)}, make);
}

} // namespace shardtensor
