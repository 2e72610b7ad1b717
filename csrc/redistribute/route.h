// The whole way from layout to layout, from mesh to mesh too: summands are added up where they are, then pieces move, then new
// summands are made. And what it costs each rank, said without going.
#pragma once

#include "redistribute/plan.h"
#include "redistribute/transfer.h"

#include <ATen/core/Tensor.h>

namespace shardtensor {

// The layout on a mesh of the same ranks in the same places, with groups of its own: one is as good as the other. Null for
// others.
LayoutPtr relabelled(const Layout& layout, const MeshPtr& mesh);

// redistribute() between two meshes of other ranks or places. Called by every rank of either.
Moving redistribute_across(
    const at::Tensor& local, const Layout& from, const Layout& to, c10::ArrayRef<int64_t> sizes, bool later);

struct Leg {
  Step step;
  LayoutPtr before, after;
};
// What redistribute() of a tensor with elements of `item` bytes does.
std::vector<Leg> route(const Layout& from, const Layout& to, c10::ArrayRef<int64_t> sizes, int64_t item);

struct Traffic {
  int64_t sent = 0, received = 0;
};
// In elements: what a rank puts in, as comm's counters count it, and what it gets that it did not have.
Traffic traffic_of(const Leg& leg, c10::ArrayRef<int64_t> sizes, int64_t rank);

} // namespace shardtensor
