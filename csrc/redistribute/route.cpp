#include "redistribute/route.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace shardtensor {

namespace {

using c10::IntArrayRef;

double bytes_of(IntArrayRef sizes, int64_t item) {
  return static_cast<double>(c10::multiply_integers(sizes)) * static_cast<double>(item);
}

// Into how many pieces the layout cuts a tensor.
double pieces(const Layout& layout) {
  return static_cast<double>(layout.ranks_where([&](int64_t m) { return layout.placement(m).is_shard(); }));
}

double cost_across(const Layout& from, const Layout& to, double bytes) {
  int64_t shared = 0;
  for (auto rank : to.mesh().description().ranks) {
    shared += from.mesh().index_of_rank(rank) >= 0;
  }
  const auto held = static_cast<double>(shared) / static_cast<double>(to.mesh().size()) / pieces(from);
  return held < 1 ? cost_of(StepKind::Transfer, bytes / pieces(to) * (1 - held), 2) : 0;
}

// The longest tensor dim that mesh dim m may cut (no later mesh dim cuts it); -1 if there is none.
int64_t dim_to_scatter(const Layout& layout, int64_t m, IntArrayRef sizes) {
  int64_t best = -1, most = 1;
  for (int64_t d = 0; d < static_cast<int64_t>(sizes.size()); ++d) {
    auto left = sizes[d];
    for (int64_t i = 0; i < layout.ndim(); ++i) {
      if (layout.placement(i).is_shard(d)) {
        left = i > m ? 0 : left / layout.mesh().size(i);
      }
    }
    if (left > most) {
      best = d;
      most = left;
    }
  }
  return best;
}

void append_steps(const Layout& from, const Layout& to, double bytes, std::vector<RouteStep>& steps) {
  auto now = LayoutPtr::reclaim_copy(&from);
  if (&from == &to) {
    return;
  }
  const auto plan = plan_for(from, to, bytes);
  for (size_t i = 0; i < plan->steps.size(); ++i) {
    auto next = plan->after(i, to);
    steps.push_back({plan->steps[i], now, next});
    now = std::move(next);
  }
}

int64_t numel_at(const Layout& layout, IntArrayRef sizes, const Coordinate& c) {
  return c10::multiply_integers(layout.local_sizes(sizes, c));
}

// The number of elements that a rank holds both before and after.
int64_t kept_by(const Layout& before, const Layout& after, IntArrayRef sizes, const Coordinate& c) {
  int64_t n = 1;
  for (size_t d = 0; d < sizes.size(); ++d) {
    const auto dim = static_cast<int64_t>(d);
    n *= common_length(before.intervals(dim, sizes[d], c), after.intervals(dim, sizes[d], c));
  }
  return n;
}

} // namespace

LayoutPtr relabelled(const Layout& layout, const MeshPtr& mesh) {
  const auto &a = layout.mesh().description(), &b = mesh->description();
  return a.shape == b.shape && a.ranks == b.ranks && a.device_type == b.device_type
             ? Layout::make(mesh, layout.placements(), layout.cuts())
             : LayoutPtr();
}

LayoutPtr layout_of_sums(const Layout& from, const Layout& to, IntArrayRef sizes, int64_t item) {
  const auto bytes = bytes_of(sizes, item);
  auto whole = LayoutPtr::reclaim_copy(&from), scattered = whole;
  for (int64_t m = 0; m < from.ndim(); ++m) {
    if (from.placement(m).is_partial()) {
      whole = whole->with(m, Placement::replicate());
      const auto dim = dim_to_scatter(*scattered, m, sizes);
      scattered = scattered->with(m, dim < 0 ? Placement::replicate() : Placement::shard(dim));
    }
  }
  const auto cost = [&](const Layout& by) { return plan_for(from, by, bytes)->cost + cost_across(by, to, bytes); };
  return whole == scattered || cost(*whole) <= cost(*scattered) ? whole : scattered;
}

void check_devices(const Layout& from, const Layout& to) {
  TORCH_CHECK_VALUE(
      from.mesh().description().device_type == to.mesh().description().device_type, "redistribute: from ", from.str(), " to ",
      to.str(), ": the target mesh has another device type (rank ", to.mesh().rank(), "); move the local tensors first");
}

std::vector<RouteStep> route(const Layout& from, const Layout& to, IntArrayRef sizes, int64_t item) {
  std::vector<RouteStep> steps;
  const auto bytes = bytes_of(sizes, item);
  if (&from.mesh() == &to.mesh()) {
    append_steps(from, to, bytes, steps);
    return steps;
  }
  if (const auto here = relabelled(from, to.mesh_ptr())) {
    append_steps(*here, to, bytes, steps);
    return steps;
  }
  const auto by = layout_of_sums(from, to, sizes, item);
  const auto there = transfer_target(*by, to);
  append_steps(from, *by, bytes, steps);
  steps.push_back({{StepKind::Transfer, -1}, by, there});
  append_steps(*there, to, bytes, steps);
  return steps;
}

Traffic traffic_of(const RouteStep& step, IntArrayRef sizes, int64_t rank) {
  const auto kind = step.kind;
  if (kind == StepKind::Transfer) {
    return traffic_of_transfer(*step.before, *step.after, sizes, rank);
  }
  const auto& mesh = step.before->mesh();
  const auto index = mesh.index_of_rank(rank);
  const auto n = mesh.size(step.mesh_dim);
  if (index < 0 || n == 1) {
    return {};
  }
  const auto c = mesh.coordinate_at(index);
  const auto before = numel_at(*step.before, sizes, c), after = numel_at(*step.after, sizes, c);
  switch (kind) {
    case StepKind::AllReduce:
      return {before, before};
    case StepKind::ReduceScatter:
      return {before - after, after * (n - 1)};
    case StepKind::AllGather:
      return {before, after - before};
    case StepKind::AllToAll: { // a rank sends all elements that it does not keep, to ranks that do not have them
      const auto kept = kept_by(*step.before, *step.after, sizes, c);
      return {before - kept, after - kept};
    }
    default:
      return {};
  }
}

} // namespace shardtensor
