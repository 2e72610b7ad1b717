#include "redistribute/watch.h"

#include <atomic>

namespace shardtensor {

namespace {

std::atomic<Watcher> g_watcher{nullptr};

} // namespace

void set_watcher(Watcher watcher) {
  g_watcher = watcher;
}

Watcher watcher() {
  return g_watcher.load(std::memory_order_relaxed);
}

} // namespace shardtensor
