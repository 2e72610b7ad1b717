// Plain tensors among ShardTensors: which are let in, as what, and how a gradient finds its way back to them.
#pragma once

#include "dispatch/call.h"
#include "dispatch/modes.h"

#include <torch/csrc/autograd/variable.h>

namespace shardtensor {

// Refuses or warns of plain tensors, or lets them pass as replicated ones.
void check_plain(const Op& op, const Refs& refs);

// Forward mode. Most tensors have none, which is told without a lock.
inline bool has_tangent(const at::Tensor& t) {
  const auto* meta =
      static_cast<torch::autograd::AutogradMeta*>(t.defined() ? t.unsafeGetTensorImpl()->autograd_meta() : nullptr);
  return meta && (meta->fw_grad_ || meta->is_view_) && t._fw_grad(/*level=*/0).defined();
}

// Whether autograd has anything to record of it.
inline bool is_tracked(const at::Tensor& t) {
  return (t.requires_grad() && at::GradMode::is_enabled()) || has_tangent(t);
}

// Whether it is a plain tensor that autograd will want a gradient for, which the ops behind it would make a ShardTensor.
bool wants_entrance(const at::Tensor& t);

// Autograd's kernel, which is passed by where there is nothing to record. Plain tensors that want a gradient are replaced by
// replicated ShardTensors, connected to them in the graph.
void record(const Op& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
// The second half alone; false if there are none.
bool enter_plain(const Op& op, torch::jit::Stack& stack, size_t base, const Refs& refs);

// Where one operand has a tangent, all get one: for those without, torch's formula would make zeros that are plain tensors.
void give_tangents(const Op& op, torch::jit::Stack& stack, size_t base, const Refs& refs);

// Whether the op needs to come by here: torch has a formula for it, we have none, and it takes several tensors.
bool has_entrance(const Op& op);
inline bool may_pass_by(const Op& op) {
  return !op.mutated && !op.is_view && !op.reshapes_self; // of others autograd counts versions
}
// Python's dispatcher (of graphs) hands over keys above autograd's too, which must not have their turn again.
inline c10::DispatchKeySet below_autograd(c10::DispatchKeySet keys) {
  return keys & c10::after_ADInplaceOrView_keyset;
}
inline c10::DispatchKeySet torchs_autograd(c10::DispatchKeySet keys) {
  return (keys & c10::after_autograd_keyset).add(c10::DispatchKey::AutogradOther);
}

// How they are made: from_local, set by autograd/'s user.
using Entrance = at::Tensor (*)(const at::Tensor& plain, const LayoutPtr& layout);
void set_entrance(Entrance entrance);

} // namespace shardtensor
