// Whether a local tensor has values that can be moved.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace shardtensor {

inline constexpr c10::DispatchKeySet kStandIns({c10::DispatchKey::Python, c10::DispatchKey::Functionalize});

// Whether ops are being recorded into a graph (torch.compile, export, make_fx, functionalize).
inline bool is_recording() {
  using Tls = c10::impl::TorchDispatchModeTLS;
  using Mode = c10::impl::TorchDispatchModeKey;
  return Tls::get_mode(Mode::PROXY).has_value() || Tls::get_mode(Mode::FUNCTIONAL).has_value();
}

inline bool is_fake(const at::Tensor& t) {
  return t.key_set().has(c10::DispatchKey::Python) && t.has_storage() && t.storage().device().is_meta();
}

// Whether `t` stands for a tensor of a graph, or is fake: it has no values now, and only ops that the dispatcher sees may
// change it. comm/traced.h has the collectives for such tensors.
inline bool is_traced(const at::Tensor& t) {
  if (C10_LIKELY(!t.key_set().has_any(kStandIns))) {
    return false;
  }
  return t.key_set().has(c10::DispatchKey::Functionalize) || is_recording() || is_fake(t);
}

// Whether `t` is a Python subclass whose values lie in other tensors: only its class's ops can reach them.
inline bool is_wrapper(const at::Tensor& t) {
  return t.key_set().has(c10::DispatchKey::Python) && !is_traced(t) && !t.is_meta() && !(t.has_storage() && t.storage().data());
}

// Raises for a tensor of a graph: `what` depends on its values.
inline void need_values(const at::Tensor& t, const char* what) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !is_traced(t), "shardtensor: ", what,
      " depends on a tensor's values, so it cannot be traced into a graph (torch.compile, export, make_fx). Do it outside of the "
      "compiled function, or in one marked with torch.compiler.disable, which splits the graph there");
}

// False for tensors that have only sizes: on the meta device, or fake. Throws for tensors of a graph, because the graph would
// not record the use of the values, and for Python wrappers, whose values are in other tensors.
inline bool has_values(const at::Tensor& t) {
  if (C10_LIKELY(!t.is_meta() && !t.key_set().has_any(kStandIns))) {
    return true;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      !t.key_set().has(c10::DispatchKey::Functionalize) && !is_recording(),
      "shardtensor: this needs a tensor's values now, so it cannot be traced into a graph (torch.compile, export, make_fx). Move "
      "it out of the compiled function, or mark its function with torch.compiler.disable, which splits the graph there");
  if (t.is_meta() || is_fake(t)) {
    return false;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      t.numel() == 0 || !is_wrapper(t), "shardtensor: the local tensor, of ", t.dtype(), " and sizes ", t.sizes(),
      ", is a Python subclass without memory of its own, which cannot move between ranks; run only ops that need no "
      "redistribution, or use to_local()");
  return true;
}

} // namespace shardtensor
