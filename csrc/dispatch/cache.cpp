#include "dispatch/cache.h"

#include "layout/of_thread.h"

#include <atomic>
#include <utility>

namespace shardtensor {

namespace {

constexpr size_t kLimit = 4096;

std::atomic<int64_t> g_generation{0};

std::atomic<int64_t> g_alive{0}; // threads that have caches

struct ThreadCaches {
  std::vector<std::unique_ptr<Cache>> by_op;
  int64_t generation = 0;

  ~ThreadCaches() {
    --g_alive;
  }
};

// A bare pointer: access needs no guard and no call.
thread_local ThreadCaches* t_caches __attribute__((tls_model("initial-exec"))) = nullptr;

thread_local FreedWithThread<ThreadCaches> t_end(t_caches);

ThreadCaches& caches() {
  if (C10_UNLIKELY(!t_caches)) {
    t_end.use();
    t_caches = new ThreadCaches();
    ++g_alive;
  }
  return *t_caches;
}

} // namespace

int64_t Cache::generation() {
  return g_generation.load(std::memory_order_relaxed);
}

Cache& Cache::of(int32_t op) {
  auto& all = caches();
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

const rules::SolutionPtr* Cache::find(const Key& key) {
  if (!slots_.empty()) {
    const auto mask = slots_.size() - 1;
    for (auto i = key.hash() & mask; slots_[i]; i = (i + 1) & mask) {
      if (slots_[i]->key == key) {
        ++hits_;
        return &slots_[i]->solution;
      }
    }
  }
  ++misses_;
  return nullptr;
}

void Cache::put(Key key, rules::SolutionPtr solution) {
  if (used_ >= kLimit) {
    slots_.clear();
    used_ = 0;
  }
  if (used_ * 2 >= slots_.size()) {
    grow();
  }
  const auto mask = slots_.size() - 1;
  auto i = key.hash() & mask;
  while (slots_[i]) {
    if (slots_[i]->key == key) {
      slots_[i]->solution = std::move(solution);
      return;
    }
    i = (i + 1) & mask;
  }
  slots_[i] = std::make_unique<Entry>(Entry{std::move(key), std::move(solution)});
  ++used_;
}

void Cache::grow() {
  auto old = std::move(slots_);
  slots_.clear();
  slots_.resize(std::max<size_t>(8, old.size() * 2));
  const auto mask = slots_.size() - 1;
  for (auto& entry : old) {
    if (entry) {
      auto i = entry->key.hash() & mask;
      while (slots_[i]) {
        i = (i + 1) & mask;
      }
      slots_[i] = std::move(entry);
    }
  }
}

CacheInfo cache_info() {
  CacheInfo info{0, 0, 0, g_alive};
  for (const auto& cache : caches().by_op) {
    if (cache) {
      cache->add_to(info);
    }
  }
  return info;
}

void Cache::add_to(CacheInfo& info) const {
  info.hits += hits_;
  info.misses += misses_;
  info.entries += static_cast<int64_t>(used_);
}

void clear_cache() {
  ++g_generation;
}

int64_t times_cleared() {
  return g_generation.load(std::memory_order_relaxed);
}

} // namespace shardtensor
