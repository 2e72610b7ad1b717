// Plain tensors among ShardTensors: which are allowed, with what layout, and how they get their gradients.
#pragma once

#include "dispatch/modes.h"
#include "dispatch/refs.h"
#include "layout/observer.h"

#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace shardtensor {

// Raises for plain tensors of one dim or more, warns, or accepts them as replicated.
void check_plain_tensors(const Op& op, const Refs& refs);
inline void check_plain(const Op& op, const Refs& refs) {
  if (C10_UNLIKELY(std::any_of(refs.begin(), refs.end(), [](const Ref& r) { return !r.impl && r.tensor->dim() > 0; }))) {
    check_plain_tensors(op, refs);
  }
}

// What autograd knows of `t`; null for most tensors outside of training.
inline const torch::autograd::AutogradMeta* autograd_meta(const at::Tensor& t) {
  return static_cast<torch::autograd::AutogradMeta*>(t.defined() ? t.unsafeGetTensorImpl()->autograd_meta() : nullptr);
}

// Whether `t` has a forward-mode tangent. For most tensors, which have none, this takes no lock.
inline bool has_tangent(const at::Tensor& t) {
  const auto* meta = autograd_meta(t);
  return meta && (meta->fw_grad_ || meta->is_view_) && t._fw_grad(/*level=*/0).defined();
}

// Whether autograd records ops on it.
inline bool is_tracked(const at::Tensor& t) {
  const auto* meta = autograd_meta(t);
  return meta && ((meta->requires_grad() && at::GradMode::is_enabled()) || has_tangent(t));
}

// True if `t` is a plain tensor whose gradient would otherwise be a ShardTensor: promote it first. Also for an empty 1-d
// ShardTensor that needs a gradient: cat leaves it out, and torch's formula makes its gradient as a plain tensor.
bool needs_promotion(const at::Tensor& t);

// Autograd's kernel, skipped if there is nothing to record. Plain tensors that need a gradient are first replaced by replicated
// ShardTensors, which the graph connects to them.
void record(const Op& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
// Replaces such tensors without calling the op; false if there are none.
bool promote_plain(const Op& op, torch::jit::Stack& stack, size_t base, const Refs& refs);

// If one operand has a tangent, gives all of them one: torch's formula would fill in zeros as plain tensors.
void give_tangents(const Op& op, torch::jit::Stack& stack, size_t base, const Refs& refs);

// Whether the op needs record(): torch has a formula for it, we have none, and it takes several tensors.
bool may_promote(const Op& op);
// Python's dispatcher (for graphs) also passes keys above autograd's, which must not run again.
inline c10::DispatchKeySet below_autograd(c10::DispatchKeySet keys) {
  return keys & c10::after_ADInplaceOrView_keyset;
}
inline c10::DispatchKeySet torchs_autograd(c10::DispatchKeySet keys) {
  return (keys & c10::after_autograd_keyset).add(c10::DispatchKey::AutogradOther);
}
// Whether the call may go to `below` directly, without autograd's kernel: there is nothing to record, and no version counter to
// increase. `tracked()`: whether any of them is_tracked().
template <typename Tracked>
bool skips_autograd(const Op& op, c10::DispatchKeySet below, const Tracked& tracked) {
  return !op.mutated && !op.is_view && !op.reshapes_self && below.highestPriorityTypeId() == kKey && !tracked();
}

// Promotes a tensor for which needs_promotion() holds to one that brings the right gradient back. A plain tensor gets the layout.
// Set at import.
inline Observer<at::Tensor(const at::Tensor& t, const LayoutPtr& layout)> promote;

} // namespace shardtensor
