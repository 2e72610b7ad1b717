// Keys of random ops. They come from torch's own generators, which must have the same state on all ranks of a mesh.
#pragma once

#include "layout/mesh.h"

#include <ATen/core/Generator.h>

#include <optional>

namespace shardtensor::draws {

// Makes sure that the default generators of the mesh's ranks have one state. The first call on a mesh, by all its ranks,
// copies the first rank's state, with a warning on ranks where it differs.
void agree(const Mesh& mesh);

// 64 bits from `generator`, else from the default CPU generator, for CUDA tensors too: torch.manual_seed, fork_rng and
// activation checkpointing work as usual. Every rank calls it once per random op, even with an empty piece. For the default
// generator the ranks agree() first.
uint64_t next_key(const Mesh& mesh, const std::optional<at::Generator>& generator);

// Records that the ranks of the mesh have the same seed, so that agree() does not communicate.
void mark_agreed(const Mesh& mesh);

} // namespace shardtensor::draws
