// One call on ShardTensors, from its arguments to its wrapped results: find the solution (solve.h), get this rank's local
// tensors (localize.h), run the op or its rule's kernel, wrap the results (wrap.h). Here for boxed calls; typed.cpp and
// lists.cpp take the same steps with arguments in other forms.
#pragma once

#include "dispatch/localize.h"
#include "dispatch/solve.h"
#include "dispatch/wrap.h"

namespace shardtensor {

// Runs a whole call on boxed arguments and replaces them by the results.
void handle(const Op& op, torch::jit::Stack* stack);

// Runs the op, or its rule's kernel instead, on a stack whose last arguments are local tensors: `locals`.
void run_on_locals(
    const Op& op, torch::jit::Stack& stack, const Refs& refs, const rules::Solution& solution, const Locals& locals);

} // namespace shardtensor
