// This thread's cache for moves between two layouts: plans, and what their steps send for tensors of one size. Each thread has
// its own, so there are no locks; it is bounded, and freed with the thread.
#pragma once

#include "layout/layout.h"

#include <c10/util/FunctionRef.h>

#include <memory>

namespace shardtensor {

enum class CachedKind : uint8_t { Plan, DividedPiece, ExchangePart, Transfer, ChunkRuns, JoiningRanks };

struct CacheValue {
  std::shared_ptr<const void> value;
  size_t weight; // about the number of boxes
};
// The value that make() returned for equal arguments before, or else returns now. It is dropped some time after one of the
// layouts is gone, or when the cache is full.
std::shared_ptr<const void> cached(
    const Layout& from, const Layout& to, CachedKind what, c10::IntArrayRef numbers, c10::function_ref<CacheValue()> make);

template <typename T, typename Make>
std::shared_ptr<const T> cached(
    const Layout& from, const Layout& to, CachedKind what, c10::IntArrayRef numbers, const Make& make) {
  return std::static_pointer_cast<const T>(cached(from, to, what, numbers, [&]() -> CacheValue {
    auto value = std::make_shared<const T>(make());
    return {value, value->weight()};
  }));
}

// This thread's number of entries, and their weight.
std::pair<size_t, size_t> plan_cache_size();

} // namespace shardtensor
