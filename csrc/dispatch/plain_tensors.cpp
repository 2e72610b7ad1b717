#include "dispatch/plain_tensors.h"

#include "comm/tensor_kind.h"
#include "dispatch/errors.h"
#include "dispatch/excluded_keys.h"

#include <ATen/ATen.h>
#include <ATen/DTensorState.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>

namespace shardtensor {

namespace {

// Whether the tensor has a Python object, as every tensor of a user has.
bool seen_by_python(const at::Tensor& t) {
  return t.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
}

// Whether the values are zeros, ones, or those of arange.
bool is_counted(const at::Tensor& t) {
  if (is_traced(t) || t.is_meta()) {
    return true; // it has no values
  }
  c10::impl::ExcludeDispatchKeyGuard aside(kAside);
  const auto flat = t.reshape(-1);
  const auto n = flat.numel();
  if (n == 0 || flat.eq(1).all().item<bool>()) {
    return true;
  }
  const auto step = flat[std::min<int64_t>(1, n - 1)];
  return flat.eq(at::arange(n, flat.options().dtype(at::kLong)) * step).all().item<bool>();
}

// torch itself makes plain tensors inside some ops, the same on every rank. If they may meet a DTensor, torch says so by a
// flag. Otherwise they are recognized by having no Python object and by their values: zeros for an operand without a tangent
// in forward mode (if torch.func has hidden the ShardTensors from give_tangents()), constants and aranges in vmap's rules.
bool is_made_by_torch(const at::Tensor& t) {
  return at::get_dtensor_allow_implicit_replication() || (!t.requires_grad() && !seen_by_python(t) && is_counted(t));
}

} // namespace

void check_plain_tensors(const Op& op, const Refs& refs) {
  const bool allowed = op.entry && op.entry->options.plain;
  for (const auto& r : refs) {
    if (allowed || r.impl || r.tensor->dim() == 0) {
      continue;
    }
    const auto mode = AsReplicatedGuard::alive() ? Promotion::Replicate : promotion();
    if (mode != Promotion::Replicate && torch::autograd::get_current_node()) {
      continue; // torch's formula made it (zeros of a gradient's sizes), so it is the same on every rank
    }
    if (mode != Promotion::Replicate && is_made_by_torch(*r.tensor)) {
      continue;
    }
    if (mode == Promotion::Error && r.tensor->dim() == 1 && !is_symbolic(*r.tensor) && r.tensor->numel() == 1 && r.index < 0) {
      TORCH_WARN_ONCE(
          op.name, ": argument '", op.schema().arguments()[r.arg].name(),
          "' is a plain 1-d torch.Tensor of one element among ShardTensors. It is taken as replicated, like a number; "
          "make it 0-d.");
      continue;
    }
    if (mode == Promotion::Error) {
      errors::plain_tensor(op, r.arg, *r.tensor);
    }
    if (mode == Promotion::Warn) {
      TORCH_WARN_ONCE(errors::plain_tensor_text(op, r.arg, *r.tensor), " It is taken as replicated.");
    }
  }
}

bool needs_promotion(const at::Tensor& t) {
  // Wrapper tensors (functorch's levels, Python subclasses) are not plain: they may hold a ShardTensor.
  static constexpr c10::DispatchKeySet kLevels({c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper});
  const bool ours = t.defined() && as_shard_tensor(t);
  if (!t.defined() || (ours && t.dim() != 1) || !at::GradMode::is_enabled() || !t.requires_grad()) {
    return false;
  }
  if (ours) {
    return rules::is_empty(t);
  }
  return t.layout() == at::kStrided && !t.key_set().has_any(kLevels) && (!t.key_set().has_any(kStandIns) || is_traced(t));
}

void give_tangents(const Op& op, torch::jit::Stack& stack, size_t base, const Refs& refs) {
  if (std::none_of(refs.begin(), refs.end(), [](const Ref& r) { return has_tangent(*r.tensor); })) {
    return;
  }
  const auto lacks = [&](const Ref& r) {
    const auto dtype = r.tensor->scalar_type();
    return (c10::isFloatingType(dtype) || c10::isComplexType(dtype)) && r.tensor->dim() > 0 && !(op.mutated >> r.arg & 1) &&
           !has_tangent(*r.tensor);
  };
  replace_tensors(stack, base, refs, lacks, [](const Ref& r) {
    return at::_make_dual(*r.tensor, at::_new_zeros_with_same_feature_meta(*r.tensor, *r.tensor), /*level=*/0);
  });
}

bool promote_plain(const Op& op, torch::jit::Stack& stack, size_t base, const Refs& refs) {
  const auto enters = [&](const Ref& r) {
    return needs_promotion(*r.tensor) && !(op.mutated >> r.arg & 1) && (!r.impl || r.index >= 0);
  };
  const bool among = std::any_of(refs.begin(), refs.end(), [](const Ref& r) { return r.impl; });
  if (!among || std::none_of(refs.begin(), refs.end(), enters)) {
    return false;
  }
  check_plain(op, refs);
  const auto layout = Layout::replicated(mesh_of(op, refs));
  replace_tensors(stack, base, refs, enters, [&](const Ref& r) { return promote(*r.tensor, layout); });
  return true;
}

void record(const Op& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto base = stack->size() - op.kinds.size();
  const auto below = below_autograd(keys);
  const auto refs = collect(op, *stack, base);
  const auto tracked = [](const Ref& r) { return is_tracked(*r.tensor); };
  if (skips_autograd(op, below, [&] { return std::any_of(refs.begin(), refs.end(), tracked); })) {
    op.handle.redispatchBoxed(below, stack);
    return;
  }
  const bool entered = promote_plain(op, *stack, base, refs);
  give_tangents(op, *stack, base, entered ? collect(op, *stack, base) : refs);
  op.handle.redispatchBoxed(torchs_autograd(keys), stack);
}

bool may_promote(const Op& op) {
  const auto has = [&](c10::DispatchKey key) { return op.handle.hasKernelForDispatchKey(key); };
  const auto lists = std::count(op.kinds.begin(), op.kinds.end(), ArgKind::TensorList);
  const auto tensors = std::count(op.kinds.begin(), op.kinds.end(), ArgKind::Tensor);
  const bool ours = has(kAutogradKey);
  // AutogradOther, the key of torch's formulas, would decompose such ops.
  const bool decomposes = has(c10::DispatchKey::CompositeImplicitAutograd);
  return (lists || tensors > 1) && !op.is(rules::Way::Lists) && !ours && !decomposes && has(c10::DispatchKey::Autograd);
}

} // namespace shardtensor
