// Ops of other libraries.
#pragma once

#include <string>

namespace shardtensor {

// Called when an op of another library has got a kernel. If that is one for all backends, the handler comes before it; if the op
// is a composite now, the handler goes.
void settle_op(const std::string& name, const std::string& overload);

} // namespace shardtensor
