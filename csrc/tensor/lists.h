// Lists of tensors for a computation that is elementwise as a whole, such as an optimizer's step: it can run on the pieces.
#pragma once

#include "tensor/shard_tensor.h"

#include <optional>
#include <vector>

namespace shardtensor {

using Tensors = std::vector<at::Tensor>;

// `gradients` where `parameters` are, index by index. Nothing where the sizes, the meshes or the classes tell them apart: all
// ranks find the same, before anything moves.
std::optional<Tensors> laid_out_like(const Tensors& parameters, const Tensors& gradients);

// The local tensors of `lists`, where index n of every list has one layout, without summands, and lies in memory in one way.
// Empty lists and plain numbers pass as they are. Nothing where that is not so, which one rank may find alone. All but list
// `read_only` count as written.
std::optional<std::vector<Tensors>> local_lists(const std::vector<Tensors>& lists, int64_t read_only);

// The same layout, without summands, and the same sizes: what is elementwise moves nothing.
bool lies_with(const ShardTensorImpl& t, const ShardTensorImpl& lead);

// The result of an elementwise op lies where its argument does.
at::Tensor wrap_with(const at::Tensor& lead, at::Tensor local);

// The same order in memory, without gaps: what kernels need that walk through several tensors from end to end.
bool lie_alike(const at::Tensor& a, const at::Tensor& b);

} // namespace shardtensor
