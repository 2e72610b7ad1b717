#include "redistribute/watch.h"

#include <atomic>

namespace shardtensor {

namespace {

std::atomic<Watcher> g_watcher{nullptr};
std::atomic<HaloWatcher> g_halo_watcher{nullptr};
std::atomic<FallbackLog> g_fallback_log{nullptr};

} // namespace

void set_watcher(Watcher watcher) {
  g_watcher = watcher;
}

void set_halo_watcher(HaloWatcher watcher) {
  g_halo_watcher = watcher;
}

void tell_of_halo(const HaloRead& read) {
  if (auto* tell = g_halo_watcher.load(std::memory_order_relaxed)) {
    tell(read);
  }
}

void tell_watcher(const Cause& cause, const Layout& from, const Layout& to, c10::SymIntArrayRef sizes, size_t item) {
  if (auto* tell = g_watcher.load(std::memory_order_relaxed)) {
    tell({cause, from, to, sizes.vec(), static_cast<int64_t>(item)});
  }
}

void set_fallback_log(FallbackLog log) {
  g_fallback_log = log;
}

void tell_of_gather(const std::string& op, const char* why, const std::string& layouts) {
  if (auto* log = g_fallback_log.load(std::memory_order_relaxed)) {
    log(op, why, layouts);
  }
}

} // namespace shardtensor
