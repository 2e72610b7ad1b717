// What the rules of some ops note for the code that moves their operands.
#pragma once

#include <cstdint>

namespace shardtensor::rules {

// torch's kernel reads this operand while it writes the first one, element by element, and does not mind if they share memory.
struct ReadsAsItWrites {
  int64_t operand;
};

} // namespace shardtensor::rules
