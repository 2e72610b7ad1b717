// Which ShardTensors share memory. Alike on all ranks: asked of the whole tensors, since a view may be a copy on some ranks only.
#pragma once

#include "tensor/shard_tensor.h"

namespace shardtensor {

// One for a tensor and its views, also those that had to move.
const void* memory_of(const ShardTensorImpl& t);

// Whether some element of their one memory may be in both. Exact for slices, rows and columns of a tensor without gaps: boxes on
// a grid that has a dim per stride.
bool may_overlap(const at::Tensor& a, const at::Tensor& b);

} // namespace shardtensor
