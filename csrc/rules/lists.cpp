// foreach and fused optimizer ops: lists of tensors, each element on its own.
#include "rules/registry.h"

namespace shardtensor::rules {

void register_lists(Registry& r) {}

} // namespace shardtensor::rules
