// The kinds of collectives, by which they are counted and named.
#pragma once

#include <array>
#include <cstdint>

namespace shardtensor::comm {

enum class CollectiveKind : uint8_t { AllReduce, AllGather, AllToAll, ReduceScatter, Broadcast, Scatter, kCount };

inline constexpr size_t kKinds = static_cast<size_t>(CollectiveKind::kCount);

inline const char* name_of(CollectiveKind kind) {
  static constexpr std::array<const char*, kKinds> names = {"all_reduce",     "all_gather", "all_to_all",
                                                            "reduce_scatter", "broadcast",  "scatter"};
  return names[static_cast<size_t>(kind)];
}

} // namespace shardtensor::comm
