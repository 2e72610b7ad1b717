// For ops that refuse tensors without elements, since pieces may be empty.
#pragma once

#include "rules/rule.h"

namespace shardtensor::rules {

// Runs the op with every empty dim of an operand replaced by one index of zeros, and cuts the results to the sizes of their
// layouts. Correct if each factor either reaches the results or is summed over in a product with that operand.
void call_op_nonempty(KernelRun& run);

} // namespace shardtensor::rules
