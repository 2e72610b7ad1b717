// A rule in one line of text, for ops that work on the last dims of their operands and treat the others as a batch.
#pragma once

#include "rules/rule.h"

namespace shardtensor::rules {

// "*..,*.K->*.K": one item for each Tensor argument of the schema (also for one that is None), then one for each result.
// - *: all dims before the named ones. They broadcast, and may be cut.
// - .: one dim, which stays whole.
// - K: one dim, which may be cut. The same letter stands for the same factor everywhere.
// - 0: a result without elements, which is the same on all ranks.
// - ^: like *, for a result that has only the batch dims of the first operand.
//
// A result that lacks a cut dim does not depend on that dim. (It is not a sum over it.)
Rule batched(const Call& call, const char* text);

// The same as a rule function, linear in each of these operands alone.
template <Text text, int... operands>
Rule batch(const Call& call) {
  return linear(batched(call, text.chars), {operands...});
}

} // namespace shardtensor::rules
