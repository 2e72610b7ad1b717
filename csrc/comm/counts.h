// Counts collectives, and tells the observer of each one before it is made.
#pragma once

#include "comm/collective.h"
#include "layout/observer.h"

#include <array>

namespace shardtensor::comm {

class Range;

// What this process has sent through comm.h since reset_counts(): one count per kind, and payload bytes it contributed.
struct CommCounts {
  std::array<int64_t, kKinds> calls{};
  std::array<int64_t, kKinds> bytes{};
};
CommCounts counts();
void reset_counts();

// Runs before every call, on each rank along the mesh dim, even with an empty piece. It gets the kind, the bytes that this rank
// contributes, and the mesh dim (-1: between meshes). It may throw. Calls that it makes itself do not run it.
inline Observer<void(CollectiveKind kind, int64_t bytes, const Mesh& mesh, int64_t mesh_dim)> on_collective;
// While one is alive, this thread's calls are neither counted nor observed: for the checking mode.
class UncountedGuard {
 public:
  UncountedGuard();
  ~UncountedGuard();
  UncountedGuard(const UncountedGuard&) = delete;
  UncountedGuard& operator=(const UncountedGuard&) = delete;
};

// Tells on_collective what is about to be called, even if this rank has nothing to send.
void tell(const Collective& c, int64_t bytes);
// The same, and counts it. Profilers show the call for as long as the returned Range lives.
[[nodiscard]] Range begin(const Collective& c, int64_t bytes);

} // namespace shardtensor::comm
