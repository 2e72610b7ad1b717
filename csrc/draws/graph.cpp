#include "draws/graph.h"

#include "comm/tensor_kind.h"
#include "draws/keys.h"
#include "layout/symbolic.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <memory>

namespace shardtensor::draws {

namespace {

using Mode = c10::impl::TorchDispatchModeKey;
using WeakRecording = std::weak_ptr<c10::impl::PyObject_TorchDispatchMode>;

WeakRecording current_recording() {
  using Tls = c10::impl::TorchDispatchModeTLS;
  const auto mode = Tls::get_mode(Mode::FUNCTIONAL);
  const auto recording = mode ? mode : Tls::get_mode(Mode::PROXY);
  return recording ? WeakRecording(*recording) : WeakRecording();
}

// The key that this thread's recording has drawn last.
struct LastKey {
  WeakRecording of;
  at::Tensor key;
};
thread_local LastKey t_last;

std::optional<at::Tensor> last_of(const WeakRecording& recording) {
  const auto now = recording.lock();
  if (!now || t_last.of.lock() != now) {
    return std::nullopt;
  }
  return t_last.key;
}

template <typename... Args>
at::Tensor call(const char* name, Args&&... args) {
  torch::jit::Stack stack{c10::IValue(std::forward<Args>(args))...};
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(&stack);
  return stack[0].toTensor();
}

// Whether a rank has several runs of the dim, as with a strided shard: then Layout::intervals() must find them.
bool has_several_runs(const Layout& layout, int64_t dim) {
  const auto& all = layout.placements();
  return std::any_of(all.begin(), all.end(), [&](const Placement& p) { return p.is_shard(dim) && p.split_factor > 1; });
}

// This rank's runs of each dim, in one list: the number of runs, then start and length of each.
SymSizes listed(const Layout& layout, c10::SymIntArrayRef sizes) {
  SymSizes out;
  const auto add = [&](const c10::SymInt& start, const c10::SymInt& length) { out.insert(out.end(), {start, length}); };
  for (size_t d = 0; d < sizes.size(); ++d) {
    const auto dim = static_cast<int64_t>(d);
    if (sizes[d].is_symbolic() && !has_several_runs(layout, dim)) {
      const auto run = mine(layout, dim, sizes[d]);
      out.emplace_back(1);
      add(run.start, run.length);
      continue;
    }
    const auto runs = layout.intervals(dim, sizes[d].guard_int(__FILE__, __LINE__), layout.mesh().coordinate());
    out.emplace_back(static_cast<int64_t>(runs.size()));
    for (const auto& run : runs) {
      add(run.start, run.length);
    }
  }
  return out;
}
c10::SmallVector<Intervals, 6> unlisted(c10::IntArrayRef list) {
  c10::SmallVector<Intervals, 6> runs;
  for (size_t i = 0; i < list.size();) {
    auto& dim = runs.emplace_back();
    for (auto n = list[i++]; n > 0; --n, i += 2) {
      dim.push_back({list[i], list[i + 1]});
    }
  }
  return runs;
}

at::Tensor next_key_now(const at::Tensor& like, const std::optional<at::Tensor>& after, const c10::List<std::string>& groups) {
  const auto mesh = Mesh::with_groups(groups.vec());
  TORCH_CHECK(mesh, "shardtensor: a graph draws random numbers on a mesh that this process has not made");
  return at::scalar_tensor(std::bit_cast<int64_t>(next_key(*mesh, std::nullopt)), at::kLong);
}

at::Tensor drawn_now(
    const at::Tensor& like,
    const at::Tensor& key,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef runs,
    int64_t kind,
    double a,
    double b,
    int64_t low,
    int64_t range) {
  auto out = at::empty_like(like);
  const kernels::Distribution distribution{
      static_cast<kernels::Distribution::Family>(kind), a, b, low, std::bit_cast<uint64_t>(range)};
  kernels::fill_runs(out, std::bit_cast<uint64_t>(key.item<int64_t>()), guarded(sizes), unlisted(guarded(runs)), distribution);
  return out;
}

at::Tensor drawn_meta(
    const at::Tensor& like,
    const at::Tensor&,
    c10::SymIntArrayRef,
    c10::SymIntArrayRef,
    int64_t,
    double,
    double,
    int64_t,
    int64_t) {
  return at::empty_like(like);
}

TORCH_LIBRARY_FRAGMENT(shardtensor, m) {
  const std::vector<at::Tag> tags{at::Tag::nondeterministic_seeded}; // not to be merged, left out or run again
  m.def("next_key(Tensor like, Tensor? after, str[] groups) -> Tensor", tags);
  m.def(
      "drawn(Tensor like, Tensor key, SymInt[] sizes, SymInt[] runs, int kind, float a, float b, int low, int range) -> Tensor");
}

TORCH_LIBRARY_IMPL(shardtensor, CPU, m) {
  m.impl("next_key", next_key_now);
  m.impl("drawn", drawn_now);
}
TORCH_LIBRARY_IMPL(shardtensor, CUDA, m) {
  m.impl("next_key", next_key_now);
  m.impl("drawn", drawn_now);
}
TORCH_LIBRARY_IMPL(shardtensor, Meta, m) {
  m.impl("drawn", drawn_meta);
}

} // namespace

at::Tensor next_key_in_graph(const at::Tensor& local, const Mesh& mesh) {
  const auto recording = current_recording();
  auto key = call("shardtensor::next_key", local, last_of(recording), mesh.description().groups);
  t_last = {recording, key};
  return key;
}

at::Tensor drawn_in_graph(
    const at::Tensor& local,
    const at::Tensor& key,
    const Layout& layout,
    c10::SymIntArrayRef sizes,
    const kernels::Distribution& d) {
  return call(
      "shardtensor::drawn", local, key, sizes, listed(layout, sizes), static_cast<int64_t>(d.kind), d.a, d.b, d.low,
      std::bit_cast<int64_t>(d.range));
}

} // namespace shardtensor::draws
