// One call to a process group: how errors name it, and how to wait for it.
#pragma once

#include "comm/collective.h"
#include "comm/desync.h"
#include "comm/gil.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <stdexcept>

namespace shardtensor::comm {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct CollectiveCall {
  CollectiveKind kind = CollectiveKind::AllReduce;
  int64_t mesh_dim = -1, rank = 0;
  desync::Ticket ticket;

  CollectiveCall() = default;
  CollectiveCall(CollectiveKind k, const Mesh& mesh, int64_t m) : kind(k), mesh_dim(m), rank(mesh.rank()) {}
  explicit CollectiveCall(const Collective& c) : CollectiveCall(c.counted(), *c.mesh, c.mesh_dim) {}
  std::string call() const {
    return c10::str(name_of(kind), mesh_dim < 0 ? " between meshes" : c10::str(" along mesh dim ", mesh_dim));
  }
  std::string str() const {
    return c10::str(call(), ", rank ", rank);
  }
};

// Whether this thread is inside a call from comm/ to a process group.
bool is_calling();
// While one is alive, is_calling() is true on this thread.
class BackendCallGuard {
 public:
  BackendCallGuard();
  ~BackendCallGuard();
  BackendCallGuard(const BackendCallGuard&) = delete;
  BackendCallGuard& operator=(const BackendCallGuard&) = delete;
};

// Runs `run`, which calls the process group. Adds the call to the context of errors: c10's errors keep their class, and a
// backend's own errors become torch.distributed's. Releases the GIL: Gloo's threads drop earlier works under a lock that a new
// call needs, and dropping a tensor with a Python object needs the GIL.
template <typename F>
auto guarded(const CollectiveCall& where, F&& run) {
  const BackendCallGuard calling;
  try {
    const NoGilGuard released;
    return run();
  } catch (c10::Error& e) {
    e.add_context(where.str());
    throw;
  } catch (const std::runtime_error& e) {
    throw c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, where.str() + ": " + e.what());
  }
}

// Waits for the work; errors name the call, and the ranks that have not answered.
void wait(const CollectiveCall& where, const WorkPtr& work);

} // namespace shardtensor::comm
