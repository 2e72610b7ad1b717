// Typed entry points for ops of the most frequent signatures: no boxing, no reference counts on the arguments. They do what
// handle() does; if a solution needs more than one call of the op (a kernel, a write carried back), run_call() does the rest.
#pragma once

#include "dispatch/op.h"

#include <ATen/core/boxing/KernelFunction.h>

#include <optional>

namespace shardtensor {

// A typed kernel for the op, if its signature is among those compiled in.
std::optional<c10::KernelFunction> typed_kernel(const Op& op);

// A typed record() for the autograd key.
std::optional<c10::KernelFunction> typed_record(const Op& op);

} // namespace shardtensor
