// What ops that run as several calls (Way::Stages) share: moves of whole ShardTensors, without autograd, which differentiates the
// op.
#pragma once

#include "layout/layout.h"

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace shardtensor::rules {

// ShardTensors in other layouts, moved together; those that are there already stay as they are. Observers of redistributions
// hear that `argument` of the op moves, because of `why`.
std::vector<at::Tensor> moved(
    const std::string& op,
    const std::string& argument,
    const char* why,
    const std::vector<at::Tensor>& tensors,
    const std::vector<LayoutPtr>& layouts);

} // namespace shardtensor::rules
