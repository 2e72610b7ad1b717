// Collectives along one mesh dim, with pieces of any size. The only place that talks to process groups.
//
// All ranks along the mesh dim make every call, even with empty pieces. Tensors without values (tensor_kind.h) are not sent.
#pragma once

#include "comm/collective.h"
#include "comm/in_flight.h"
#include "comm/ranks.h"

#include <vector>

namespace shardtensor::comm {

// Starts a collective; all go through here. Records it if its tensors are traced into a graph, skips the process group if this
// rank need not call it, queues it if this thread has open CoalescedCalls, and otherwise calls the process group. Broadcasts and
// scatters have ended when it returns.
InFlight start(Collective c);

// The same for one kind each; they return when the collective has ended.
void all_reduce(at::Tensor& tensor, const Mesh& mesh, int64_t mesh_dim, ReduceOp op);
// Over several mesh dims (bit m set: over mesh dim m).
void all_reduce_over(at::Tensor& tensor, const Mesh& mesh, uint64_t mesh_dims, ReduceOp op);
void all_gather(std::vector<at::Tensor>& pieces, const at::Tensor& mine, const Mesh& mesh, int64_t mesh_dim);
void broadcast(at::Tensor& tensor, const Mesh& mesh, int64_t mesh_dim, int64_t from_coordinate);
void scatter(at::Tensor& mine, std::vector<at::Tensor>& pieces, const Mesh& mesh, int64_t mesh_dim, int64_t from_coordinate);

// Whether the backend supports Collective::apart. Gloo does, because its messages have tags; NCCL matches messages by their
// order.
bool can_sum_apart(c10::Device device, const Mesh& mesh, int64_t mesh_dim);
// Whether the backend has a faster call for pieces of one size that lie one after the other, this rank's piece included.
bool gathers_as_one(const at::Tensor& mine, const Mesh& mesh, int64_t mesh_dim);
// Whether the backend can reduce while scattering. Otherwise the summands travel in an all-to-all and the caller combines them,
// in the order of the coordinates.
bool can_reduce_scatter(const at::Tensor& summand, const Mesh& mesh, int64_t mesh_dim, ReduceOp op);

// The parts of a staging buffer should start at multiples of this many elements. It is more than 1 if the backend is faster then
// and accepts gaps between parts.
enum class StagingKind : uint8_t {
  List,     // the parts are given as a list
  AllToAll, // the buffer is given to an AllToAll along a mesh dim
  Messages, // to an AllToAll between any ranks
};
int64_t spacing(const at::Tensor& like, const Mesh& mesh, int64_t mesh_dim, StagingKind what);

} // namespace shardtensor::comm
