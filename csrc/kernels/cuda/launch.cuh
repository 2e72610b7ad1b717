// The kernels' interface to CUDA. tests/cuda_on_host has a twin of this file, which runs the kernels on the host.
// Uses c10/cuda.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>

namespace shardtensor::kernels::cuda {

using DeviceGuard = c10::cuda::CUDAGuard;

inline bool capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

// On the current stream.
template <typename... Parameters>
void launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, const Parameters&... arguments) {
  kernel<<<blocks, threads, 0, c10::cuda::getCurrentCUDAStream()>>>(arguments...);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// Copies through pinned memory, which the caching host allocator does not reuse before the copy is done. Raises inside a CUDA
// graph, which would refer to memory that is reused later.
inline at::Tensor on_device(c10::ArrayRef<int64_t> words, c10::Device device) {
  TORCH_CHECK(
      !capturing(), "shardtensor: a table of ", words.size(), " words cannot be copied to ", device, " within a CUDA graph");
  const auto n = static_cast<int64_t>(words.size());
  const auto pinned = at::empty({n}, at::TensorOptions(at::kLong).pinned_memory(true));
  std::copy_n(words.data(), n, pinned.mutable_data_ptr<int64_t>());
  auto table = at::empty({n}, at::TensorOptions(at::kLong).device(device));
  table.copy_(pinned, /*non_blocking=*/true);
  return table;
}

} // namespace shardtensor::kernels::cuda
