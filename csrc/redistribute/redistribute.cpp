#include "redistribute/redistribute.h"

#include "comm/comm.h"
#include "comm/desync.h"
#include "comm/tensor_kind.h"
#include "kernels/boxes.h"
#include "layout/symbolic.h"
#include "redistribute/plan.h"
#include "redistribute/route.h"
#include "redistribute/steps.h"
#include "redistribute/traced.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace shardtensor {

namespace {

using c10::IntArrayRef;

// Whether both plans take the same steps along the same mesh dims.
bool alike(const Plan& a, const Plan& b) {
  return std::equal(a.steps.begin(), a.steps.end(), b.steps.begin(), b.steps.end(), [](const Step& x, const Step& y) {
    return x.kind == y.kind && x.mesh_dim == y.mesh_dim;
  });
}

// A symbol of one rank may be a number on another, and the ranks must plan alike. Costs are linear in the bytes, so a plan that
// is the cheapest for few bytes and for many is the cheapest for any number. Otherwise the graph is guarded to have these sizes.
std::shared_ptr<const Plan> plan_in_graph(const Layout& from, const Layout& to, c10::SymIntArrayRef sizes, size_t item) {
  constexpr double kMany = 1e15;
  const bool transfers = may_transfer_in_graph(from.mesh());
  const auto few = plan_for(from, to, 1, transfers), many = plan_for(from, to, kMany, transfers);
  if (alike(*few, *many)) {
    return many;
  }
  return plan_for(from, to, static_cast<double>(c10::multiply_integers(guarded(sizes))) * static_cast<double>(item), transfers);
}

at::Tensor redistribute_in_graph(const at::Tensor& local, const Layout& from, const Layout& to, c10::SymIntArrayRef sizes) {
  if (&from == &to) {
    return local;
  }
  check_reducible(from, to, local.scalar_type());
  if (&from.mesh() != &to.mesh()) {
    const auto here = relabelled(from, to.mesh_ptr());
    TORCH_CHECK_NOT_IMPLEMENTED(
        here, "redistribute: from ", from.str(), " to ", to.str(),
        ": a move between meshes cannot be traced into a graph (torch.compile, export). Call redistribute() outside of the "
        "compiled function, or in one marked with torch.compiler.disable (rank ",
        from.mesh().rank(), ")");
    return redistribute_in_graph(local, *here, to, sizes);
  }
  if (!from.mesh().has_this_rank()) {
    return local;
  }
  StepState s{{kernels::resolved(local)}, LayoutPtr::reclaim_copy(&from), {}};
  Sizes numbers;
  const auto plan = plan_in_graph(from, to, sizes, local.element_size());
  for (const auto& step : plan->steps) {
    const auto trace = [&] {
      auto next = layout_after(step, *s.layout, to);
      if (auto short_way = traced_step(s.local, step, *s.layout, *next, sizes)) {
        s.local = std::move(*short_way);
        s.layout = std::move(next);
        return;
      }
      if (step.kind != StepKind::MakePartial) { // MakePartial reads no sizes
        s.sizes = numbers = guarded(sizes);
        s.local = s.local.view_symint(symbols(guarded(s.local.sym_sizes())));
        s.layout = s.layout->settled(numbers);
        take_step(s, step, next->settled(numbers));
      } else {
        take_step(s, step, next);
      }
      s.layout = std::move(next);
    };
    with_step_context(from, to, step, trace, nothing_due);
  }
  TORCH_INTERNAL_ASSERT(s.layout.get() == &to, "redistribute: ended at ", s.layout->str(), ", not ", to.str());
  return s.local;
}

// Between two meshes with different ranks or places. Every rank of either mesh calls it.
PendingPiece redistribute_across(const at::Tensor& local, const Layout& from, const Layout& to, IntArrayRef sizes, bool later) {
  check_devices(from, to);
  const auto by = layout_of_sums(from, to, sizes, static_cast<int64_t>(local.element_size()));
  const auto there = transfer_target(*by, to);
  const auto sums = redistribute(kernels::resolved(local), from, *by, sizes);
  auto out = transfer(sums, *by, *there, sizes, later);
  out.local = redistribute(out.local, *there, to, sizes); // makes new summands locally: nothing is sent
  return out;
}

} // namespace

at::Tensor redistribute(
    const at::Tensor& local, const Layout& from, const Layout& to, c10::SymIntArrayRef sizes, comm::InFlight* rest) {
  return is_traced(local) ? redistribute_in_graph(local, from, to, sizes) : redistribute(local, from, to, guarded(sizes), rest);
}

at::Tensor redistribute(const at::Tensor& local, const Layout& from, const Layout& to, IntArrayRef sizes, comm::InFlight* rest) {
  if (&from == &to) {
    return local;
  }
  if (is_traced(local)) {
    return redistribute_in_graph(local, from, to, symbols(sizes));
  }
  check_reducible(from, to, local.scalar_type());
  if (from.has_partial() && is_wrapper(local)) { // the wrapper's class adds nothing to the values, so add up the values
    const auto dense = at::empty(local.sizes(), at::TensorOptions(local.device()).dtype(local.scalar_type())).copy_(local);
    return redistribute(dense, from, to, sizes, rest);
  }
  has_values(local); // or throws
  if (&from.mesh() != &to.mesh()) {
    if (const auto here = relabelled(from, to.mesh_ptr())) {
      return redistribute(local, *here, to, sizes, rest);
    }
    const Step step{StepKind::Transfer, -1};
    PendingPiece out;
    with_step_context(
        from, to, step, [&] { out = redistribute_across(local, from, to, sizes, rest != nullptr); }, nothing_due);
    if (out.rest) {
      *rest = with_step_context(std::move(out.rest), from, to, step);
    }
    return out.local;
  }
  if (!from.mesh().has_this_rank()) {
    return local;
  }
  StepState s{{kernels::resolved(local)}, LayoutPtr::reclaim_copy(&from), sizes};
  const auto bytes = static_cast<double>(c10::multiply_integers(sizes)) * static_cast<double>(local.element_size());
  const auto plan = plan_for(from, to, bytes);
  const auto& steps = plan->steps;
  agree(*plan, from, to, sizes, local.scalar_type());
  const auto last = std::find_if(steps.rbegin(), steps.rend(), communicates);
  for (size_t i = 0; i < steps.size(); ++i) {
    const auto& step = steps[i];
    s.later = rest && last != steps.rend() && &step == &*last;
    const auto begun = comm::begun();
    with_step_context(
        from, to, step, [&] { take_step(s, step, plan->after(i, to)); },
        [&] {
          return communicating_dims(c10::ArrayRef<Step>(steps).slice(i + 1)) |
                 (comm::begun() == begun ? communicating_dims(step) : 0);
        });
  }
  TORCH_INTERNAL_ASSERT(
      s.layout.get() == &to, "redistribute: from ", from.str(), " ended at ", s.layout->str(), ", not ", to.str());
  if (s.rest) {
    *rest = with_step_context(std::move(s.rest), from, to, *last);
  }
  return s.local;
}

} // namespace shardtensor
