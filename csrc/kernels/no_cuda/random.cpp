// Replaces cuda/random.cu in builds without CUDA.
#include "kernels/random.h"

#include <c10/util/Exception.h>

namespace shardtensor::kernels::cuda {

void fill_random(at::Tensor&, uint64_t, const LocalRegion&, const Distribution&) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "shardtensor: random numbers on cuda, but shardtensor was built without CUDA; build it where nvcc is found");
}

} // namespace shardtensor::kernels::cuda
