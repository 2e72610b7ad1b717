// Ops that do not run by a rule of their own alone: see rules::Way.
#pragma once

#include "dispatch/op.h"

#include <ATen/core/stack.h>

namespace shardtensor {

inline bool is_special(const Op& op) {
  using rules::Way;
  return op.is(Way::Decomposed) || op.is(Way::Stages) || op.is(Way::Each) || op.is(Way::FoundInf);
}
void handle_specially(const Op& op, torch::jit::Stack* stack);

} // namespace shardtensor
