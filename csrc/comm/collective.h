// What a collective is: one record for all kinds.
#pragma once

#include "comm/collective_kind.h"
#include "layout/mesh.h"
#include "layout/placement.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace shardtensor::comm {

// A collective along a mesh dim, or messages between any ranks. All tensors are contiguous; sizes are in elements. Which fields
// are used depends on the kind:
// - AllReduce: reduces `out` in place; the result is the same on every rank along the mesh dim. For Norm, the caller raises to
//   the power before and takes the root after.
// - AllGather: pieces[i] receives coordinate i's `in`, without staging; all ranks know the sizes beforehand. `in` is copied into
//   this rank's piece at once, unless it already lies there. Without `pieces`, they lie one after the other in `out`, with
//   `out_sizes`: if all have one size and the backend gathers them at once, it takes no time that grows with their number.
// - AllToAll: `in` holds the parts for coordinates 0, 1, ... one after the other, `out` the parts from each. If this rank's own
//   part has a size, the same in both, it is copied. With mesh_dim -1, between any ranks, of any meshes: the parts are those for
//   `peers`, global ranks in ascending order, without this rank. If the callers are not all ranks of the default group, only
//   peers need to call.
// - ReduceScatter, only if can_reduce_scatter(): `in` holds this rank's summands of all coordinates' pieces, one after the other;
//   `out` becomes this rank's piece.
// - Broadcast: `out`, from coordinate `from`.
// - Scatter: `out` receives this rank's piece of `pieces`, which is read only on coordinate `from`.
struct Collective {
  CollectiveKind kind;
  MeshPtr mesh;
  int64_t mesh_dim = -1;
  ReduceOp op = ReduceOp::Sum;
  at::Tensor in, out;
  std::vector<int64_t> in_sizes, out_sizes;
  // Only AllToAll: in both buffers, parts start at multiples of this many elements. Along a mesh dim, ranks may differ in it.
  int64_t spacing = 1;
  std::vector<at::Tensor> pieces;
  std::vector<int64_t> peers;
  int64_t callers = 0;      // how many ranks make this call, peers or not
  int64_t from = 0;         // a coordinate
  bool of_summands = false; // an AllToAll that is counted as a reduce-scatter
  // AllReduce of a few numbers in main memory. Each rank sends them to each other rank, in messages that no other collective can
  // receive: if a rank makes such a call alone, its next collectives are not disturbed. A rank's n-th such call receives from the
  // others' n-th.
  bool apart = false;
  at::ScalarType dtype = at::kByte; // set by start(): of the tensors before they became bytes

  CollectiveKind counted() const {
    return of_summands ? CollectiveKind::ReduceScatter : kind;
  }
  bool is_between_any() const {
    return kind == CollectiveKind::AllToAll && mesh_dim < 0;
  }
  bool reduces() const {
    return kind == CollectiveKind::AllReduce || kind == CollectiveKind::ReduceScatter;
  }
  int64_t me() const {
    return mesh->coordinate()[mesh_dim];
  }
  // One of the tensors. All are on its device, and all have values if it has.
  const at::Tensor& local() const {
    return in.defined() ? in : out;
  }
};

} // namespace shardtensor::comm
