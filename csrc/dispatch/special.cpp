#include "dispatch/special.h"

#include "tensor/shard_tensor.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace shardtensor {

void handle_specially(const Op& op, torch::jit::Stack* stack) {
  if (op.entry->options.decompose) {
    op.handle.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *stack);
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.name, ": lists of ShardTensors are not handled yet");
}

} // namespace shardtensor
