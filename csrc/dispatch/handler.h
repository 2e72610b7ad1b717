// The dispatch key's handler and its registration.
#pragma once

#include <cstdint>

namespace shardtensor {

// Registers the handler for every aten op that takes a tensor and is not a composite, and as the key's fallback.
// Called once at import; returns the number of ops.
int64_t install_handler();

} // namespace shardtensor
