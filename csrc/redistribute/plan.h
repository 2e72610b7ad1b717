// The cheapest sequence of collectives and local steps from one layout to another on one mesh. Each step except Transfer
// changes one mesh dim. Layouts in, steps out, the same on every rank.
#pragma once

#include "layout/layout.h"

#include <memory>

namespace shardtensor {

// Pad: a piece becomes a summand of the whole, padded with the neutral value. Transfer: every element goes directly to its
// final rank, along all mesh dims at once (transfer.h).
enum class StepKind : uint8_t { AllReduce, ReduceScatter, AllGather, AllToAll, Slice, MakePartial, Pad, Transfer };
const char* name_of(StepKind kind);

constexpr double kLatency = 4096; // a call costs about as much as this many bytes
// A transfer to many ranks sends several messages, which use the links less well than a collective.
constexpr double kTransferLatency = 1.5 * kLatency;
constexpr double kTransferByte = 1.1;
// The latency above covers a few ranks. Each further rank costs a call of its own, on the host.
constexpr int64_t kFewPeers = 8;
constexpr double kPeerLatency = 64;

// Bytes that a rank sends or receives, whichever is more, plus the cost of a call in bytes. `held`: the bytes that a rank holds
// before the step or, for Transfer, the bytes of its new piece that it lacks. n: the ranks along the mesh dim or, for Transfer,
// those that exchange pieces. 0 if and only if no data is sent.
double cost_of(StepKind kind, double held, int64_t n);

struct Step {
  StepKind kind;
  int64_t mesh_dim; // -1: all
};
inline bool communicates(const Step& step) {
  return step.kind != StepKind::Slice && step.kind != StepKind::MakePartial && step.kind != StepKind::Pad;
}

// The layout after a step on the way to `to`.
LayoutPtr layout_after(const Step& step, const Layout& now, const Layout& to);
// The layout after a transfer on the way to `to`: summands that `now` does not have yet are left to MakePartial.
LayoutPtr transfer_target(const Layout& now, const Layout& to);

struct Plan {
  c10::SmallVector<Step, 4> steps;
  c10::SmallVector<LayoutPtr, 4> between; // after each step except the last
  double cost = 0;
  mutable int64_t agreed = -1; // the kind of tensor, and the group_generation(), for which check_metadata() was asked last

  bool communicates() const {
    return cost > 0;
  }
  // The layout after the i-th step on the way to `to`.
  LayoutPtr after(size_t i, const Layout& to) const {
    return i < between.size() ? between[i] : LayoutPtr::reclaim_copy(&to);
  }
  size_t weight() const {
    return 1;
  }
};

// For a tensor of `bytes` in all; both layouts on one mesh. Without `transfers`: only collectives and local steps. Every step
// changes its mesh dim's placement to that of `to`, or to Replicate on the way there.
Plan make_plan(const Layout& from, const Layout& to, double bytes, bool transfers = true);
// Cached by layouts and by bytes rounded down to a power of two, so that all ranks look up the same plan. Plans of layouts that
// are gone are dropped.
std::shared_ptr<const Plan> plan_for(const Layout& from, const Layout& to, double bytes, bool transfers = true);

} // namespace shardtensor
