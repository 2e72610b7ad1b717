// Random ops: where their keys come from (torch's own generators, which all ranks of a mesh must hold in the same state), and
// pieces filled by them.
#pragma once

#include "kernels/random.h"

#include <ATen/core/Generator.h>

#include <optional>

namespace shardtensor::draws {

// The default generators of the mesh's ranks are in one state. The first call on a mesh, by all its ranks, takes over that of its
// first rank, with a warning where it differs.
void agree(const Mesh& mesh);

// 64 bits from `generator`, else from the default CPU generator, for CUDA tensors too: torch.manual_seed, fork_rng and
// activation checkpointing work as ever. Every rank calls it once per random op, whatever it holds. Of the default generator the
// ranks agree() first.
uint64_t next_key(const Mesh& mesh, const std::optional<at::Generator>& generator);

// The ranks of the mesh are known to have seeded alike: no need to compare.
void mark_agreed(const Mesh& mesh);

// What fill() is given: 64 bits, or, in a graph, a tensor that will hold them.
struct Key {
  uint64_t bits = 0;
  at::Tensor traced;
};

// Fills `local`, this rank's piece under `layout` of a tensor of global `sizes`. Any strides; empty pieces too.
void fill(
    at::Tensor& local, const Key& key, const Layout& layout, c10::IntArrayRef sizes, const kernels::Distribution& distribution);

} // namespace shardtensor::draws
