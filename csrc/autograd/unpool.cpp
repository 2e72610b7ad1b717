// max_unpool along cut dims: its gradient is picked from where the values went, by shardtensor::picked (rules/ops/pooling.cpp);
// torch's formula would gather planes. Uses autograd/functions, dispatch/plain_tensors, tensor/.
#include "autograd/functions.h"
#include "autograd/make_formula.h"
#include "dispatch/plain_tensors.h"
#include "tensor/shard_tensor.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/max_unpool2d_ops.h>
#include <ATen/ops/max_unpool3d_ops.h>
#include <torch/csrc/autograd/custom_function.h>

namespace shardtensor {

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Moves values that are cut in another way than their indices to the layout of the indices.
Tensor beside(const Tensor& values, const Tensor& index) {
  const auto *from = as_shard_tensor(values), *to = as_shard_tensor(index);
  return !from || !to || &from->layout() == &to->layout() || !to->layout().is_sharded() ? values
                                                                                        : redistribute(values, to->layout_ptr());
}

Tensor picked(const Tensor& planes, const Tensor& index, int64_t space);

// `op` puts values at the places that their indices name, or adds them up there. Its gradient is read from there.
struct ScatterPlanes : torch::autograd::Function<ScatterPlanes> {
  static Tensor forward(
      AutogradContext* ctx, const Tensor& /*values*/, const Tensor& index, int64_t space, const std::function<Tensor()>& op) {
    ctx->save_for_backward({index});
    ctx->saved_data["space"] = space;
    at::AutoDispatchBelowADInplaceOrView below;
    return op();
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {picked(grads[0], ctx->get_saved_variables()[0], ctx->saved_data["space"].toInt()), Tensor(), Tensor(), Tensor()};
  }
};

// Adds up the values at their indices, in planes of these sizes.
Tensor added_at(const Tensor& values, const Tensor& index, const std::vector<c10::SymInt>& sizes) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("shardtensor::added_at", "")
                             .typed<Tensor(const Tensor&, const Tensor&, c10::SymIntArrayRef)>();
  return ScatterPlanes::apply(values, index, static_cast<int64_t>(sizes.size()), [&] { return op.call(values, index, sizes); });
}

struct GatherPlanes : torch::autograd::Function<GatherPlanes> {
  static Tensor forward(AutogradContext* ctx, const Tensor& planes, const Tensor& index, int64_t space) {
    ctx->save_for_backward({index});
    ctx->saved_data["sizes"] = planes.sym_sizes().slice(planes.dim() - space).vec();
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("shardtensor::picked", "")
                               .typed<Tensor(const Tensor&, const Tensor&, int64_t)>();
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(planes, index, space);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto sizes = ctx->saved_data["sizes"].toSymIntVector();
    const auto index = ctx->get_saved_variables()[0];
    return {added_at(beside(grads[0], index), index, sizes), Tensor(), Tensor()};
  }
};

Tensor picked(const Tensor& planes, const Tensor& index, int64_t space) {
  return GatherPlanes::apply(planes, index, space);
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
  return ScatterPlanes::apply(self, indices, int64_t{2}, [&] { return at::_ops::max_unpool2d::call(self, indices, size); });
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
  return ScatterPlanes::apply(
      self, indices, int64_t{3}, [&] { return at::_ops::max_unpool3d::call(self, indices, size, stride, padding); });
}

} // namespace

const Formula formulas::max_unpool2d = formula<&shardtensor::max_unpool2d>;
const Formula formulas::max_unpool3d = formula<&shardtensor::max_unpool3d>;

} // namespace shardtensor
