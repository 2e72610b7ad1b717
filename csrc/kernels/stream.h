// Where the keys of random ops come from: torch's own generators, which all ranks of a mesh must hold in the same state.
#pragma once

#include "layout/mesh.h"

#include <ATen/core/Generator.h>

#include <optional>

namespace shardtensor::kernels {

// The default generators of the mesh's ranks are in one state. The first call on a mesh, by all its ranks, takes over that of its
// first rank, with a warning where it differs.
void agree(const Mesh& mesh);

// 64 bits from `generator`, else from the default CPU generator, for CUDA tensors too: torch.manual_seed, fork_rng and
// activation checkpointing work as ever. Every rank calls it once per random op, whatever it holds. Of the default generator the
// ranks agree() first.
uint64_t next_key(const Mesh& mesh, const std::optional<at::Generator>& generator);

// The ranks of the mesh are known to have seeded alike: no need to compare.
void mark_agreed(const Mesh& mesh);

} // namespace shardtensor::kernels
