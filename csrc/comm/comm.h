// Collectives along one mesh dim, with pieces of any size. The only place that talks to process groups.
//
// All ranks along the mesh dim make every call, even with empty pieces. Tensors without values (tensor_kind.h) are not sent.
#pragma once

#include "comm/collective.h"
#include "comm/in_flight.h"
#include "comm/ranks.h"

#include <vector>

namespace shardtensor::comm {

// The front that every collective passes: records it into a graph, does without a process group if it can, notes it if this
// thread has a CoalescedCalls open; else calls the process group. Broadcasts and scatters have ended when it returns.
InFlight start(Collective c);

// The same at once.
void all_reduce(at::Tensor& tensor, const Mesh& mesh, int64_t mesh_dim, ReduceOp op);
// Over several mesh dims (bit m set: over mesh dim m).
void all_reduce_over(at::Tensor& tensor, const Mesh& mesh, uint64_t mesh_dims, ReduceOp op);
void all_gather(std::vector<at::Tensor>& pieces, const at::Tensor& mine, const Mesh& mesh, int64_t mesh_dim);
void broadcast(at::Tensor& tensor, const Mesh& mesh, int64_t mesh_dim, int64_t from_coordinate);
void scatter(at::Tensor& mine, std::vector<at::Tensor>& pieces, const Mesh& mesh, int64_t mesh_dim, int64_t from_coordinate);

// Whether the backend can reduce `apart`: Gloo, whose messages have tags. NCCL's have one order.
bool can_sum_apart(c10::Device device, const Mesh& mesh, int64_t mesh_dim);
// Whether the backend has a faster call for pieces of one size that lie one after the other, this rank's piece included.
bool gathers_as_one(const at::Tensor& mine, const Mesh& mesh, int64_t mesh_dim);
// Whether the backend can reduce while scattering. Otherwise the summands travel in an all-to-all and the caller combines them,
// in the order of the coordinates.
bool adds_up(const at::Tensor& summand, const Mesh& mesh, int64_t mesh_dim, ReduceOp op);

// Parts in a staging buffer should start at multiples of so many elements. More than 1 if the backend is faster then and can do
// with gaps between them.
enum class StagingKind : uint8_t {
  List,
  AllToAll,
  Messages
}; // given as a list; to an AllToAll along a mesh dim; between any ranks
int64_t spacing(const at::Tensor& like, const Mesh& mesh, int64_t mesh_dim, StagingKind what);

} // namespace shardtensor::comm
