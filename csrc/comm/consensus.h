// Whether the ranks of a mesh agree. Every rank along the mesh dims in `over` (bits) calls these; they communicate.
#pragma once

#include "comm/comm.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

namespace shardtensor::comm {

constexpr uint64_t kAllDims = ~uint64_t{0};

// For each of the numbers, the largest that any rank has.
template <size_t n>
std::array<int64_t, n> largest(const Mesh& mesh, const std::array<int64_t, n>& mine, uint64_t over) {
  auto values = at::tensor(at::ArrayRef<int64_t>(mine), at::kLong).to(device_of(mesh));
  all_reduce_over(values, mesh, over, ReduceOp::Max);
  values = values.cpu();
  std::array<int64_t, n> out;
  std::copy_n(values.template const_data_ptr<int64_t>(), n, out.begin());
  return out;
}

// A line for each different text, cut to about a thousand bytes, with the ranks that gave it.
std::string by_rank(const std::string& text, const Mesh& mesh, uint64_t over);

// Empty if all ranks gave the same text. If not: by_rank(), with the lines of the user's scripts.
std::string differences(const std::string& text, const Mesh& mesh, uint64_t over);

} // namespace shardtensor::comm
