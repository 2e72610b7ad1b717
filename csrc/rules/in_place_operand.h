// A fact about an operand that some rules pass to the code that moves operands.
#pragma once

#include <cstdint>

namespace shardtensor::rules {

// torch's kernel reads this operand element by element while it writes the first one, so the two may share memory.
struct InPlaceOperand {
  int64_t operand;
};

} // namespace shardtensor::rules
