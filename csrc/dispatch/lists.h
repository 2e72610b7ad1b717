// foreach and fused optimizer ops: each index of the lists is resolved by itself, then one call is made on all local tensors.
#pragma once

#include "dispatch/op.h"

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/stack.h>

#include <optional>

namespace shardtensor {

void handle_lists(const Op& op, torch::jit::Stack* stack);

// An unboxed kernel for the signatures that optimizers call. It handles lists in which nothing has to move, and passes all
// others to handle_lists().
std::optional<c10::KernelFunction> typed_list_kernel(const Op& op);

} // namespace shardtensor
