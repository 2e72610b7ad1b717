// Whether a local tensor has values that can be moved. Uses ATen. Used by comm/, kernels/, redistribute/ and rules/.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace shardtensor {

// False for tensors of the meta device and fake ones: they have sizes alone. Throws while they are traced into a graph, which
// would lack the move, and for tensors whose values lie in others, as Python's wrappers have them.
inline bool has_values(const at::Tensor& t) {
  constexpr c10::DispatchKeySet kStandIns({c10::DispatchKey::Python, c10::DispatchKey::Functionalize});
  if (C10_LIKELY(!t.is_meta() && !t.key_set().has_any(kStandIns))) {
    return true;
  }
  const bool graph = c10::impl::TorchDispatchModeTLS::get_mode(c10::impl::TorchDispatchModeKey::PROXY).has_value();
  TORCH_CHECK_NOT_IMPLEMENTED(
      !graph && !t.key_set().has(c10::DispatchKey::Functionalize),
      "shardtensor: collectives and random numbers cannot be traced into "
      "a graph (torch.compile, make_fx, functionalize); keep what needs them out of the traced region");
  if (t.has_storage() && t.storage().device().is_meta()) {
    return false;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      t.numel() == 0 || (t.has_storage() && t.storage().data()), "shardtensor: the local tensor, of ", t.dtype(), " and sizes ",
      t.sizes(),
      ", is a Python subclass without memory of its own, which cannot move between ranks; ops that need no other "
      "layout run on it, and to_local() gives it back");
  return true;
}

} // namespace shardtensor
