// Layer, rms, group and batch norm: statistics over sharded dims are put together by all-reduce.
#include "rules/registry.h"

namespace shardtensor::rules {

void register_normalization(Registry& r) {}

} // namespace shardtensor::rules
