#include "kernels/random.h"

#include "comm/tensor_kind.h"
#include "kernels/draws.h"

#include <ATen/ATen.h>

#include <cmath>

namespace shardtensor::kernels {

namespace {

bool whole(const Intervals& runs, int64_t size) {
  return runs.size() == 1 && runs[0].start == 0 && runs[0].length == size;
}

LocalRegion merge(c10::IntArrayRef sizes, c10::ArrayRef<Intervals> runs) {
  LocalRegion held;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (d > 0 && whole(runs[d], sizes[d])) {
      auto& last = held.dims.back();
      last.size *= sizes[d];
      last.local *= sizes[d];
      for (auto& run : last.runs) {
        run = {run.start * sizes[d], run.length * sizes[d]};
      }
      continue;
    }
    held.dims.push_back({sizes[d], length_of(runs[d]), runs[d]});
  }
  if (held.dims.empty()) { // a scalar
    held.dims.push_back({1, 1, {{0, 1}}});
  }
  for (const auto& d : held.dims) {
    held.numel *= d.local;
  }
  return held;
}

struct NoFill {
  template <typename Scalar, typename Draw>
  void operator()(const Draw&) const {}
};

void fill(at::Tensor& local, uint64_t key, const LocalRegion& held, const Distribution& distribution) {
  TORCH_INTERNAL_ASSERT(held.numel == local.numel(), "a piece of ", local.numel(), " elements where ", held.numel, " are held");
  if (!local.is_contiguous() || is_wrapper(local)) {
    auto dense = at::empty(local.sizes(), at::TensorOptions(local.device()).dtype(local.scalar_type()));
    fill(dense, key, held, distribution);
    local.copy_(dense);
    return;
  }
  if (held.numel == 0) {
    return with_draw(local.scalar_type(), key, distribution, NoFill()); // raises for an unsupported dtype, like the other ranks
  }
  if (!has_values(local)) {
    return;
  }
  if (local.is_cpu()) {
    cpu::fill_random(local, key, held, distribution);
  } else {
    TORCH_CHECK_NOT_IMPLEMENTED(
        local.is_cuda(), "shardtensor: random numbers on ", local.device(), "; there are kernels for cpu and cuda");
    cuda::fill_random(local, key, held, distribution);
  }
}

} // namespace

void fill_runs(
    at::Tensor& local,
    uint64_t key,
    c10::IntArrayRef sizes,
    c10::SmallVector<Intervals, 6> runs,
    const Distribution& distribution) {
  if (!local.is_complex()) {
    fill(local, key, merge(sizes, runs), distribution);
    return;
  }
  // As in torch: real and imaginary parts have the same distribution, and share a normal's variance.
  auto parts = at::view_as_real(local);
  Sizes part_sizes(sizes.begin(), sizes.end());
  part_sizes.push_back(2);
  runs.push_back({{0, 2}});
  auto part = distribution;
  if (part.kind == Distribution::Family::Normal) {
    part.b /= std::sqrt(2.0);
  }
  fill(parts, key, merge(part_sizes, runs), part);
}

} // namespace shardtensor::kernels
