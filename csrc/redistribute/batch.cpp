#include "comm/coalescing.h"
#include "comm/comm.h"
#include "comm/desync.h"
#include "comm/tensor_kind.h"
#include "kernels/boxes.h"
#include "redistribute/redistribute.h"
#include "redistribute/route.h"
#include "redistribute/steps.h"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <utility>

namespace shardtensor {

namespace {

// Bytes of the whole tensor, which all ranks know. A larger one moves alone: over Gloo, copying it costs more than a call.
constexpr double kAlone = 1 << 21;
// Bytes of the staging buffers of all tensors that move together.
constexpr double kTogether = 1 << 24;

struct BatchItem {
  const PieceMove& moved;
  StepState state;
  std::vector<RouteStep> steps;
  std::vector<int64_t> kinds; // of the steps: those of one kind may be one collective. -1: nothing is sent
  size_t next = 0;
  double bytes = 0;

  const RouteStep& step() const {
    return steps[next];
  }
  bool arrived() const {
    return next == steps.size();
  }
  bool is_at_last_call() const {
    return std::all_of(kinds.begin() + static_cast<int64_t>(next) + 1, kinds.end(), [](int64_t kind) { return kind < 0; });
  }
};
using BatchItemPtrs = std::vector<BatchItem*>;
struct Batch : std::vector<BatchItem> {
  bool async = false; // the last call of each is only started
};

bool of_one_kind(const RouteStep& a, const RouteStep& b) {
  return a.kind == b.kind && a.mesh_dim == b.mesh_dim && &a.before->mesh() == &b.before->mesh() &&
         &a.after->mesh() == &b.after->mesh();
}

bool takes_part(const RouteStep& step) {
  return step.before->mesh().has_this_rank() || step.after->mesh().has_this_rank();
}

// The compiler merges the collectives of a graph itself, a wrapper's values must be extracted first, and a tensor without
// values sends nothing.
bool goes_its_own_way(const PieceMove& m) {
  return m.from == m.to || is_traced(m.local) || (m.from->has_partial() && is_wrapper(m.local)) || !has_values(m.local);
}

BatchItem traveller(const PieceMove& m) {
  check_reducible(*m.from, *m.to, m.local.scalar_type());
  if (&m.from->mesh() != &m.to->mesh()) {
    check_devices(*m.from, *m.to);
  }
  const auto item = static_cast<int64_t>(m.local.element_size());
  BatchItem out{m, {}, route(*m.from, *m.to, m.sizes, item), {}};
  out.state.local = kernels::resolved(m.local);
  out.state.layout = m.from;
  out.state.sizes = m.sizes;
  out.bytes = static_cast<double>(c10::multiply_integers(m.sizes)) * static_cast<double>(item);
  return out;
}

// The ranks agree about each tensor before any moves.
void agree(const BatchItem& t) {
  if (t.steps.empty()) {
    return;
  }
  auto end = t.steps[0].before;
  for (const auto& step : t.steps) {
    if (&step.after->mesh() != &end->mesh()) {
      break;
    }
    end = step.after;
  }
  const auto& start = t.steps[0].before;
  if (start != end && start->mesh().has_this_rank()) {
    agree(*plan_for(*start, *end, t.bytes), *start, *end, t.moved.sizes, t.state.local.scalar_type());
  }
}

void number_kinds(Batch& all) {
  std::vector<const RouteStep*> kinds;
  for (auto& t : all) {
    for (const auto& step : t.steps) {
      if (!communicates(step)) {
        t.kinds.push_back(-1);
        continue;
      }
      const auto known = std::find_if(kinds.begin(), kinds.end(), [&](const RouteStep* k) { return of_one_kind(*k, step); });
      t.kinds.push_back(known - kinds.begin());
      if (known == kinds.end()) {
        kinds.push_back(&step);
      }
    }
  }
}

// The mesh dims of `mesh` (bits) along which collectives are still due.
uint64_t due_along(const Batch& all, const Mesh& mesh) {
  uint64_t out = 0;
  for (const auto& t : all) {
    for (auto i = t.next; i < t.steps.size(); ++i) {
      out |= &t.steps[i].before->mesh() == &mesh ? communicating_dims(t.steps[i]) : 0;
    }
  }
  return out;
}

// Makes errors of `rest` name its step.
comm::InFlight with_step_context(comm::InFlight rest, const BatchItem& t) {
  const auto last = std::find_if(t.steps.rbegin(), t.steps.rend(), [](const RouteStep& step) { return communicates(step); });
  return with_step_context(std::move(rest), *t.moved.from, *t.moved.to, *last);
}

template <typename F>
void in_next_step(const Batch& all, const BatchItem& t, const F& run) {
  const auto& moved = t.moved;
  with_step_context(*moved.from, *moved.to, t.step(), run, [&] { return due_along(all, moved.from->mesh()); });
}

// Does the step, or starts it.
void take(const Batch& all, BatchItem& t, bool later) {
  auto& s = t.state;
  const auto& step = t.step();
  s.layout = step.before;
  s.later = later;
  if (takes_part(step)) {
    in_next_step(all, t, [&] { take_step(s, step, step.after); });
    TORCH_INTERNAL_ASSERT(s.layout == step.after, "redistribute: ended at ", s.layout->str(), ", not ", step.after->str());
  }
}

void take_local_steps(Batch& all) {
  for (auto& t : all) {
    for (; !t.arrived() && !communicates(t.step()); ++t.next) {
      take(all, t, false);
    }
  }
}

// The tensors that move next. A tensor waits if another one will later come to a step of the same kind, so that they can move
// together.
BatchItemPtrs next_to_go(Batch& all) {
  std::vector<int64_t> later;
  for (const auto& t : all) {
    for (auto i = t.next + 1; i < t.steps.size(); ++i) {
      later.push_back(t.kinds[i]);
    }
  }
  std::sort(later.begin(), later.end());
  BatchItemPtrs out;
  BatchItem* first = nullptr;
  for (auto& t : all) {
    if (t.arrived()) {
      continue;
    }
    first = first ? first : &t;
    if (!std::binary_search(later.begin(), later.end(), t.kinds[t.next])) {
      out.push_back(&t);
    }
  }
  if (out.empty() && first) { // each waits for another
    for (auto& t : all) {
      if (!t.arrived() && t.kinds[t.next] == first->kinds[first->next]) {
        out.push_back(&t);
      }
    }
  }
  return out;
}

void go_alone(const Batch& all, BatchItem& t) {
  take(all, t, all.async && t.is_at_last_call());
}

void go_together(const Batch& all, const BatchItemPtrs& picked) {
  if (picked.size() == 1) {
    return go_alone(all, *picked[0]);
  }
  comm::CoalescedCalls together;
  for (auto* t : picked) {
    take(all, *t, true);
  }
  const auto& first = *picked[0];
  const auto& mesh = first.moved.from->mesh();
  const auto text = [&] {
    return c10::str(
        "redistribute: ", picked.size(), " tensors together, the first from ", first.moved.from->str(), " to ",
        first.moved.to->str(), ", step ", name_of(first.step().kind));
  };
  comm::with_error_context(
      mesh, text, [&] { together.go(); }, [&] { return due_along(all, mesh); },
      {first.moved.from.get(), first.moved.to.get(), picked.size()});
  for (auto* t : picked) {
    auto& s = t->state;
    if (s.rest && !(all.async && t->is_at_last_call())) {
      with_step_context(
          *t->moved.from, *t->moved.to, t->step(), [&] { s.rest.wait(); }, nothing_due);
    }
  }
}

void go(const Batch& all, const BatchItemPtrs& picked) {
  BatchItemPtrs small;
  double bytes = 0;
  const auto go_now = [&] {
    if (!small.empty()) {
      go_together(all, std::exchange(small, {}));
    }
    bytes = 0;
  };
  for (auto* t : picked) {
    if (t->bytes > kAlone) {
      go_alone(all, *t);
      continue;
    }
    if (bytes + t->bytes > kTogether) {
      go_now();
    }
    small.push_back(t);
    bytes += t->bytes;
  }
  go_now();
}

} // namespace

std::vector<at::Tensor> redistribute_all(const std::vector<PieceMove>& tensors, std::vector<comm::InFlight>* rests) {
  std::vector<at::Tensor> out(tensors.size());
  std::vector<size_t> index;
  Batch all;
  all.async = rests != nullptr;
  if (rests) {
    rests->resize(tensors.size());
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& m = tensors[i];
    if (goes_its_own_way(m)) {
      out[i] = redistribute(m.local, *m.from, *m.to, m.sizes, rests ? &(*rests)[i] : nullptr);
    } else {
      index.push_back(i);
      all.push_back(traveller(m));
    }
  }
  for (const auto& t : all) {
    agree(t);
  }
  number_kinds(all);
  for (;;) {
    take_local_steps(all);
    const auto picked = next_to_go(all);
    if (picked.empty()) {
      break;
    }
    go(all, picked);
    for (auto* t : picked) {
      ++t->next;
    }
  }
  for (size_t i = 0; i < all.size(); ++i) {
    auto& s = all[i].state;
    out[index[i]] = std::move(s.local);
    if (s.rest) {
      (*rests)[index[i]] = with_step_context(std::move(s.rest), all[i]);
    }
  }
  return out;
}

} // namespace shardtensor
