// Whether an op may write to its arguments. The answer is the same on all ranks.
#pragma once

#include "dispatch/refs.h"

namespace shardtensor {

// Raises if the op may not write to the tensor: a plain tensor, or a view that had to move data.
void check_writable(const Op& op, int64_t arg, const at::Tensor& t, const ShardTensorImpl* impl);
// Raises if a written argument shares some of its memory with another argument. Does not look at this rank's pieces.
void check_no_overlap(const Op& op, const Refs& refs, size_t written);

} // namespace shardtensor
