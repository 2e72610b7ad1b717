// How to get from one layout to another: the cheapest sequence of collectives and local steps, each along one mesh dim.
// Layouts in, steps out, the same on every rank. Uses layout/. Used by redistribute.cpp, rules/ (costs) and bindings/.
#pragma once

#include "layout/layout.h"

namespace shardtensor {

enum class StepKind : uint8_t { AllReduce, ReduceScatter, AllGather, AllToAll, Slice, MakePartial };
const char* name_of(StepKind kind);

constexpr double kLatency = 4096; // a call costs about as much as this many bytes

// Bytes that a rank sends or receives, whichever is more, plus what a call costs in bytes' worth of time. `held`: what a rank
// holds of the tensor before the step; n: ranks along the mesh dim. 0 exactly where nothing is sent.
double cost_of(StepKind kind, double held, int64_t n);

struct Step {
  StepKind kind;
  int64_t mesh_dim;
};

struct Plan {
  c10::SmallVector<Step, 4> steps;
  double cost = 0;

  bool communicates() const {
    return cost > 0;
  }
};

// For a tensor of `bytes` in all. Every step turns its mesh dim's placement into that of `to`, or into Replicate on the way.
Plan make_plan(const Layout& from, const Layout& to, double bytes);

} // namespace shardtensor
