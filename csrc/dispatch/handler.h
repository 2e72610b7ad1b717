// The dispatch key's handler and its registration.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace shardtensor {

// Registers the handler for every aten op that takes a tensor and is not a composite, and as the key's fallback.
// Called once at import; returns the number of ops.
int64_t install_handler();

// Called (with the GIL, if Python set it) with the op's name, why it gathers its inputs and their layouts; null: no observer.
using FallbackLog = void (*)(const std::string& op, const char* why, const std::string& layouts);
void set_fallback_log(FallbackLog log);
// Tells the observer, if there is one.
void tell_of_gather(const std::string& op, const char* why, const std::string& layouts);

struct CacheInfo {
  int64_t hits, misses, entries;
  int64_t threads; // that have caches
};
CacheInfo cache_info(); // of this thread
void clear_cache();
int64_t times_cleared();

} // namespace shardtensor
