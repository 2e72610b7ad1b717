// Ops of other libraries.
#pragma once

#include <string>

namespace shardtensor {

// Called when an op of another library has got a kernel. If the kernel is for all backends, registers the handler for the op, so
// that it comes first. If the op is a composite now, removes the handler.
void update_foreign_op(const std::string& name, const std::string& overload);

} // namespace shardtensor
