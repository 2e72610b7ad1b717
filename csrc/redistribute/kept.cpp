#include "redistribute/kept.h"

#include "layout/of_thread.h"

#include <c10/util/hash.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace shardtensor {

namespace {

constexpr size_t kMostEntries = 4096;
constexpr size_t kMostWeight = 1 << 18; // 30 MB of boxes

struct KeptKey {
  int64_t from, to;
  Found what;
  c10::SmallVector<int64_t, 6> numbers;

  bool operator==(const KeptKey& o) const {
    return from == o.from && to == o.to && what == o.what && numbers == o.numbers;
  }
};
struct Hash {
  size_t operator()(const KeptKey& key) const {
    auto h = c10::get_hash(key.from, key.to, static_cast<int64_t>(key.what));
    for (const auto n : key.numbers) {
      h = c10::hash_combine(h, static_cast<size_t>(n));
    }
    return h;
  }
};

using Weak = c10::weak_intrusive_ptr<const Layout>;
struct Entry {
  Weak from, to;
  Made made;
};

struct Table {
  std::unordered_map<KeptKey, Entry, Hash> entries;
  size_t weight = 0;
  size_t next_sweep = 64; // entries

  // Layouts have an id of their own for ever, so entries of layouts that are gone are never found again.
  void sweep() {
    for (auto it = entries.begin(); it != entries.end();) {
      const auto& e = it->second;
      if (e.from.expired() || e.to.expired()) {
        weight -= e.made.weight;
        it = entries.erase(it);
      } else {
        ++it;
      }
    }
  }
  void make_room(size_t for_weight) {
    if (entries.size() >= next_sweep || weight + for_weight > kMostWeight) {
      sweep();
      next_sweep = std::max<size_t>(64, 2 * entries.size());
    }
    if (entries.size() >= kMostEntries || weight + for_weight > kMostWeight) {
      entries.clear();
      weight = 0;
      next_sweep = 64;
    }
  }
};

thread_local Table* t_table = nullptr;
thread_local FreedWithThread<Table> t_end(t_table);

} // namespace

std::shared_ptr<const void> kept(
    const Layout& from, const Layout& to, Found what, c10::IntArrayRef numbers, c10::function_ref<Made()> make) {
  if (C10_UNLIKELY(!t_table)) {
    t_end.use();
    t_table = new Table();
  }
  KeptKey key{from.id(), to.id(), what, {numbers.begin(), numbers.end()}};
  const auto it = t_table->entries.find(key);
  if (C10_LIKELY(it != t_table->entries.end())) {
    return it->second.made.value;
  }
  auto made = make(); // it may look for other things here
  auto& table = *t_table;
  if (made.weight > kMostWeight / 2) {
    return made.value;
  }
  table.make_room(made.weight);
  table.weight += made.weight;
  auto value = made.value;
  const auto weak = [](const Layout& layout) { return Weak(LayoutPtr::reclaim_copy(&layout)); };
  table.entries.emplace(std::move(key), Entry{weak(from), weak(to), std::move(made)});
  return value;
}

std::pair<size_t, size_t> how_much_is_kept() {
  return t_table ? std::pair(t_table->entries.size(), t_table->weight) : std::pair<size_t, size_t>(0, 0);
}

} // namespace shardtensor
