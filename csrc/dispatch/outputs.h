// out= arguments: they have the result's sizes before the op runs, on every rank, or the call is refused.
#pragma once

#include "dispatch/call.h"

namespace shardtensor {

// The call on meta tensors of the global sizes; the out= arguments are empty, so that the op sizes them.
torch::jit::Stack on_meta(const Op& op, const torch::jit::Stack& stack, size_t base, const Refs& refs);

// find_solution() for a call whose out= arguments fit: empty ones are given the sizes of their results, as torch does, others
// of wrong sizes are refused.
rules::SolutionPtr fitting_solution(const Op& op, const torch::jit::Stack& stack, size_t base, const Refs& refs);

// Refuses an out= argument whose local tensor the op has resized: where the sizes could not be known before.
void check_outputs(const Op& op, const rules::Solution& solution, const Refs& refs, const Locals& locals);

} // namespace shardtensor
