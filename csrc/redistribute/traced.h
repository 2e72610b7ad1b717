// The steps of a plan as short graphs, where every piece is one run of its dim: sizes may be symbols. Other steps are traced
// through the code that takes them (redistribute.cpp), which needs numbers.
#pragma once

#include "redistribute/plan.h"

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>

namespace shardtensor {

// This rank's piece after the step from `now` to `next`; nothing where there is no short way. `sizes`: global.
std::optional<at::Tensor> traced_step(
    const at::Tensor& local, const Step& step, const Layout& now, const Layout& next, c10::SymIntArrayRef sizes);

// Plans of graphs have transfers only where the mesh holds every rank: a graph's message goes among all.
bool may_transfer_in_graph(const Mesh& mesh);

} // namespace shardtensor
