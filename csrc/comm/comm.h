// Collectives along one mesh dim, with pieces of any size. The only place that talks to process groups.
// Uses layout/ (Mesh) and c10d. Used by redistribute/ and by rules whose sharded form needs a reduction.
//
// Every call is made by all ranks along the mesh dim, whatever they hold: pieces may be empty, the call is made still.
#pragma once

#include "layout/mesh.h"
#include "layout/placement.h"

#include <ATen/core/Tensor.h>

#include <array>

namespace shardtensor::comm {

// Reduces in place; the result is the same on every rank along the mesh dim. `tensor` must be contiguous.
// Norm is the caller's affair: it raises to the power before and takes the root after.
void all_reduce(at::Tensor& tensor, const Mesh& mesh, int64_t mesh_dim, ReduceOp op);
// The same over several mesh dims (bit m set: over mesh dim m).
void all_reduce_over(at::Tensor& tensor, const Mesh& mesh, uint64_t mesh_dims, ReduceOp op);

// pieces[i] receives what coordinate i sends as `mine`. All contiguous; ranks agree on the sizes beforehand.
void all_gather(std::vector<at::Tensor>& pieces, const at::Tensor& mine, const Mesh& mesh, int64_t mesh_dim);

// Flat buffers: `in` has what goes to coordinate 0, 1, ... one after the other, `out` what comes from each; sizes in elements,
// this rank's own 0.
void all_to_all(
    at::Tensor& out,
    at::IntArrayRef out_sizes,
    const at::Tensor& in,
    at::IntArrayRef in_sizes,
    const Mesh& mesh,
    int64_t mesh_dim);

// Between any ranks, whatever their meshes. `out` has what comes from peers[0], peers[1], ... one after the other, `in` what goes
// to each; sizes in elements, peers as global ranks in ascending order, this rank not among them. `callers`: how many ranks make
// this call, peers or not; all of the default group's, or else no others than peers need to.
void send_receive(
    at::Tensor& out,
    at::IntArrayRef out_sizes,
    const at::Tensor& in,
    at::IntArrayRef in_sizes,
    at::IntArrayRef peers,
    const Mesh& mesh,
    int64_t callers);

// A reduce-scatter but for the sum. `in` has this rank's summand of every coordinate's piece, `out` becomes the summands of this
// rank's piece, one after the other in the order of the coordinates.
void exchange_summands(at::Tensor& out, const at::Tensor& in, at::IntArrayRef in_sizes, const Mesh& mesh, int64_t mesh_dim);

void broadcast(at::Tensor& tensor, const Mesh& mesh, int64_t mesh_dim, int64_t from_coordinate);

// `mine` receives this rank's piece; `pieces` is read on `from_coordinate` alone.
void scatter(at::Tensor& mine, std::vector<at::Tensor>& pieces, const Mesh& mesh, int64_t mesh_dim, int64_t from_coordinate);

// What this process has sent through the calls above since reset(): one count per kind, and payload bytes it contributed.
enum class Kind : uint8_t { AllReduce, AllGather, AllToAll, ReduceScatter, Broadcast, Scatter, kCount };
const char* name_of(Kind kind);
struct Counts {
  std::array<int64_t, static_cast<size_t>(Kind::kCount)> calls{};
  std::array<int64_t, static_cast<size_t>(Kind::kCount)> bytes{};
};
Counts counts();
void count(Kind kind, int64_t bytes);
void reset_counts();

} // namespace shardtensor::comm
