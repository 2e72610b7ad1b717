// Moves a tensor's pieces from one layout to another, from mesh to mesh too. The one mechanism behind redistribute(),
// full_tensor() and every op that needs other placements than it was given.
#pragma once

#include "comm/comm.h"
#include "layout/layout.h"

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

namespace shardtensor {

// `local` is this rank's piece under `from` of a tensor of global `sizes`; returns its piece under `to`.
// The result may alias `local` where nothing had to move. Called by every rank of either mesh; one that a mesh does not hold has
// an empty tensor there.
// With `completion`, the last collective is only started: the result has its sizes and its place at once, its data when
// *completion, if set, has been called, once. `local` may be written meanwhile. All that communicates has been started by then.
at::Tensor redistribute(
    const at::Tensor& local,
    const Layout& from,
    const Layout& to,
    c10::ArrayRef<int64_t> sizes,
    comm::Completion* completion = nullptr);
// The same where `local` may be of a graph, and global sizes symbols. It is traced as if there were no `completion`.
at::Tensor redistribute(const at::Tensor& local, const Layout& from, const Layout& to, c10::SymIntArrayRef sizes);

} // namespace shardtensor
