// Moves a tensor's pieces from one layout to another, also between meshes. redistribute(), full_tensor() and every op that
// needs other placements than its operands have use this one mechanism.
#pragma once

#include "comm/in_flight.h"
#include "layout/layout.h"

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

namespace shardtensor {

// `local` is this rank's piece under `from` of a tensor of global `sizes`; returns its piece under `to`. The result may alias
// `local` if nothing had to move. Every rank of either mesh calls it; a rank outside a mesh has an empty tensor there. With
// `rest`, the last collective is only started: the result has its sizes and memory at once, and its data after rest->wait().
// The caller may write to `local` before that. When redistribute() returns, all communication has been started.
at::Tensor redistribute(
    const at::Tensor& local, const Layout& from, const Layout& to, c10::ArrayRef<int64_t> sizes, comm::InFlight* rest = nullptr);
// The same if `local` may belong to a graph and global sizes may be symbols. Tracing ignores `rest`.
at::Tensor redistribute(
    const at::Tensor& local, const Layout& from, const Layout& to, c10::SymIntArrayRef sizes, comm::InFlight* rest = nullptr);

// One of the tensors of redistribute_all().
struct PieceMove {
  at::Tensor local;
  LayoutPtr from, to;
  Sizes sizes; // global
};
// redistribute() of each. Steps of one kind along one mesh dim are one collective, for reductions one for each op and dtype; but
// large tensors move alone, since copying them costs more than a call. Every rank of the meshes calls it, with equal lists. With
// `rests`, the last collective of each is only started, as redistribute() does with `rest`.
std::vector<at::Tensor> redistribute_all(const std::vector<PieceMove>& tensors, std::vector<comm::InFlight>* rests = nullptr);

} // namespace shardtensor
