// Chooses how a call uses each mesh dim.
#pragma once

#include "rules/resolve/choices.h"

namespace shardtensor::rules {

// The best choice for mesh dim m, given those before it. `summands_pass`: Partial operands may stay, if the op is linear in
// them. If every choice costs communication, compares bytes, including those of sums that are left, and sets `weighed`.
Choice choose(const Choices& so_far, int64_t m, bool summands_pass, bool& weighed);

} // namespace shardtensor::rules
