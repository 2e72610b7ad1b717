#include "tensor/reduced_partials.h"

#include "comm/in_flight.h"
#include "tensor/shard_tensor.h"
#include "tensor/write_counter.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <mutex>

namespace shardtensor {

namespace {

using c10::IntArrayRef;

constexpr size_t kMost = 8; // of one storage

std::atomic<bool> g_on{true};
std::atomic<int64_t> g_count{0}, g_bytes{0};

bool is_dense(IntArrayRef sizes, IntArrayRef strides) {
  std::vector<std::pair<int64_t, int64_t>> dims; // stride, size
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) {
      return false;
    }
    if (sizes[d] != 1) {
      dims.emplace_back(strides[d], sizes[d]);
    }
  }
  std::sort(dims.begin(), dims.end());
  int64_t next = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != next) {
      return false;
    }
    next *= size;
  }
  return true;
}

bool same_summands(const Layout& a, const Layout& b) {
  const auto differs = [&](int64_t m) {
    const auto &p = a.placement(m), &q = b.placement(m);
    return (p.is_partial() || q.is_partial()) && p != q;
  };
  return &a.mesh() == &b.mesh() && !a.any_mesh_dim(differs);
}

// An inference tensor counts no writes.
uint32_t version_of(const at::Tensor& piece) {
  return piece.is_inference() ? 0 : piece._version();
}

// Whether the memory holds the values themselves: not for a lazy conjugate or negative.
bool is_literal(const ShardTensorImpl& t) {
  constexpr c10::DispatchKeySet lazy({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  return !(t.key_set() | t.local().key_set()).has_any(lazy);
}

} // namespace

struct ReducedPartial {
  // The summand
  GlobalForm of;
  at::Tensor piece;
  uint32_t version;
  // Its sum
  PieceInLayout placed;
  bool in_place; // in the memory format of the piece, which has no gaps: so views of the piece are views of the sum
  c10::intrusive_ptr<PendingWork> made; // null if nobody has to wait
  bool ahead;                           // made with the summand

  ReducedPartial(const ShardTensorImpl& t, at::Tensor local, const LayoutPtr& layout, comm::InFlight rest, bool ahead)
      : of(t.form()),
        piece(t.local()),
        version(version_of(piece)),
        in_place(layout == without_partial(of.layout) && is_dense(of.sizes, of.strides)),
        ahead(ahead) {
    if (in_place && local.strides() != piece.strides()) {
      local = at::empty_strided(piece.sizes(), piece.strides(), piece.options()).copy_(local);
    }
    placed = {std::move(local), layout};
    const bool on_streams = !placed.local.device().is_cpu();
    if (on_streams) {
      rest.then([] {}, {placed.local});
    }
    if (rest) {
      made = c10::make_intrusive<PendingWork>(std::move(rest));
    }
    if (on_streams) {
      made->wait(placed.local);
    }
    ++g_count;
    g_bytes += bytes();
  }
  ReducedPartial(const ReducedPartial&) = delete;
  ReducedPartial& operator=(const ReducedPartial&) = delete;
  ~ReducedPartial() {
    --g_count;
    g_bytes -= bytes();
  }

  int64_t bytes() const {
    return static_cast<int64_t>(placed.local.nbytes());
  }
  // Whether all elements of `t` are among those that were added up.
  bool covers(const ShardTensorImpl& t) const {
    if (!in_place || of.dtype != t.dtype() || t.numel() == 0 || !same_summands(*of.layout, t.layout())) {
      return false;
    }
    auto last = t.storage_offset();
    for (int64_t d = 0; d < t.dim(); ++d) {
      last += (t.size(d) - 1) * t.stride(d);
    }
    return t.storage_offset() >= of.offset && last < of.offset + c10::multiply_integers(of.sizes);
  }
  PieceInLayout view_as(const ShardTensorImpl& t) const {
    const auto& local = t.local();
    const auto layout = without_partial(t.layout_ptr());
    if (local.numel() == 0) {
      return {at::empty_strided(local.sizes(), local.strides(), local.options()), layout};
    }
    TORCH_INTERNAL_ASSERT(local.is_alias_of(piece), "a view of a summand has other memory (", layout->str(), ")");
    const auto start = local.storage_offset() - piece.storage_offset() + placed.local.storage_offset();
    return {placed.local.as_strided(local.sizes(), local.strides(), start), layout};
  }
};

std::optional<PieceInLayout> sum_of(const ShardTensorImpl& t) {
  auto* writes = t.known_writes();
  if (!writes || !t.keeps_sums()) {
    return std::nullopt;
  }
  std::shared_ptr<const ReducedPartial> found;
  {
    const std::lock_guard<std::mutex> lock(WriteCounter::mutex());
    const auto& sums = writes->sums;
    if (sums.empty() || !is_literal(t) || comm::may_be_capturing(t.local())) {
      return std::nullopt;
    }
    const auto find = [&](const auto& is) {
      const auto at = std::find_if(sums.rbegin(), sums.rend(), [&](const auto& sum) { return (sum->ahead || g_on) && is(*sum); });
      return at == sums.rend() ? nullptr : *at;
    };
    found = find([&](const ReducedPartial& sum) { return t.has(sum.of); });
    if (!found) {
      found = find([&](const ReducedPartial& sum) { return sum.covers(t); });
    }
  }
  if (!found) {
    return std::nullopt;
  }
  // Maybe only this rank has written the piece. It must not add up again, because the other ranks will not.
  const auto& layout = t.layout();
  TORCH_CHECK(
      version_of(found->piece) == found->version, "a ShardTensor (", t.sizes(), ", ", layout.str(), ", rank ",
      layout.mesh().rank(),
      ") is read after this rank wrote its piece through to_local(), but the ranks have added up the pieces ",
      found->ahead ? "when it was made" : "for an earlier reader",
      ". Write the ShardTensor instead, or a clone() of it, or call shardtensor.",
      found->ahead ? "set_reduce_ahead" : "set_reduce_once", "(False) on all ranks before.");
  if (found->made) {
    found->made->wait(found->placed.local);
  }
  return t.has(found->of) ? found->placed : found->view_as(t);
}

namespace {

void keep(const ShardTensorImpl& t, std::shared_ptr<const ReducedPartial> sum) {
  const auto writes = t.writes();
  std::shared_ptr<const ReducedPartial> dropped; // outside of the lock
  const std::lock_guard<std::mutex> lock(WriteCounter::mutex());
  auto& sums = writes->sums;
  if (writes->keeps_no_sums) {
    return;
  }
  if (sums.size() == kMost) {
    dropped = std::move(sums.front());
    sums.erase(sums.begin());
  }
  sums.push_back(std::move(sum));
}

} // namespace

void keep_sum(const ShardTensorImpl& t, const at::Tensor& local, const LayoutPtr& layout) {
  if (t.keeps_sums() && g_on.load(std::memory_order_relaxed) && t.layout().mesh_ptr() == layout->mesh_ptr() &&
      t.layout().mesh().has_this_rank() && is_literal(t) && !t.local().is_inference() && !comm::may_be_capturing(t.local())) {
    keep(t, std::make_shared<const ReducedPartial>(t, local, layout, comm::InFlight(), /*ahead=*/false));
  }
}

void keep_sum_ahead(ShardTensorImpl& t, const at::Tensor& local, const LayoutPtr& layout, comm::InFlight rest) {
  t.read_sums();
  keep(t, std::make_shared<const ReducedPartial>(t, local, layout, std::move(rest), /*ahead=*/true));
}

std::vector<PieceInLayout> sums_near(const ShardTensorImpl& t) {
  std::vector<PieceInLayout> out;
  const auto* writes = t.known_writes();
  const std::lock_guard<std::mutex> lock(WriteCounter::mutex());
  for (size_t i = 0; writes && i < writes->sums.size(); ++i) {
    out.push_back(writes->sums[i]->placed);
  }
  return out;
}

std::pair<int64_t, int64_t> how_many_sums() {
  return {g_count, g_bytes};
}

bool reduces_once() {
  return g_on;
}
void set_reduces_once(bool on) {
  g_on = on;
}

LayoutPtr without_partial(const LayoutPtr& layout) {
  return layout->with_where([&](int64_t m) { return layout->placement(m).is_partial(); }, Placement::replicate());
}

} // namespace shardtensor
