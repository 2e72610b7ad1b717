#include "dispatch/eager_scalar_reduce.h"

#include "comm/comm.h"
#include "comm/desync.h"
#include "comm/group_generation.h"
#include "comm/tensor_kind.h"
#include "dispatch/errors.h"
#include "tensor/reduced_partials.h"
#include "tensor/shard_tensor.h"

#include <ATen/ATen.h>
#include <c10/util/hash.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace shardtensor {

namespace {

std::atomic<bool> g_on{true};

bool is_sum(const Layout& layout) {
  return std::all_of(layout.placements().begin(), layout.placements().end(), [](const Placement& p) {
    return p.is_replicate() || (p.is_partial() && (p.reduce == ReduceOp::Sum || p.reduce == ReduceOp::Avg));
  });
}

uint64_t combined(uint64_t a, uint64_t b) {
  return c10::hash_combine(a, b);
}

// A hash of all results that were reduced ahead in a process group, this one included. So after a rank has made a result that
// others have not, all later hashes differ too, even if the first result is never read.
uint64_t next_in_history(const Mesh& mesh, int64_t mesh_dim, uint64_t identity) {
  static auto* mutex = new std::mutex();
  static auto* histories = new std::unordered_map<uint64_t, uint64_t>(); // by rank (threads may be ranks) and name of the group
  static int64_t generation = 0;
  const auto key = combined(mesh.rank(), std::hash<std::string>()(mesh.group(mesh_dim)));
  const std::lock_guard<std::mutex> lock(*mutex);
  if (std::exchange(generation, comm::group_generation()) != comm::group_generation()) {
    histories->clear();
  }
  auto& history = (*histories)[key];
  history = combined(history, identity);
  return history;
}

// What travels: the value, and 32 bits of the hash as two numbers, each with its square. The reduction adds them up over n ranks.
// All ranks have the same number if and only if the sums are n times this rank's number and n times its square: the numbers'
// variance is then 0. Doubles hold these sums exactly.
constexpr int64_t kRecord = 5;

std::array<int64_t, 2> halves(uint64_t hash) {
  return {static_cast<int64_t>(hash & 0xffff), static_cast<int64_t>(hash >> 16 & 0xffff)};
}

template <typename T>
void write_hash(const at::Tensor& record, uint64_t hash) {
  auto* to = record.mutable_data_ptr<T>() + 1;
  for (const auto h : halves(hash)) {
    *to++ = static_cast<T>(h);
    *to++ = static_cast<T>(h * h);
  }
}

template <typename T>
bool all_have(const at::Tensor& record, uint64_t hash, int64_t ranks) {
  const auto* from = record.const_data_ptr<T>() + 1;
  for (const auto h : halves(hash)) {
    if (from[0] != static_cast<T>(h * ranks) || from[1] != static_cast<T>(h * h * ranks)) {
      return false;
    }
    from += 2;
  }
  return true;
}

constexpr auto kDiffer =
    "the ranks have not made the same sums of no dims. Each rank's value is added to the other ranks' values as soon as it is "
    "made, and values of different sums have been added, here or before. One rank made a sum, a mean or a loss alone (inside `if "
    "rank == 0:`, in a repr or an f-string, for example), or on another line of the script. Make it on all ranks, on the same "
    "line, and read it on the rank that needs it; or call shardtensor.set_reduce_ahead(False) on all ranks, and read it on all "
    "ranks. This rank: ";

// The reduction of one value, one mesh dim after the other.
struct ScalarReduction {
  const Op* op;
  LayoutPtr layout, replicated;
  uint64_t line;
  at::Tensor record, result;

  std::string text() const {
    const auto at = text_of_script(line);
    return c10::str(op->name, at.empty() ? "" : " at ", at, ", which starts to add up its result of no dims, ", layout->str());
  }
  comm::MoveContext move() const {
    return {layout.get(), replicated.get()};
  }
};

template <typename T>
comm::InFlight start(const std::shared_ptr<ScalarReduction>& sum, int64_t mesh_dim) {
  const auto& mesh = sum->layout->mesh();
  const auto& placement = sum->layout->placement(mesh_dim);
  const auto identity = combined(
      combined(std::hash<std::string>()(sum->op->name), sum->line),
      combined(static_cast<uint64_t>(sum->result.scalar_type()), static_cast<uint64_t>(placement.reduce)));
  const auto hash = next_in_history(mesh, mesh_dim, identity);
  write_hash<T>(sum->record, hash);
  comm::InFlight rest;
  comm::with_error_context(
      mesh, [&] { return sum->text(); },
      [&] {
        rest = comm::start(
            {.kind = comm::CollectiveKind::AllReduce,
             .mesh = sum->layout->mesh_ptr(),
             .mesh_dim = mesh_dim,
             .out = sum->record,
             .apart = true});
      },
      [&] { return uint64_t{1} << mesh_dim; }, sum->move());
  rest.then([sum, mesh_dim, hash, average = placement.reduce == ReduceOp::Avg] {
    const auto n = sum->layout->mesh().size(mesh_dim);
    if (!all_have<T>(sum->record, hash, n)) {
      comm::desync::parted(sum->layout->mesh(), mesh_dim, c10::str(kDiffer, sum->text()));
    }
    auto& value = *sum->record.mutable_data_ptr<T>();
    value = average ? value / static_cast<T>(n) : value;
    sum->result.fill_(value);
  });
  rest.within([sum](c10::function_ref<void()> run) {
    comm::with_error_context(
        sum->layout->mesh(), [&] { return sum->text(); }, run, [] { return uint64_t{0}; }, sum->move());
  });
  return rest;
}

// Whether the result's sum along the mesh dim needs other ranks.
bool sends_along(const Layout& layout, int64_t mesh_dim) {
  return layout.placement(mesh_dim).is_partial() && !comm::is_alone(layout.mesh(), mesh_dim);
}

// Whether the value can travel in a record: as a double or a 64-bit integer in main memory, over a backend that adds them up.
bool fits(const at::Tensor& local, const Layout& layout) {
  const auto& mesh = layout.mesh();
  if (!local.device().is_cpu() || !mesh.has_this_rank()) {
    return false;
  }
  if (layout.any_mesh_dim([&](int64_t m) { return sends_along(layout, m) && !comm::can_sum_apart(local.device(), mesh, m); })) {
    return false;
  }
  switch (local.scalar_type()) {
    case at::kDouble:
    case at::kFloat:
    case at::kHalf:
    case at::kBFloat16:
      return true;
    case at::kLong:
    case at::kInt:
    case at::kShort:
    case at::kChar:
    case at::kByte:
      return std::none_of(layout.placements().begin(), layout.placements().end(), [](const Placement& p) {
        return p.is_partial() && p.reduce == ReduceOp::Avg;
      });
    default:
      return false;
  }
}

template <typename T>
at::Tensor start_with_identity(
    const Op& op, const at::Tensor& local, const Layout& layout, const LayoutPtr& replicated, comm::InFlight& rest) {
  auto sum = std::make_shared<ScalarReduction>(ScalarReduction{
      &op, LayoutPtr::reclaim_copy(&layout), replicated, line_of_script(),
      at::empty({kRecord}, at::TensorOptions().dtype(c10::CppTypeToScalarType<T>::value)), at::empty_like(local)});
  *sum->record.mutable_data_ptr<T>() = local.item().to<T>();
  for (int64_t m = 0; m < layout.ndim(); ++m) {
    if (sends_along(layout, m)) {
      rest.wait();
      rest = start<T>(sum, m);
    }
  }
  return sum->result;
}

} // namespace

bool reduces_ahead() {
  return g_on;
}
void set_reduces_ahead(bool on) {
  g_on = on;
}

void reduce_ahead(const Op& op, const at::Tensor& result, const LayoutPtr& replicated) {
  auto& impl = *as_shard_tensor(result);
  const auto& local = impl.local();
  const auto& layout = impl.layout();
  const bool readable = !impl.traced() && !local.is_meta() && !local.key_set().has_any(kStandIns);
  if (!g_on.load(std::memory_order_relaxed) || !readable || !is_sum(layout) || torch::autograd::get_current_node() ||
      !fits(local, layout)) {
    return;
  }
  const bool sends = layout.any_mesh_dim([&](int64_t m) { return sends_along(layout, m); });
  comm::InFlight rest;
  auto reduced = errors::while_doing(op, [&] {
    if (!sends) {
      return local.clone();
    }
    const auto start = c10::isFloatingType(local.scalar_type()) ? start_with_identity<double> : start_with_identity<int64_t>;
    return start(op, local, layout, replicated, rest);
  });
  keep_sum_ahead(impl, reduced, replicated, std::move(rest));
}

} // namespace shardtensor
