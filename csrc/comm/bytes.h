// A tensor's memory as bytes: backends support only some dtypes, so what is not reduced travels so.
#pragma once

#include <ATen/ATen.h>

namespace shardtensor::comm {

// In bytes. NCCL copies 16 bytes at a time if what is sent and where it is received start at multiples of 16, else one element at
// a time; and to it all that is not reduced is bytes, whatever dtype it is given.
constexpr int64_t kStart = 16;
inline int64_t rounded_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// `t` is contiguous (its strides along dims of size 1 may be anything).
inline at::Tensor as_bytes(const at::Tensor& t) {
  return t.numel() ? at::detach(t).as_strided({t.numel()}, {1}).view(at::kByte) : at::empty({0}, t.options().dtype(at::kByte));
}

} // namespace shardtensor::comm
