// Random numbers that depend only on a stream's key and an element's global linear index. So a global tensor is the same for
// any placement, any number of ranks, on CPU or GPU.
#pragma once

#include "kernels/distribution.h"
#include "layout/layout.h"

#include <ATen/core/Tensor.h>

namespace shardtensor::kernels {

// Fills `local`, the piece with the indices `runs` of each dim of a tensor of global `sizes`. Any strides; empty pieces too.
void fill_runs(
    at::Tensor& local,
    uint64_t key,
    c10::IntArrayRef sizes,
    c10::SmallVector<Intervals, 6> runs,
    const Distribution& distribution);

// A rank's part of a global tensor. Each dim that the rank holds whole is merged into the dim before it, so an uncut tensor
// has one dim, and the last dim's runs are contiguous in global index.
struct LocalRegion {
  struct RegionDim {
    int64_t size; // global
    int64_t local;
    Intervals runs;
  };
  c10::SmallVector<RegionDim, 4> dims;
  int64_t numel = 1; // local
};

// The CPU and CUDA twins. `local` is contiguous, not empty, real.
namespace cpu {
void fill_random(at::Tensor& local, uint64_t key, const LocalRegion& held, const Distribution& distribution);
}
namespace cuda {
void fill_random(at::Tensor& local, uint64_t key, const LocalRegion& held, const Distribution& distribution);
}

} // namespace shardtensor::kernels
