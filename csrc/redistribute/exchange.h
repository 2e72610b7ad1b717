// Boxes of one tensor at ranks, in places that no layout could tell: from one list of them to another, in one exchange.
#pragma once

#include "layout/layout.h"

#include <ATen/core/Tensor.h>

namespace shardtensor {

struct Placed {
  int64_t rank; // global
  Box box;
};

// Called by every rank of the mesh with equal lists. `pieces` are this rank's boxes of `held`, in order; returned are those of
// `wanted`, in memory of their own. An element comes once, from the rank itself where it holds it; one that nobody holds is an
// error, on all ranks. Time grows as the product of the lists' lengths.
std::vector<at::Tensor> exchange(
    const std::vector<at::Tensor>& pieces,
    const std::vector<Placed>& held,
    const std::vector<Placed>& wanted,
    const Mesh& mesh,
    const at::TensorOptions& options);

} // namespace shardtensor
