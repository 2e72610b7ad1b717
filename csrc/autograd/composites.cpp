// Autograd kernels of the composite ops that a rule takes whole (Options.composite).
#include <torch/library.h>

namespace shardtensor {

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse2, m) {
  m.impl("one_hot", torch::CppFunction::makeFallthrough()); // integers have no gradient
}

} // namespace shardtensor
