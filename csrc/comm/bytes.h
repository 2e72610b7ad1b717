// A tensor's memory as bytes. Backends support only some dtypes, so everything that is not reduced is sent as bytes.
#pragma once

#include <ATen/ATen.h>

namespace shardtensor::comm {

// In bytes. NCCL copies 16 bytes at a time if both buffers start at multiples of 16, and otherwise one element at a time. It
// copies bytes for every collective that does not reduce, whatever the dtype.
constexpr int64_t kStart = 16;
inline int64_t rounded_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// `t` is contiguous (its strides along dims of size 1 may be anything).
inline at::Tensor as_bytes(const at::Tensor& t) {
  return t.numel() ? at::detach(t).as_strided({t.numel()}, {1}).view(at::kByte) : at::empty({0}, t.options().dtype(at::kByte));
}

} // namespace shardtensor::comm
