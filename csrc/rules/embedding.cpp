// Embedding tables, vocabulary sharded by masking.
#include "rules/registry.h"

namespace shardtensor::rules {

void register_embedding(Registry& r) {}

} // namespace shardtensor::rules
