// For ops that refuse tensors without elements, which pieces may be.
#pragma once

#include "rules/rule.h"

namespace shardtensor::rules {

// Runs the op, with every empty dim of an operand made one index of zeros, and cuts the results down to what their layouts
// say. Right where each factor either runs through to the results or is summed over in a product with that operand.
void call_op_nonempty(Run& run);

} // namespace shardtensor::rules
