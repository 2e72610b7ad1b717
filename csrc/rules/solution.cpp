#include "rules/solution.h"

namespace shardtensor::rules {

uint64_t KernelRun::mesh_dims(int64_t factor) const {
  return solution.factor_mesh_dims[factor];
}

} // namespace shardtensor::rules
