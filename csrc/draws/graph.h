// Random numbers in a graph, as two ops of our own: shardtensor::next_key takes a key from the generator, and advances it, when
// the graph runs; shardtensor::drawn fills a piece by key and global index, so it may be run again for a backward. Fake kernels
// are in Meta (drawn) and in Python (next_key: its key is on the CPU whatever `like` is on).
#pragma once

#include "kernels/random.h"

namespace shardtensor::draws {

// next_key() for a traced piece. A graph draws its keys in the order of tracing: each key op takes the key before as an
// argument.
at::Tensor next_key_in_graph(const at::Tensor& local, const Mesh& mesh);

// A new tensor like `local`, this rank's piece under `layout` of a tensor of global `sizes`, filled. Sizes may be symbols.
at::Tensor drawn_in_graph(
    const at::Tensor& local,
    const at::Tensor& key,
    const Layout& layout,
    c10::SymIntArrayRef sizes,
    const kernels::Distribution& distribution);

} // namespace shardtensor::draws
