// max_unpool along cut dims: its gradient is picked from where the values went, by shardtensor::picked (rules/ops/pooling.cpp);
// torch's formula would gather planes. Uses autograd/functions, dispatch/plain_tensors, tensor/.
#include "autograd/functions.h"
#include "autograd/with_gradient.h"
#include "dispatch/plain_tensors.h"
#include "tensor/shard_tensor.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/max_unpool2d_ops.h>
#include <ATen/ops/max_unpool3d_ops.h>

namespace shardtensor {

namespace {

using at::Tensor;
using torch::autograd::variable_list;

// Moves values that are cut in another way than their indices to the layout of the indices.
Tensor beside(const Tensor& values, const Tensor& index) {
  const auto *from = as_shard_tensor(values), *to = as_shard_tensor(index);
  return !from || !to || &from->layout() == &to->layout() || !to->layout().is_sharded() ? values
                                                                                        : redistribute(values, to->layout_ptr());
}

Tensor picked(const Tensor& planes, const Tensor& index, int64_t space);

// `op` puts values at the places that their indices name, or adds them up there. Its gradient is read from there.
Tensor scattered_in_planes(const Tensor& values, const Tensor& index, int64_t space, const OpFn& op) {
  return with_gradient({values}, {index}, op, [space](const Tensor& grad, const variable_list& saved) -> variable_list {
    return {picked(grad, saved[0], space)};
  });
}

// In planes of these sizes.
Tensor added_at(const Tensor& values, const Tensor& index, c10::SymIntArrayRef sizes) {
  static const auto op = own_op<Tensor(const Tensor&, const Tensor&, c10::SymIntArrayRef)>("shardtensor::added_at");
  return scattered_in_planes(values, index, static_cast<int64_t>(sizes.size()), [&] { return op.call(values, index, sizes); });
}

Tensor picked(const Tensor& planes, const Tensor& index, int64_t space) {
  static const auto op = own_op<Tensor(const Tensor&, const Tensor&, int64_t)>("shardtensor::picked");
  return with_gradient(
      {planes}, {index}, [&] { return op.call(planes, index, space); },
      [sizes = planes.sym_sizes().slice(planes.dim() - space).vec()](const Tensor& grad, const variable_list& saved)
          -> variable_list { return {added_at(beside(grad, saved[0]), saved[0], sizes)}; });
}

// Whether a gradient is needed for values that are cut along their last `space` dims.
bool space_is_cut(const Tensor& values, int64_t space) {
  const auto* impl = as_shard_tensor(values);
  return impl && values.dim() > space && impl->layout().sharded_dims() >> (values.dim() - space) && !has_tangent(values) &&
         values.requires_grad() && at::GradMode::is_enabled();
}

Tensor max_unpool2d(c10::DispatchKeySet keys, const Tensor& self, const Tensor& indices, c10::SymIntArrayRef size) {
  if (!space_is_cut(self, 2)) {
    return at::_ops::max_unpool2d::redispatch(torchs_autograd(keys), self, indices, size);
  }
  return scattered_in_planes(self, indices, 2, [&] { return at::_ops::max_unpool2d::call(self, indices, size); });
}

Tensor max_unpool3d(
    c10::DispatchKeySet keys,
    const Tensor& self,
    const Tensor& indices,
    c10::SymIntArrayRef size,
    at::IntArrayRef stride,
    at::IntArrayRef padding) {
  if (!space_is_cut(self, 3)) {
    return at::_ops::max_unpool3d::redispatch(torchs_autograd(keys), self, indices, size, stride, padding);
  }
  return scattered_in_planes(
      self, indices, 3, [&] { return at::_ops::max_unpool3d::call(self, indices, size, stride, padding); });
}

} // namespace

const Formula formulas::max_unpool2d = formula<&shardtensor::max_unpool2d>;
const Formula formulas::max_unpool3d = formula<&shardtensor::max_unpool3d>;

} // namespace shardtensor
