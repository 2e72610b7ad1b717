// Ops that do not run by a rule of their own alone: lists of tensors handled element by element, ops run by torch's
// decomposition, and Fourier transforms, which may take two calls.
#pragma once

#include "dispatch/op.h"
#include "rules/spectral.h"

#include <ATen/core/stack.h>

namespace shardtensor {

// Whether it is a Fourier transform, which runs as two of them if that sends less.
inline bool is_transform(const Op& op) {
  return op.entry && op.entry->rule == rules::transform && !op.outputs;
}
inline bool is_special(const Op& op) {
  return is_transform(op) || op.is(rules::Way::Decomposed) || op.is(rules::Way::Each) || op.is(rules::Way::FoundInf);
}
void handle_specially(const Op& op, torch::jit::Stack* stack);

} // namespace shardtensor
