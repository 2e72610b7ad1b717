// From a rule and the operands' layouts to a solution. A pure function of layouts and sizes, so that every rank finds the same.
#pragma once

#include "rules/solution.h"

namespace shardtensor::rules {

c10::intrusive_ptr<Solution> resolve(const Call& call, const Rule& rule);

} // namespace shardtensor::rules
