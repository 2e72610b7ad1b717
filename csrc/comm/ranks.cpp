#include "comm/ranks.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <atomic>

namespace shardtensor::comm {

namespace {

std::atomic<bool> g_call_alone{false};

} // namespace

const std::string& group_name(const Mesh& mesh, int64_t mesh_dim, const char* what) {
  const auto& name = mesh_dim < 0 ? mesh.description().world : mesh.group(mesh_dim);
  TORCH_CHECK(
      mesh_dim >= 0 || !name.empty(), "shardtensor: pieces move between ranks of ", mesh.str(), ", but rank ", mesh.rank(),
      " had no default process group when the mesh was made; call init_process_group first");
  TORCH_CHECK(
      !name.empty(), "shardtensor: ", what, " along mesh dim ", mesh_dim, " of ", mesh.str(), ", but rank ", mesh.rank(),
      " has no process group there; the mesh was made without groups, or does not hold this rank");
  return name;
}

int64_t size_of_world(const Mesh& mesh) {
  const auto& name = mesh.description().world;
  return name.empty() ? 0 : c10d::resolve_process_group(name)->getSize();
}

c10::Device device_of(const Mesh& mesh) {
  const c10::Device device(mesh.description().device_type);
  for (int64_t m = 0; m < mesh.ndim() && !device.is_cpu(); ++m) {
    if (mesh.group(m).empty()) {
      continue;
    }
    const auto group = c10d::resolve_process_group(mesh.group(m));
    const auto types = group->getDeviceTypes();
    if (std::any_of(types.begin(), types.end(), [&](c10::Device d) { return d.type() == device.type(); })) {
      const auto bound = group->getBackend(device.type())->getBoundDeviceId();
      if (bound && bound->type() == device.type() && bound->has_index()) {
        return *bound;
      }
    }
  }
  return device;
}

bool is_alone(const Mesh& mesh, int64_t mesh_dim) {
  return mesh.size(mesh_dim) == 1 && !g_call_alone.load(std::memory_order_relaxed);
}

void call_alone(bool on) {
  g_call_alone = on;
}

} // namespace shardtensor::comm
