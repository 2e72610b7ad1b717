// All steps from one layout to another, also between meshes: add up summands on the source mesh, move pieces, make new summands
// on the target mesh. Also computes the traffic of each rank without moving data.
#pragma once

#include "redistribute/plan.h"
#include "redistribute/transfer.h"

namespace shardtensor {

// The same layout on `mesh`, if that mesh has the same ranks in the same places and differs only in its groups: the two meshes
// are interchangeable. Otherwise null.
LayoutPtr relabelled(const Layout& layout, const MeshPtr& mesh);

// Raises if the meshes are of different device types.
void check_devices(const Layout& from, const Layout& to);
// The layout of the sums before they move to another mesh: whole, or scattered if that sends less in all. `item`: bytes of an
// element.
LayoutPtr layout_of_sums(const Layout& from, const Layout& to, c10::ArrayRef<int64_t> sizes, int64_t item);

struct RouteStep : Step {
  LayoutPtr before, after;
};
// The steps that redistribute() takes for a tensor with elements of `item` bytes.
std::vector<RouteStep> route(const Layout& from, const Layout& to, c10::ArrayRef<int64_t> sizes, int64_t item);

// The elements that a rank contributes, as comm's counters count them, and the new elements that it receives.
Traffic traffic_of(const RouteStep& step, c10::ArrayRef<int64_t> sizes, int64_t rank);

} // namespace shardtensor
