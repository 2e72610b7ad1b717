// Ops along a dim that keep it: cumsum, cumprod, sort, topk.
#include "rules/registry.h"

namespace shardtensor::rules {

void register_scans(Registry& r) {}

} // namespace shardtensor::rules
