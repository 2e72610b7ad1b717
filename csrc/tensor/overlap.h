// Which ShardTensors share memory. Decided from the whole tensors, and so alike on all ranks: a view may be a copy on some
// ranks only.
#pragma once

#include "tensor/shard_tensor.h"

#include <optional>
#include <utility>

namespace shardtensor {

struct TensorAccess {
  const at::Tensor* tensor;
  const ShardTensorImpl* impl;
  bool written;
  size_t user; // uses of one user may overlap
};

// Positions of two uses that may share elements, the first of which writes. Exact for slices, rows and columns of a tensor
// without gaps: these are boxes on a grid with one dim per stride.
std::optional<std::pair<size_t, size_t>> first_overlap(c10::ArrayRef<TensorAccess> uses);

} // namespace shardtensor
