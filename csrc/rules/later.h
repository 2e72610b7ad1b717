// Calls whose messages depend on values, in a graph: there they become one op, which makes the call on the pieces when the graph
// runs, as eager mode does.
#pragma once

#include "rules/solution.h"

namespace shardtensor::rules {

// Replaces the call, of which some operand belongs to a graph or has no values, by that op. `results`: this rank's sizes of each
// result, which has the dtype of the first operand; nothing for one that the call does not return. Sizes become numbers.
void put_off(Run& run, const std::vector<std::optional<SymSizes>>& results);

} // namespace shardtensor::rules
