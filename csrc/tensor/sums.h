// What summands have been added up to. The first consumer of a summand that needs it added up communicates; the next ones start
// from the sum, so they read the same bits.
//
// A sum is kept with the storage that the summand shares with its views, as long as that exists and no op writes to it. It is
// never handed to users, only to ops that read it. Whether there is one depends on the program alone, so all ranks find the same.
// Only results of ops have sums: others may write the piece of from_local(), or of a leaf's gradient.
//
// A sum of no dims may be on its way since its summand was made (dispatch/ahead.h): then one rank alone may read it.
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
struct Placed {
  at::Tensor local;
  LayoutPtr layout;
};

// The sum of a summand, or of a tensor that it is a view of. Waits for it on the current stream. Raises if this rank has written
// the summand's piece since, as the other ranks may not have.
std::optional<Placed> sum_of(const ShardTensorImpl& t);
// `local` is the piece of `t` in `layout`, which has no summands. Nobody may write it from now on.
void keep_sum(const ShardTensorImpl& t, const at::Tensor& local, const LayoutPtr& layout);
// The same for a summand that has just been made, of no dims: `local` has its value once `rest` has ended. Kept in any mode.
void keep_sum_ahead(ShardTensorImpl& t, const at::Tensor& local, const LayoutPtr& layout, comm::InFlight rest);

// Those of `t` and what shares its storage, the last one last; for shardtensor.debug.
std::vector<Placed> sums_near(const ShardTensorImpl& t);
// How many sums there are in this process, and their bytes.
std::pair<int64_t, int64_t> how_many_sums();

// Process-wide, and alike on all ranks.
bool reduces_once();
void set_reduces_once(bool on);

// A layout with every Partial replaced by Replicate.
LayoutPtr without_partial(const LayoutPtr& layout);

} // namespace shardtensor
