// Sums of summands, kept for the next consumer. The first consumer that needs a summand added up communicates; the next ones
// start from the sum, so they read the same bits.
//
// A sum is kept with the storage that the summand shares with its views, until that is freed or an op writes to it. Only ops
// that read it get it, never users. Whether there is a sum depends on the program alone, so it is the same on all ranks. Only
// results of ops have sums: the piece of from_local(), or of a leaf's gradient, may be written from outside.
//
// A sum of no dims may be on its way since its summand was made (dispatch/eager_scalar_reduce.h): then one rank alone may read
// it.
#pragma once

#include "comm/in_flight.h"
#include "layout/layout.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>
#include <vector>

namespace shardtensor {

class ShardTensorImpl;

// A piece, and the layout that it is in.
struct PieceInLayout {
  at::Tensor local;
  LayoutPtr layout;
};

// The sum of a summand, or of the tensor that it is a view of. Waits for it on the current stream. Raises if this rank has
// written the summand's piece since, because other ranks may not have.
std::optional<PieceInLayout> sum_of(const ShardTensorImpl& t);
// `local` is the piece of `t` in `layout`, which has no summands. It must not be written from now on.
void keep_sum(const ShardTensorImpl& t, const at::Tensor& local, const LayoutPtr& layout);
// The same for a summand that has just been made, of no dims: `local` has its value once `rest` has ended. Kept in any mode.
void keep_sum_ahead(ShardTensorImpl& t, const at::Tensor& local, const LayoutPtr& layout, comm::InFlight rest);

// The sums of `t` and of tensors that share its storage, the newest last; for shardtensor.debug.
std::vector<PieceInLayout> sums_near(const ShardTensorImpl& t);
// How many sums there are in this process, and their bytes.
std::pair<int64_t, int64_t> how_many_sums();

// Process-wide, and alike on all ranks.
bool reduces_once();
void set_reduces_once(bool on);

// A layout with every Partial replaced by Replicate.
LayoutPtr without_partial(const LayoutPtr& layout);

} // namespace shardtensor
