// Scaled dot product attention: batch and heads are sharded freely.
#include "rules/registry.h"

namespace shardtensor::rules {

void register_attention(Registry& r) {}

} // namespace shardtensor::rules
