// Pieces filled with random numbers, now or in a graph.
#pragma once

#include "kernels/distribution.h"
#include "layout/layout.h"

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

namespace shardtensor::draws {

// The key for fill(): 64 bits, or, in a graph, a tensor that will hold them.
struct RandomKey {
  uint64_t bits = 0;
  at::Tensor traced;
};

// Fills `local`, this rank's piece under `layout` of a tensor of global `sizes`, which may be symbols in a graph. Any strides;
// empty pieces too.
void fill(
    at::Tensor& local,
    const RandomKey& key,
    const Layout& layout,
    c10::SymIntArrayRef sizes,
    const kernels::Distribution& distribution);

} // namespace shardtensor::draws
