// Collectives along one mesh dim, with pieces of any size. The only place that talks to process groups.
//
// All ranks along the mesh dim make every call, even with empty pieces. Tensors without values (values.h) are not sent.
#pragma once

#include "comm/in_flight.h"
#include "comm/kind.h"
#include "comm/ranks.h"
#include "layout/mesh.h"
#include "layout/placement.h"

#include <ATen/core/Tensor.h>

#include <array>

namespace shardtensor::comm {

// Reduces in place; the result is the same on every rank along the mesh dim. `tensor` must be contiguous.
// For Norm, the caller raises to the power before and takes the root after.
void all_reduce(at::Tensor& tensor, const Mesh& mesh, int64_t mesh_dim, ReduceOp op);
InFlight start_all_reduce(at::Tensor tensor, const Mesh& mesh, int64_t mesh_dim, ReduceOp op);
// A few numbers, added up by messages of each rank to each other that meet no other collective's data: a rank that makes such a
// sum alone does not disturb what it makes next. The n-th of a rank meets the n-th of the others.
InFlight start_sum_apart(at::Tensor tensor, const Mesh& mesh, int64_t mesh_dim);
// Whether the backend can: Gloo, whose messages have tags. NCCL's have one order.
bool can_sum_apart(c10::Device device, const Mesh& mesh, int64_t mesh_dim);
// The same over several mesh dims (bit m set: over mesh dim m).
void all_reduce_over(at::Tensor& tensor, const Mesh& mesh, uint64_t mesh_dims, ReduceOp op);

// pieces[i], contiguous, receives coordinate i's `mine`, without staging; all ranks know the sizes beforehand. `mine` is copied
// into pieces[me] at once, unless it already lies there. `as_one`: on every rank, the pieces lie one after the other in memory.
void all_gather(std::vector<at::Tensor>& pieces, const at::Tensor& mine, const Mesh& mesh, int64_t mesh_dim);
InFlight start_all_gather(
    std::vector<at::Tensor>& pieces, const at::Tensor& mine, const Mesh& mesh, int64_t mesh_dim, bool as_one = false);
// The same for pieces that lie one after the other in `whole`, which is contiguous; sizes in elements. If all have one size and
// the backend gathers them at once, it takes no time that grows with their number.
InFlight start_all_gather(at::Tensor& whole, at::IntArrayRef sizes, const at::Tensor& mine, const Mesh& mesh, int64_t mesh_dim);
// Whether the backend has a faster call for pieces of one size that lie `as_one`, this rank's piece included.
bool gathers_as_one(const at::Tensor& mine, const Mesh& mesh, int64_t mesh_dim);

// Parts in a staging buffer should start at multiples of so many elements. More than 1 if the backend is faster then and can do
// with gaps between them.
enum class Staged : uint8_t { List, AllToAll, Messages }; // given as a list; to start_all_to_all(); to start_send_receive()
int64_t spacing(const at::Tensor& like, const Mesh& mesh, int64_t mesh_dim, Staged what);

// Contiguous buffers: `in` holds the parts for coordinates 0, 1, ... one after the other, `out` the parts from each; sizes in
// elements. If this rank's own part has a size, the same in both, it is copied. `spacing`: of both buffers; ranks may differ.
InFlight start_all_to_all(
    at::Tensor& out,
    at::IntArrayRef out_sizes,
    const at::Tensor& in,
    at::IntArrayRef in_sizes,
    const Mesh& mesh,
    int64_t mesh_dim,
    bool of_summands = false, // counted as a reduce-scatter
    int64_t spacing = 1);

// Between any ranks, of any meshes. `out` holds the parts from peers[0], peers[1], ... one after the other, `in` the parts for
// each; sizes in elements. Peers are global ranks in ascending order, without this rank. `callers`: how many ranks make this
// call, peers or not. If these are not all ranks of the default group, only peers need to call. `spacing`: of both buffers, on
// all ranks.
InFlight start_send_receive(
    at::Tensor& out,
    at::IntArrayRef out_sizes,
    const at::Tensor& in,
    at::IntArrayRef in_sizes,
    at::IntArrayRef peers,
    const Mesh& mesh,
    int64_t callers,
    int64_t spacing = 1);

// Whether the backend can reduce while scattering, so that start_reduce_scatter() works. Otherwise the summands travel in an
// all-to-all and the caller combines them, in the order of the coordinates.
bool adds_up(const at::Tensor& summand, const Mesh& mesh, int64_t mesh_dim, ReduceOp op);
// `in`, contiguous, holds this rank's summands of all coordinates' pieces, one after the other; `out` becomes this rank's
// piece. `spacing`: of `in`; 1 if the pieces have one size.
InFlight start_reduce_scatter(
    at::Tensor out,
    const at::Tensor& in,
    at::IntArrayRef in_sizes,
    const Mesh& mesh,
    int64_t mesh_dim,
    ReduceOp op,
    int64_t spacing = 1);

void broadcast(at::Tensor& tensor, const Mesh& mesh, int64_t mesh_dim, int64_t from_coordinate);

// `mine`, contiguous, receives this rank's piece; `pieces` is read only on `from_coordinate`.
void scatter(at::Tensor& mine, std::vector<at::Tensor>& pieces, const Mesh& mesh, int64_t mesh_dim, int64_t from_coordinate);

// What this process has sent through the calls above since reset(): one count per kind, and payload bytes it contributed.
struct Counts {
  std::array<int64_t, kKinds> calls{};
  std::array<int64_t, kKinds> bytes{};
};
Counts counts();
void reset_counts();

// Runs before every call, on each rank along the mesh dim, even with an empty piece. It gets the kind, the bytes that this rank
// contributes, and the mesh dim (-1: between meshes). It may throw. Calls that the listener makes itself do not run it.
using Listener = void (*)(Kind kind, int64_t bytes, const Mesh& mesh, int64_t mesh_dim);
void set_listener(Listener listener);
// While one is alive, this thread's calls are neither counted nor reported to the listener: for the checking mode.
class Aside {
 public:
  Aside();
  ~Aside();
  Aside(const Aside&) = delete;
  Aside& operator=(const Aside&) = delete;
};

} // namespace shardtensor::comm
