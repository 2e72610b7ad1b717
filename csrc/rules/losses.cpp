// nll_loss and the elementwise losses.
#include "rules/registry.h"

namespace shardtensor::rules {

void register_losses(Registry& r) {}

} // namespace shardtensor::rules
