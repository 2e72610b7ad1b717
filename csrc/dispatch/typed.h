// Typed entry points for the ops that run all the time: no boxing, no reference counts on the arguments. They do what handle()
// does, and hand over to it where a solution needs more than a call (a kernel, a write carried back).
#pragma once

#include "dispatch/op.h"

#include <ATen/core/boxing/KernelFunction.h>

#include <optional>

namespace shardtensor {

// A typed kernel for the op, if its signature is among those compiled in.
std::optional<c10::KernelFunction> typed_kernel(const Op& op);

// record() for the autograd key.
std::optional<c10::KernelFunction> typed_record(const Op& op);

} // namespace shardtensor
