// Collectives along one mesh dim, with pieces of any size. The only place that talks to process groups.
//
// Every call is made by all ranks along the mesh dim, whatever they hold: pieces may be empty, the call is made still. Nothing is
// sent of tensors without values (values.h).
#pragma once

#include "layout/mesh.h"
#include "layout/placement.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <functional>

namespace shardtensor::comm {

// The other half of a collective that start_...() has begun: called once, it returns when this rank's buffers may be read,
// written and dropped (on CUDA: when the current stream may). It holds the buffers; dropped uncalled, it leaves them to c10d.
// It communicates no more, so ranks may call it in any order.
using Completion = std::function<void()>;

// Reduces in place; the result is the same on every rank along the mesh dim. `tensor` must be contiguous.
// Norm is the caller's affair: it raises to the power before and takes the root after.
void all_reduce(at::Tensor& tensor, const Mesh& mesh, int64_t mesh_dim, ReduceOp op);
Completion start_all_reduce(at::Tensor tensor, const Mesh& mesh, int64_t mesh_dim, ReduceOp op);
// The same over several mesh dims (bit m set: over mesh dim m).
void all_reduce_over(at::Tensor& tensor, const Mesh& mesh, uint64_t mesh_dims, ReduceOp op);

// pieces[i], contiguous, receives what coordinate i sends as `mine`, straight into its place; ranks agree on the sizes
// beforehand. `mine` is copied into pieces[me] at once, unless it lies there. `as_one`: on every rank, the pieces lie one after
// the other in memory.
void all_gather(std::vector<at::Tensor>& pieces, const at::Tensor& mine, const Mesh& mesh, int64_t mesh_dim);
Completion start_all_gather(
    std::vector<at::Tensor>& pieces, const at::Tensor& mine, const Mesh& mesh, int64_t mesh_dim, bool as_one = false);
// Whether the backend has a better way for pieces of one size that lie `as_one`, the own one among them.
bool gathers_as_one(const at::Tensor& mine, const Mesh& mesh, int64_t mesh_dim);

// Contiguous buffers: `in` has what goes to coordinate 0, 1, ... one after the other, `out` what comes from each; sizes in
// elements. This rank's own part is copied where it has a size, on both sides alike.
Completion start_all_to_all(
    at::Tensor& out,
    at::IntArrayRef out_sizes,
    const at::Tensor& in,
    at::IntArrayRef in_sizes,
    const Mesh& mesh,
    int64_t mesh_dim,
    bool of_summands = false); // counted as a reduce-scatter

// Between any ranks, whatever their meshes. `out` has what comes from peers[0], peers[1], ... one after the other, `in` what goes
// to each; sizes in elements, peers as global ranks in ascending order, this rank not among them. `callers`: how many ranks make
// this call, peers or not; all of the default group's, or else no others than peers need to.
Completion start_send_receive(
    at::Tensor& out,
    at::IntArrayRef out_sizes,
    const at::Tensor& in,
    at::IntArrayRef in_sizes,
    at::IntArrayRef peers,
    const Mesh& mesh,
    int64_t callers);

// Whether the backend adds up on the way, so that start_reduce_scatter() works. Elsewhere the summands travel in an
// all-to-all and the caller combines them, in the order of the coordinates.
bool adds_up(const at::Tensor& summand, const Mesh& mesh, int64_t mesh_dim, ReduceOp op);
// `in`, contiguous, has this rank's summand of every coordinate's piece, one after the other; `out` becomes this rank's piece.
Completion start_reduce_scatter(
    at::Tensor out, const at::Tensor& in, at::IntArrayRef in_sizes, const Mesh& mesh, int64_t mesh_dim, ReduceOp op);

void broadcast(at::Tensor& tensor, const Mesh& mesh, int64_t mesh_dim, int64_t from_coordinate);

// `mine`, contiguous, receives this rank's piece; `pieces` is read on `from_coordinate` alone.
void scatter(at::Tensor& mine, std::vector<at::Tensor>& pieces, const Mesh& mesh, int64_t mesh_dim, int64_t from_coordinate);

// What this process has sent through the calls above since reset(): one count per kind, and payload bytes it contributed.
enum class Kind : uint8_t { AllReduce, AllGather, AllToAll, ReduceScatter, Broadcast, Scatter, kCount };
const char* name_of(Kind kind);
struct Counts {
  std::array<int64_t, static_cast<size_t>(Kind::kCount)> calls{};
  std::array<int64_t, static_cast<size_t>(Kind::kCount)> bytes{};
};
Counts counts();
void reset_counts();

// Told of every call before it is made, on each rank along the mesh dim, whatever it holds: the kind, the bytes that this rank
// puts in, and where (mesh_dim -1: between meshes). It may throw. Calls that it makes itself are not told.
using Listener = void (*)(Kind kind, int64_t bytes, const Mesh& mesh, int64_t mesh_dim);
void set_listener(Listener listener);
// While one is alive, this thread's calls are neither counted nor told: those of the checking mode.
class Aside {
 public:
  Aside();
  ~Aside();
  Aside(const Aside&) = delete;
  Aside& operator=(const Aside&) = delete;
};
// Whether this thread is in a call to a process group from here.
bool is_calling();

// How many ranks the default group has that the mesh knows of; 0 where there is none.
int64_t size_of_world(const Mesh& mesh);

// A rank that is alone along a mesh dim makes no call.
bool is_alone(const Mesh& mesh, int64_t mesh_dim);
// For tests of a backend with one rank: it makes it still.
void call_alone(bool on);

} // namespace shardtensor::comm
