// Collectives as nodes of a graph: _c10d_functional's ops, each followed by its wait. Values in, values out; sizes may be
// symbols. Pieces stand in the order of the coordinates along the mesh dim, whatever the order of the group's ranks. Uses layout/
// (Mesh), comm.h and the dispatcher.
#pragma once

#include "comm/comm.h"
#include "layout/symbolic.h"

namespace shardtensor::comm::traced {

at::Tensor all_reduce(const at::Tensor& t, const Mesh& mesh, int64_t mesh_dim, ReduceOp op);

// All coordinates' `mine`, of one shape: one after the other along dim 0.
at::Tensor all_gather(const at::Tensor& mine, const Mesh& mesh, int64_t mesh_dim);

// The reverse: `in` has this rank's summand of every coordinate's piece, one after the other along dim 0, all of one shape.
// Sum and Avg alone.
at::Tensor reduce_scatter(const at::Tensor& in, const Mesh& mesh, int64_t mesh_dim, ReduceOp op);
bool adds_up(ReduceOp op, at::ScalarType dtype);

// `in`, of one dim, has what goes to each coordinate; the result has what comes from each.
at::Tensor all_to_all(
    const at::Tensor& in, const SymSizes& out_sizes, const SymSizes& in_sizes, const Mesh& mesh, int64_t mesh_dim);

// The same among all ranks of the default group, in their order.
at::Tensor all_to_all_of_world(const at::Tensor& in, const SymSizes& out_sizes, const SymSizes& in_sizes, const Mesh& mesh);

at::Tensor broadcast(const at::Tensor& t, const Mesh& mesh, int64_t mesh_dim, int64_t from_coordinate);

// `t`, whose value depends on none of `others`. In a graph it takes them with it, so that what led to them, collectives above
// all, is left out on no rank, where other ranks need it. Elsewhere it is `t` as it is.
at::Tensor after(const at::Tensor& t, at::TensorList others);

} // namespace shardtensor::comm::traced
