// Lists of tensors for a computation that is completely elementwise, such as an optimizer's step: it can run on the pieces.
#pragma once

#include "tensor/shard_tensor.h"

#include <optional>
#include <vector>

namespace shardtensor {

using Tensors = std::vector<at::Tensor>;

// `gradients` in the layouts of `parameters`, index by index, moved together. Those of other sizes, meshes or classes than their
// parameters stay as they are.
Tensors laid_out_like(const Tensors& parameters, const Tensors& gradients);

// The local tensors of `lists`, if at each index all lists have one layout, without summands, and the same strides. Empty lists
// and plain numbers stay unchanged. Otherwise returns nothing; that may differ between ranks. All lists except `read_only`
// count as written.
std::optional<std::vector<Tensors>> local_lists(const std::vector<Tensors>& lists, int64_t read_only);

// Whether both have the same sizes and the same layout, without summands: an elementwise op then needs no communication.
bool can_combine_locally(const ShardTensorImpl& t, const ShardTensorImpl& lead);

// Whether both have the same order of dims in memory, without gaps: some kernels treat several tensors as flat memory.
bool same_dense_order(const at::Tensor& a, const at::Tensor& b);

} // namespace shardtensor
