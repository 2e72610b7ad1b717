#include "comm/counts.h"

#include "comm/range.h"

#include <c10/util/ScopeExit.h>

#include <atomic>

namespace shardtensor::comm {

namespace {

std::array<std::atomic<int64_t>, kKinds> g_calls{};
std::array<std::atomic<int64_t>, kKinds> g_bytes{};

thread_local bool t_telling = false;
thread_local int64_t t_aside = 0;

} // namespace

CommCounts counts() {
  CommCounts out;
  for (size_t i = 0; i < kKinds; ++i) {
    out.calls[i] = g_calls[i].load(std::memory_order_relaxed);
    out.bytes[i] = g_bytes[i].load(std::memory_order_relaxed);
  }
  return out;
}

void reset_counts() {
  for (size_t i = 0; i < kKinds; ++i) {
    g_calls[i] = 0;
    g_bytes[i] = 0;
  }
}

UncountedGuard::UncountedGuard() {
  ++t_aside;
}
UncountedGuard::~UncountedGuard() {
  --t_aside;
}

void tell(const Collective& c, int64_t bytes) {
  if (C10_LIKELY(!on_collective) || t_telling || t_aside) {
    return;
  }
  t_telling = true;
  const auto told = c10::make_scope_exit([] { t_telling = false; });
  on_collective(c.counted(), bytes, *c.mesh, c.mesh_dim);
}

Range begin(const Collective& c, int64_t bytes) {
  tell(c, bytes);
  if (C10_LIKELY(!t_aside)) {
    g_calls[static_cast<size_t>(c.counted())].fetch_add(1, std::memory_order_relaxed);
    g_bytes[static_cast<size_t>(c.counted())].fetch_add(bytes, std::memory_order_relaxed);
  }
  return Range(c.counted(), bytes);
}

} // namespace shardtensor::comm
