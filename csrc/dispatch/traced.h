// Calls that arrive through __torch_dispatch__: their tensors stand for tensors of a graph, or are fake, and sizes may be
// symbols. They run through the boxed handler.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace shardtensor {

// Runs the op's kernel at kKey, but never a typed kernel: those take no symbols.
void call_traced(const c10::OperatorHandle& op, torch::jit::Stack* stack);

} // namespace shardtensor
