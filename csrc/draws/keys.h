// Keys of random ops, and pieces filled from them. The keys come from torch's own generators, which must have the same state
// on all ranks of a mesh.
#pragma once

#include "kernels/random.h"

#include <ATen/core/Generator.h>
#include <c10/core/SymIntArrayRef.h>

#include <optional>

namespace shardtensor::draws {

// Makes sure that the default generators of the mesh's ranks have one state. The first call on a mesh, by all its ranks,
// copies the first rank's state, with a warning on ranks where it differs.
void agree(const Mesh& mesh);

// 64 bits from `generator`, else from the default CPU generator, for CUDA tensors too: torch.manual_seed, fork_rng and
// activation checkpointing work as usual. Every rank calls it once per random op, even with an empty piece. For the default
// generator the ranks agree() first.
uint64_t next_key(const Mesh& mesh, const std::optional<at::Generator>& generator);

// Records that the ranks of the mesh have the same seed: agree() need not compare.
void mark_agreed(const Mesh& mesh);

// The key for fill(): 64 bits, or, in a graph, a tensor that will hold them.
struct Key {
  uint64_t bits = 0;
  at::Tensor traced;
};

// Fills `local`, this rank's piece under `layout` of a tensor of global `sizes`, which may be symbols in a graph. Any strides;
// empty pieces too.
void fill(
    at::Tensor& local,
    const Key& key,
    const Layout& layout,
    c10::SymIntArrayRef sizes,
    const kernels::Distribution& distribution);

} // namespace shardtensor::draws
