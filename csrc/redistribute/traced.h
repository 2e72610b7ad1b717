// The steps of a plan as short graphs, if every piece is one run of its dim: sizes may be symbols. Other steps are traced
// through the eager code (redistribute.cpp), which needs numbers.
#pragma once

#include "redistribute/plan.h"

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>

namespace shardtensor {

// This rank's piece after the step from `now` to `next`; nothing if there is no short graph. `sizes`: global.
std::optional<at::Tensor> traced_step(
    const at::Tensor& local, const Step& step, const Layout& now, const Layout& next, c10::SymIntArrayRef sizes);

// Plans of graphs have transfers only if the mesh holds every rank: in a graph, a transfer is a call of the default group.
bool may_transfer_in_graph(const Mesh& mesh);

} // namespace shardtensor
