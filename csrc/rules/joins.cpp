// Cat, stack and their kin: several operands become one.
#include "rules/registry.h"

namespace shardtensor::rules {

void register_joins(Registry& r) {}

} // namespace shardtensor::rules
