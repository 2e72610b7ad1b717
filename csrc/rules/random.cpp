// Random ops: a value depends on the seed and the global index of its element alone.
#include "rules/registry.h"

namespace shardtensor::rules {

void register_random(Registry& r) {}

} // namespace shardtensor::rules
