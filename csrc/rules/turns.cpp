// flip, roll, rot90: indices move along some dims, which stay whole.
#include "rules/pieces.h"
#include "rules/registry.h"

namespace shardtensor::rules {

namespace {

uint64_t named_dims(const Call& call, int64_t arg) {
  uint64_t mask = 0;
  for (auto d : call.ints(arg)) {
    mask |= uint64_t{1} << wrap_dim(d, call.tensors[0].dim());
  }
  return mask;
}

Rule flip(const Call& call) {
  return whole_along(call, named_dims(call, 1));
}

// Without dims the tensor is rolled as if it were flat.
Rule roll(const Call& call) {
  return whole_along(call, call.ints(2).empty() ? ~uint64_t{0} : named_dims(call, 2));
}

Rule rot90(const Call& call) {
  return whole_along(call, named_dims(call, 2));
}

} // namespace

void register_turns(Registry& r) {
  r.add("turns", {"flip"}, flip);
  r.add("turns", {"roll"}, roll);
  r.add("turns", {"rot90"}, rot90, {.asks_order = true});
}

} // namespace shardtensor::rules
