#include "redistribute/plan_cache.h"

#include "layout/thread_owned.h"

#include <c10/util/hash.h>

#include <algorithm>
#include <utility>

namespace shardtensor {

namespace {

constexpr size_t kMostEntries = 4096;
constexpr size_t kMostWeight = 1 << 18; // 30 MB of boxes

struct PlanKey {
  int64_t from, to;
  CachedKind what;
  c10::SmallVector<int64_t, 6> numbers;

  bool operator==(const PlanKey& o) const {
    return from == o.from && to == o.to && what == o.what && numbers == o.numbers;
  }
  size_t hash() const {
    auto h = c10::get_hash(from, to, static_cast<int64_t>(what));
    for (const auto n : numbers) {
      h = c10::hash_combine(h, static_cast<size_t>(n));
    }
    return h;
  }
};

using WeakLayout = c10::weak_intrusive_ptr<const Layout>;
struct CachedEntry {
  WeakLayout from, to;
  CacheValue made;
};

struct PlanTable {
  ThreadTable<PlanKey, CachedEntry> entries{kMostEntries};
  size_t weight = 0;
  size_t next_sweep = 64; // entries

  // Layouts have an id of their own for ever, so entries of layouts that are gone are never found again.
  void sweep() {
    weight = 0;
    entries.keep_if([&](const CachedEntry& e) {
      const bool stays = !e.from.expired() && !e.to.expired();
      weight += stays ? e.made.weight : 0;
      return stays;
    });
    next_sweep = std::max<size_t>(64, 2 * entries.size());
  }
  void make_room(size_t for_weight) {
    if (entries.size() >= next_sweep || weight + for_weight > kMostWeight) {
      sweep();
    }
    if (entries.size() >= kMostEntries || weight + for_weight > kMostWeight) {
      entries.clear();
      weight = 0;
      next_sweep = 64;
    }
  }
};

} // namespace

std::shared_ptr<const void> cached(
    const Layout& from, const Layout& to, CachedKind what, c10::IntArrayRef numbers, c10::function_ref<CacheValue()> make) {
  auto& table = of_thread<PlanTable>();
  PlanKey key{from.id(), to.id(), what, {numbers.begin(), numbers.end()}};
  if (const auto* found = table.entries.find(key)) {
    return found->made.value;
  }
  auto made = make(); // it may look for other things here
  if (made.weight > kMostWeight / 2) {
    return made.value;
  }
  table.make_room(made.weight);
  table.weight += made.weight;
  auto value = made.value;
  const auto weak = [](const Layout& layout) { return WeakLayout(LayoutPtr::reclaim_copy(&layout)); };
  table.entries.put(std::move(key), CachedEntry{weak(from), weak(to), std::move(made)});
  return value;
}

std::pair<size_t, size_t> plan_cache_size() {
  const auto& table = of_thread<PlanTable>();
  return {table.entries.size(), table.weight};
}

} // namespace shardtensor
