// Calls that a graph cannot hold step by step, because their messages depend on values or are single ones: there they become one
// op, which makes the call on the pieces when the graph runs, as eager mode does.
#pragma once

#include "rules/solution.h"

namespace shardtensor::rules {

// This rank's piece of a result.
struct Promised {
  SymSizes sizes;
  std::optional<at::ScalarType> dtype; // none: that of the first operand

  Promised(SymSizes s, std::optional<at::ScalarType> type = std::nullopt) : sizes(std::move(s)), dtype(type) {} // NOLINT
};

// Replaces the call, of which some operand belongs to a graph or has no values, by that op. `results`: the first ones; nothing
// for one that the call does not return. Symbols stay symbols, but where pieces follow the sizes in another way than
// torch.chunk's.
void put_off(Run& run, const std::vector<std::optional<Promised>>& results);

} // namespace shardtensor::rules
