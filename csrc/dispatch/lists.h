// foreach and fused optimizer ops: each index of the lists is resolved by itself, then one call is made on all local tensors.
#pragma once

#include "dispatch/op.h"

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/stack.h>

#include <optional>

namespace shardtensor {

void handle_lists(const Op& op, torch::jit::Stack* stack);

// A kernel without boxing for the signatures that optimizers call. It serves lists of which nothing has to move, and hands
// over to handle_lists() otherwise.
std::optional<c10::KernelFunction> typed_list_kernel(const Op& op);

} // namespace shardtensor
