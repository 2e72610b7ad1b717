// Ops run as a whole on gathered inputs, autograd and all: torch's formula for them, or their own body, writes into plain
// tensors or reads values, which pieces do not allow.
// Uses call.h, autograd/functions.h. Used by handler.cpp alone.
#pragma once

#include "dispatch/op.h"

#include <ATen/core/stack.h>

namespace shardtensor {

// At the autograd key. The op writes no argument and returns no view.
void handle_gathered(const Op& op, torch::jit::Stack* stack);

} // namespace shardtensor
