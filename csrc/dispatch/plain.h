// Plain tensors among ShardTensors: which are allowed, with what layout, and how they get their gradients.
#pragma once

#include "dispatch/modes.h"
#include "dispatch/refs.h"
#include "layout/observer.h"

#include <torch/csrc/autograd/variable.h>

namespace shardtensor {

// Raises for plain tensors, warns, or accepts them as replicated.
void check_plain(const Op& op, const Refs& refs);

// Whether `t` has a forward-mode tangent. For most tensors, which have none, this takes no lock.
inline bool has_tangent(const at::Tensor& t) {
  const auto* meta =
      static_cast<torch::autograd::AutogradMeta*>(t.defined() ? t.unsafeGetTensorImpl()->autograd_meta() : nullptr);
  return meta && (meta->fw_grad_ || meta->is_view_) && t._fw_grad(/*level=*/0).defined();
}

// Whether autograd has anything to record for it.
inline bool is_tracked(const at::Tensor& t) {
  return (t.requires_grad() && at::GradMode::is_enabled()) || has_tangent(t);
}

// Whether `t` is a plain tensor that needs a gradient: without an entrance, it would be a ShardTensor. Or an empty 1-d
// ShardTensor that needs one: cat leaves it out, and torch's formula makes its gradient as a plain tensor.
bool wants_entrance(const at::Tensor& t);

// Autograd's kernel, skipped if there is nothing to record. Plain tensors that need a gradient are first replaced by replicated
// ShardTensors, which the graph connects to them.
void record(const Op& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
// Only replaces such tensors; false if there are none.
bool enter_plain(const Op& op, torch::jit::Stack& stack, size_t base, const Refs& refs);

// If one operand has a tangent, gives all of them one: torch's formula would fill in zeros as plain tensors.
void give_tangents(const Op& op, torch::jit::Stack& stack, size_t base, const Refs& refs);

// Whether the op needs record(): torch has a formula for it, we have none, and it takes several tensors.
bool has_entrance(const Op& op);
inline bool may_pass_by(const Op& op) {
  return !op.mutated && !op.is_view && !op.reshapes_self; // for the others autograd counts versions
}
// Python's dispatcher (for graphs) also passes keys above autograd's, which must not run again.
inline c10::DispatchKeySet below_autograd(c10::DispatchKeySet keys) {
  return keys & c10::after_ADInplaceOrView_keyset;
}
inline c10::DispatchKeySet torchs_autograd(c10::DispatchKeySet keys) {
  return (keys & c10::after_autograd_keyset).add(c10::DispatchKey::AutogradOther);
}

// How a tensor for which wants_entrance() holds becomes one with the right gradient. A plain one gets the layout. Set at import.
inline Observer<at::Tensor(const at::Tensor& t, const LayoutPtr& layout)> entrance;

} // namespace shardtensor
