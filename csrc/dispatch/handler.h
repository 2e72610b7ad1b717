// The dispatch key's handler and its registration.
#pragma once

#include <cstdint>

namespace shardtensor {

// Registers the handler for every aten op that takes a tensor and is not a composite, and as the key's fallback.
// Called once at import; returns the number of ops.
int64_t install_handler();

struct CacheInfo {
  int64_t hits, misses, entries;
  int64_t threads; // that have caches
};
CacheInfo cache_info(); // of this thread
void clear_cache();
int64_t times_cleared();

} // namespace shardtensor
