// The twin of cpu/random.cpp. Compiled with -fmad=false: the same roundings as on the host.
#include "kernels/cuda/launch.cuh"
#include "kernels/draws.h"
#include "kernels/random.h"

namespace shardtensor::kernels::cuda {

namespace {

constexpr int kMaxDims = 12; // dims that are cut, plus one
constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1 << 16;

struct DeviceRegion {
  int ndim = 0;
  int64_t size[kMaxDims];
  int64_t local[kMaxDims];
  int64_t start[kMaxDims];        // of the only run; or, with `runs`, the first run's place in the table
  int runs[kMaxDims];             // 0: one
  const int64_t* table = nullptr; // start, length of each run

  __device__ uint64_t global_index(int64_t i) const {
    uint64_t at = 0, stride = 1;
    for (int d = ndim - 1; d >= 0; --d) {
      int64_t k = i % local[d];
      i /= local[d];
      if (runs[d] == 0) {
        k += start[d];
      } else {
        const int64_t* run = table + start[d];
        for (int r = 0; r + 1 < runs[d] && k >= run[1]; ++r, run += 2) {
          k -= run[1];
        }
        k += run[0];
      }
      at += stride * static_cast<uint64_t>(k);
      stride *= static_cast<uint64_t>(size[d]);
    }
    return at;
  }
};

template <typename Scalar, typename Draw>
__global__ void fill_kernel(Scalar* out, DeviceRegion grid, int64_t n, Draw draw) {
  constexpr int kWidth = Draw::kWidth;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x * kWidth;
  for (int64_t first = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kWidth; first < n; first += step) {
    typename Draw::Value block[kWidth];
    uint64_t have = ~uint64_t{0};
    for (int k = 0; k < kWidth && first + k < n; ++k) {
      const uint64_t at = grid.global_index(first + k);
      if (at / kWidth != have) {
        have = at / kWidth;
        draw(have, block);
      }
      auto value = block[0];
      for (int j = 1; j < kWidth; ++j) { // constant indices, so that the block stays in registers
        value = at % kWidth == static_cast<uint64_t>(j) ? block[j] : value;
      }
      out[first + k] = draw.template finish<Scalar>(value);
    }
  }
}

struct FillOnCuda {
  at::Tensor& local;
  const DeviceRegion& grid;

  template <typename Scalar, typename Draw>
  void operator()(const Draw& draw) const {
    const int64_t n = local.numel();
    const int64_t per_block = static_cast<int64_t>(kThreads) * Draw::kWidth;
    const auto blocks = static_cast<unsigned>(std::min(kMaxBlocks, (n + per_block - 1) / per_block));
    launch<Scalar*, DeviceRegion, int64_t, Draw>(
        fill_kernel<Scalar, Draw>, blocks, kThreads, local.mutable_data_ptr<Scalar>(), grid, n, draw);
  }
};

} // namespace

void fill_random(at::Tensor& local, uint64_t key, const LocalRegion& held, const Distribution& distribution) {
  const DeviceGuard guard(local.device());
  TORCH_CHECK(
      !capturing(),
      "shardtensor: random numbers within a CUDA graph: every replay would draw the same ones, since their key comes "
      "from the host's generator. Draw them before the graph, or leave dropout out of it");
  TORCH_CHECK(held.dims.size() <= kMaxDims, "shardtensor: a random op on a tensor cut along ", held.dims.size() - 1, " dims");
  DeviceRegion grid;
  grid.ndim = static_cast<int>(held.dims.size());
  std::vector<int64_t> table;
  for (int d = 0; d < grid.ndim; ++d) {
    const auto& dim = held.dims[d];
    const bool one = dim.runs.size() == 1;
    grid.size[d] = dim.size;
    grid.local[d] = dim.local;
    grid.start[d] = one ? dim.runs[0].start : static_cast<int64_t>(table.size());
    grid.runs[d] = one ? 0 : static_cast<int>(dim.runs.size());
    for (size_t r = 0; !one && r < dim.runs.size(); ++r) {
      table.insert(table.end(), {dim.runs[r].start, dim.runs[r].length});
    }
  }
  at::Tensor held_there;
  if (!table.empty()) {
    held_there = on_device(table, local.device());
    grid.table = held_there.const_data_ptr<int64_t>();
  }
  with_draw(local.scalar_type(), key, distribution, FillOnCuda{local, grid});
}

} // namespace shardtensor::kernels::cuda
