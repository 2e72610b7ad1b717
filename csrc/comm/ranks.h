// Which ranks and devices the process groups of a mesh have.
#pragma once

#include "layout/mesh.h"

#include <c10/core/Device.h>

#include <string>

namespace shardtensor::comm {

// The name of the group along the mesh dim, or of the default group (-1). Raises if there is none; `what`: the collective that
// needs it, for the error.
const std::string& group_name(const Mesh& mesh, int64_t mesh_dim, const char* what);

// The number of ranks of the default group that the mesh was made with; 0 without one.
int64_t size_of_world(const Mesh& mesh);

// The device for this rank's tensors on the mesh: the one that its groups are bound to, or else the current device of the
// mesh's type.
c10::Device device_of(const Mesh& mesh);

// Whether this rank is alone along the mesh dim; it then makes no call.
bool is_alone(const Mesh& mesh, int64_t mesh_dim);
// For tests of a backend with one rank: a rank that is alone calls the backend anyway.
void call_alone(bool on);

} // namespace shardtensor::comm
