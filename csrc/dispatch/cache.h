// Cached solutions by key: one table per op and thread, so that nothing is locked.
#pragma once

#include "dispatch/key.h"
#include "layout/thread_owned.h"
#include "rules/solution.h"

namespace shardtensor {

struct CacheInfo {
  int64_t hits, misses, entries;
  int64_t threads; // that have caches
};
CacheInfo cache_info(); // of this thread
void clear_cache();     // of all threads
int64_t times_cleared();

class Cache {
 public:
  // This thread's table for the op.
  static Cache& of(int32_t op);

  // The solution for a call. `make_key()` makes its key, `add_sizes(key)` adds the tensors' sizes, `solve()` finds the
  // solution. If finding it compared bytes, the key holds the sizes too: a solution must not depend on this rank's earlier
  // calls, or ranks could choose differently.
  template <typename MakeKey, typename AddSizes, typename Solve>
  static rules::SolutionPtr get(int32_t op, const MakeKey& make_key, const AddSizes& add_sizes, const Solve& solve) {
    auto& known = of(op);
    auto key = make_key();
    const auto* hit = known.find(key);
    if (hit && (!(*hit)->sized || key.holds(rules::Reads::kSizes))) {
      return *hit;
    }
    if (hit) {
      add_sizes(key);
      if (const auto* found = known.find(key)) {
        return *found;
      }
    }
    const auto asked = generation();
    auto solution = solve(); // it may run Python, which may clear the tables: `known` and `hit` are gone
    if (asked != generation()) {
      return solution; // found under modes that hold no more
    }
    auto& now = of(op);
    if (solution->reads & ~key.reads()) {
      key = make_key(); // the rule has read what no call's key held yet
      hit = nullptr;
    }
    now.known_.put(key, solution);
    if (!hit && solution->sized && !key.holds(rules::Reads::kSizes)) {
      add_sizes(key);
      now.known_.put(std::move(key), solution);
    }
    return solution;
  }

  void add_to(CacheInfo& info) const;

  const rules::SolutionPtr* find(const CacheKey& key);

 private:
  static int64_t generation(); // of all threads' tables: rises when they are cleared

  ThreadTable<CacheKey, rules::SolutionPtr> known_{4096};
  int64_t hits_ = 0;
  int64_t misses_ = 0;
};

} // namespace shardtensor
