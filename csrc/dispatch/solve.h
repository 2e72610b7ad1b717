// From a call to its solution. The op's rule runs once for each key.
#pragma once

#include "dispatch/cache.h"

namespace shardtensor {

// By the op's rule and, where only torch knows (see meta_probe.h), by its answers. For boxed arguments.
rules::SolutionPtr new_solution(const Op& op, const torch::jit::Stack& stack, size_t base, const Refs& refs);

// The cached one for boxed arguments, or a new one. `refs` may be some of the tensors: one index of lists.
rules::SolutionPtr find_solution(const Op& op, const torch::jit::Stack& stack, size_t base, const Refs& refs);

// The solution that is cached for exactly these sizes, or null.
rules::SolutionPtr known_for_sizes(const Op& op, const torch::jit::Stack& stack, size_t base, const Refs& refs);

} // namespace shardtensor
