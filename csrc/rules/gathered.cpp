// Ops that have no rule, and whose formulas for the gradient, or own bodies, write into plain tensors or read values.
#include "rules/registry.h"

namespace shardtensor::rules {

void register_gathered(Registry& r) {
  r.add(
      "gathered",
      {
          "ctc_loss.IntList",
          "ctc_loss.Tensor",
      },
      nullptr, {.way = Way::Gathered});
}

} // namespace shardtensor::rules
