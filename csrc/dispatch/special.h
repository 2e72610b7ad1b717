// Ops without a rule of their own: lists of tensors handled element by element, and ops run by torch's decomposition.
#pragma once

#include "dispatch/op.h"

#include <ATen/core/stack.h>

namespace shardtensor {

inline bool is_special(const Op& op) {
  return op.is(rules::Way::Decomposed) || op.is(rules::Way::Each) || op.is(rules::Way::FoundInf);
}
void handle_specially(const Op& op, torch::jit::Stack* stack);

} // namespace shardtensor
