// Collectives as nodes of a graph: _c10d_functional's ops, each followed by its wait. Values in, values out; sizes may be
// symbols. Pieces are in the order of the coordinates along the mesh dim, whatever the order of the group's ranks. Uses layout/
// (Mesh) and the dispatcher.
#pragma once

#include "layout/mesh.h"
#include "layout/placement.h"
#include "layout/symbolic.h"

namespace shardtensor::comm::traced {

at::Tensor all_reduce(const at::Tensor& t, const Mesh& mesh, int64_t mesh_dim, ReduceOp op);

// The `mine` of all coordinates, which have one shape, concatenated along dim 0.
at::Tensor all_gather(const at::Tensor& mine, const Mesh& mesh, int64_t mesh_dim);

// The reverse: `in` holds this rank's summands of all coordinates' pieces, of one shape, concatenated along dim 0. Only Sum and
// Avg.
at::Tensor reduce_scatter(const at::Tensor& in, const Mesh& mesh, int64_t mesh_dim, ReduceOp op);
bool can_reduce_scatter(ReduceOp op, at::ScalarType dtype);

// `in`, 1-d, holds the parts for each coordinate; the result holds the parts from each.
at::Tensor all_to_all(
    const at::Tensor& in, const SymSizes& out_sizes, const SymSizes& in_sizes, const Mesh& mesh, int64_t mesh_dim);

// The same among all ranks of the default group, in their order.
at::Tensor all_to_all_of_world(const at::Tensor& in, const SymSizes& out_sizes, const SymSizes& in_sizes, const Mesh& mesh);

at::Tensor broadcast(const at::Tensor& t, const Mesh& mesh, int64_t mesh_dim, int64_t from_coordinate);

// Returns `t`, and in a graph makes it depend on `others`: so no rank removes the ops behind `others` as dead code, above all
// collectives that other ranks take part in. Outside a graph it returns `t` unchanged.
at::Tensor after(const at::Tensor& t, at::TensorList others);

} // namespace shardtensor::comm::traced
