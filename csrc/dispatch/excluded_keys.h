// The dispatch keys that are excluded while the handler works on local tensors.
#pragma once

#include "comm/tensor_kind.h"

#include <ATen/core/LegacyTypeDispatch.h>

namespace shardtensor {

// For ops on local tensors.
inline const c10::DispatchKeySet kBelow = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;

// For calls of meta kernels: neither modes nor graphs see them.
inline const c10::DispatchKeySet kAside = kBelow | kStandIns | c10::DispatchKeySet(c10::DispatchKey::PythonTLSSnapshot);

} // namespace shardtensor
