#include "redistribute/watch.h"

#include <atomic>

namespace shardtensor {

namespace {

std::atomic<Watcher> g_watcher{nullptr};
std::atomic<HaloWatcher> g_halo_watcher{nullptr};

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

void tell_watcher(
    const std::string& op,
    const std::string& argument,
    const char* why,
    const Layout& from,
    const Layout& to,
    const at::Tensor& moved) {
  if (auto* tell = g_watcher.load(std::memory_order_relaxed)) {
    tell({op, argument, why, from, to, moved.sym_sizes().vec(), static_cast<int64_t>(moved.element_size())});
  }
}

} // namespace shardtensor
