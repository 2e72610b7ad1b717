#include "dispatch/cache.h"

#include <atomic>
#include <memory>
#include <vector>

namespace shardtensor {

namespace {

std::atomic<int64_t> g_generation{0};

std::atomic<int64_t> g_alive{0}; // threads that have caches

struct ThreadCaches {
  std::vector<std::unique_ptr<Cache>> by_op;
  int64_t generation = 0;

  ThreadCaches() {
    ++g_alive;
  }
  ~ThreadCaches() {
    --g_alive;
  }
};

} // namespace

int64_t Cache::generation() {
  return g_generation.load(std::memory_order_relaxed);
}

Cache& Cache::of(int32_t op) {
  auto& all = of_thread<ThreadCaches>();
  const auto now = generation();
  if (all.generation != now) {
    all.by_op.clear();
    all.generation = now;
  }
  if (static_cast<size_t>(op) >= all.by_op.size()) {
    all.by_op.resize(op + 1);
  }
  auto& cache = all.by_op[op];
  if (!cache) {
    cache = std::make_unique<Cache>();
  }
  return *cache;
}

const rules::SolutionPtr* Cache::find(const CacheKey& key) {
  const auto* found = known_.find(key);
  ++(found ? hits_ : misses_);
  return found;
}

CacheInfo cache_info() {
  CacheInfo info{0, 0, 0, g_alive};
  for (const auto& cache : of_thread<ThreadCaches>().by_op) {
    if (cache) {
      cache->add_to(info);
    }
  }
  return info;
}

void Cache::add_to(CacheInfo& info) const {
  info.hits += hits_;
  info.misses += misses_;
  info.entries += static_cast<int64_t>(known_.size());
}

void clear_cache() {
  ++g_generation;
}

int64_t times_cleared() {
  return g_generation.load(std::memory_order_relaxed);
}

} // namespace shardtensor
