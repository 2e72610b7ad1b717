// Ops that are not one rule: lists of tensors handled element by element, and ops run by their own decomposition.
#pragma once

#include "dispatch/op.h"

#include <ATen/core/stack.h>

namespace shardtensor {

void handle_specially(const Op& op, torch::jit::Stack* stack);

} // namespace shardtensor
