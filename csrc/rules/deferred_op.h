// Calls whose steps a graph cannot hold, because their messages depend on values or go to single ranks. In the graph such a
// call is one op, which makes the call on the pieces when the graph runs, like eager mode.
#pragma once

#include "rules/solution.h"

namespace shardtensor::rules {

// This rank's piece of a result.
struct DeferredResult {
  SymSizes sizes;
  std::optional<at::ScalarType> dtype; // none: that of the first operand

  DeferredResult(SymSizes s, std::optional<at::ScalarType> type = std::nullopt) : sizes(std::move(s)), dtype(type) {} // NOLINT
};

// Replaces a call with an operand that belongs to a graph or has no values by that op. `results`: the first results; nothing
// for one that the call does not return. Sizes that are symbols stay symbols, unless the pieces depend on the sizes in another
// way than torch.chunk's.
void defer_call(KernelRun& run, const std::vector<std::optional<DeferredResult>>& results);

} // namespace shardtensor::rules
