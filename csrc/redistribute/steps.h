// What one step of a plan does to this rank's piece.
#pragma once

#include "comm/error_context.h"
#include "redistribute/plan.h"
#include "redistribute/transfer.h"

namespace shardtensor {

// A piece between two steps of its move, and the layout that it is in.
struct StepState : PendingPiece {
  LayoutPtr layout;
  c10::IntArrayRef sizes; // global
  bool later = false;     // the current step is only started; `rest` finishes it

  const Mesh& mesh() const {
    return layout->mesh();
  }
};

// Call it before any data is sent: raises if the values cannot be reduced this way. A backend would raise only on ranks whose
// piece is not empty, or would drop a fraction.
void check_reducible(const Layout& from, const Layout& to, at::ScalarType dtype);
// Call it before the first step: checks once for each plan that the ranks agree about the tensor (metadata_check.h).
void agree(const Plan& plan, const Layout& from, const Layout& to, c10::IntArrayRef sizes, at::ScalarType dtype);

// The mesh dims (bits) along which the steps have collectives.
uint64_t communicating_dims(c10::ArrayRef<Step> steps);
inline uint64_t nothing_due() {
  return 0;
}
// Runs one step; its errors name the step. due(): the mesh dims (bits) along which collectives are still due if it fails.
template <typename F, typename Due>
void with_step_context(const Layout& from, const Layout& to, const Step& step, const F& run, const Due& due) {
  const auto text = [&] {
    const auto along = step.mesh_dim < 0 ? std::string() : c10::str(" along mesh dim ", step.mesh_dim);
    return c10::str("redistribute: from ", from.str(), " to ", to.str(), ", step ", name_of(step.kind), along);
  };
  comm::with_error_context(from.mesh(), text, run, due, {&from, &to});
}

// Makes errors of `rest` name the step too.
comm::InFlight with_step_context(comm::InFlight rest, const Layout& from, const Layout& to, const Step& step);

// `next`: the layout after the step. Every rank of the mesh calls it; for a transfer between meshes, those of either. Its
// messages are found once for each pair of layouts and size (plan_cache.h).
void take_step(StepState& s, const Step& step, const LayoutPtr& next);
// Only finds the messages of this rank in the step. Returns the number of ranks that it sends to or receives from.
int64_t prepare_step(const Step& step, const Layout& before, const Layout& next, c10::IntArrayRef sizes);

} // namespace shardtensor
