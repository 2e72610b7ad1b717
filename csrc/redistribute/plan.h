// How to get from one layout to another on one mesh: the cheapest sequence of collectives and local steps, each along one mesh
// dim but for Transfer. Layouts in, steps out, the same on every rank.
#pragma once

#include "layout/layout.h"

namespace shardtensor {

// Pad: a piece becomes a summand of the whole, with what changes nothing around it. Transfer: every element straight to where it
// ends, along all mesh dims at once (transfer.h).
enum class StepKind : uint8_t { AllReduce, ReduceScatter, AllGather, AllToAll, Slice, MakePartial, Pad, Transfer };
const char* name_of(StepKind kind);

constexpr double kLatency = 4096; // a call costs about as much as this many bytes
// A transfer to many ranks: several messages, which share the wires worse than a collective's.
constexpr double kTransferLatency = 1.5 * kLatency;
constexpr double kTransferByte = 1.1;

// Bytes that a rank sends or receives, whichever is more, plus what a call costs in bytes' worth of time. `held`: what a rank
// holds of the tensor before the step, or lacks of what it ends with (Transfer); n: ranks along the mesh dim. 0 exactly where
// nothing is sent.
double cost_of(StepKind kind, double held, int64_t n);

struct Step {
  StepKind kind;
  int64_t mesh_dim; // -1: all
};

// The layout that a step on the way to `to` leaves.
LayoutPtr layout_after(const Step& step, const Layout& now, const Layout& to);
// Where a transfer on the way to `to` ends: summands that `now` does not have yet are left to MakePartial.
LayoutPtr transfer_target(const Layout& now, const Layout& to);

struct Plan {
  c10::SmallVector<Step, 4> steps;
  double cost = 0;

  bool communicates() const {
    return cost > 0;
  }
};

// For a tensor of `bytes` in all; both layouts on one mesh. Without `transfers`: by collectives and local steps alone. Every step
// turns its mesh dim's placement into that of `to`, or into Replicate on the way.
Plan make_plan(const Layout& from, const Layout& to, double bytes, bool transfers = true);
// Remembered by layouts and bytes to the nearest power of two below, so that all ranks look up the same.
const Plan& plan_for(const Layout& from, const Layout& to, double bytes, bool transfers = true);

} // namespace shardtensor
