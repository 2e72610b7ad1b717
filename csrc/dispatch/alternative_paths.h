// Ops that do not run by a rule of their own alone: lists, and ops that run as other ops.
#pragma once

#include "dispatch/op.h"

#include <ATen/core/stack.h>

namespace shardtensor {

inline bool has_alternative_path(const Op& op) {
  return op.is(rules::Way::Lists) || (op.entry && (op.entry->options.calls || op.entry->runs_as_other_ops()));
}
void take_alternative_path(const Op& op, torch::jit::Stack* stack);

} // namespace shardtensor
