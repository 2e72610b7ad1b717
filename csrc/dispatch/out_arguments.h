// out= arguments: they must have the result's sizes on every rank before the op runs, or the call raises.
#pragma once

#include "dispatch/inputs.h"

namespace shardtensor {

// find_solution() for a call with out= arguments. Empty ones are resized to their result, as in torch; other wrong sizes raise.
rules::SolutionPtr fitting_solution(const Op& op, const torch::jit::Stack& stack, size_t base, const Refs& refs);

// Raises if the op has resized the local tensor of an out= argument: its sizes could not be checked before.
void check_outputs(const Op& op, const rules::Solution& solution, const Refs& refs, const Locals& locals);

} // namespace shardtensor
