// Replaces cuda/boxes.cu in builds without CUDA.
#include "kernels/boxes.h"

#include <c10/util/Exception.h>

namespace shardtensor::kernels::cuda {

namespace {

void refuse() {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "shardtensor: copies of boxes on cuda, but shardtensor was built without CUDA; build it where nvcc is found");
}

} // namespace

void move(const BoxCopies&, const at::Tensor&, at::Tensor&) {
  refuse();
}

void reduce(const BoxCopies&, const at::Tensor&, int64_t, ReduceOp, at::Tensor&) {
  refuse();
}

} // namespace shardtensor::kernels::cuda
