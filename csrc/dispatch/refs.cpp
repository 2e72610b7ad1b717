#include "dispatch/refs.h"

#include "dispatch/errors.h"

namespace shardtensor {

const MeshPtr& mesh_of(const Op& op, const Refs& refs) {
  const ShardTensorImpl* first = nullptr;
  for (const auto& r : refs) {
    if (!r.impl) {
      continue;
    }
    if (!first) {
      first = r.impl;
    } else if (&r.impl->layout().mesh() != &first->layout().mesh()) {
      errors::different_meshes(op, first->layout(), r.impl->layout());
    }
  }
  TORCH_INTERNAL_ASSERT(first, op.name, ": no ShardTensor among the arguments");
  return first->layout().mesh_ptr();
}

Refs collect(const Op& op, const torch::jit::Stack& stack, size_t base) {
  Refs refs;
  for (size_t i = 0; i < op.kinds.size(); ++i) {
    const auto& value = stack[base + i];
    if (op.kinds[i] == ArgKind::Tensor) {
      if (value.isTensor() && value.toTensor().defined()) {
        refs.emplace_back(i, -1, value.toTensor());
      }
    } else if (op.kinds[i] == ArgKind::TensorList && !value.isNone()) {
      const auto list = value.toListRef();
      for (size_t k = 0; k < list.size(); ++k) {
        if (list[k].isTensor() && list[k].toTensor().defined()) {
          refs.emplace_back(i, k, list[k].toTensor());
        }
      }
    }
  }
  return refs;
}

} // namespace shardtensor
