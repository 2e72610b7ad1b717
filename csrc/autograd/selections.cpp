// Gradients of max, sort, topk, cummax, cumprod. torch's formulas write into plain zeros, which cannot become ShardTensors.
// Here these backward ops have rules of their own, and this file adds their derivatives. And cumsum along a cut dim, where
// torch's formula flips the whole twice. Uses dispatch/plain, tensor/. Registers itself.
#include "dispatch/plain.h"
#include "tensor/shard_tensor.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cumsum_ops.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace shardtensor {

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Writes grad at the indices along dim. Its own gradient is read from there.
struct Select : torch::autograd::Function<Select> {
  static Tensor forward(
      AutogradContext* ctx,
      const Tensor& grad,
      int64_t dim,
      const Tensor& indices,
      const std::vector<c10::SymInt>& sizes,
      bool keepdim) {
    ctx->save_for_backward({indices});
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["squeezed"] = !keepdim && !sizes.empty();
    at::AutoDispatchBelowADInplaceOrView below;
    return at::value_selecting_reduction_backward_symint(grad, dim, indices, sizes, keepdim);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto dim = ctx->saved_data["dim"].toInt();
    const bool squeezed = ctx->saved_data["squeezed"].toBool();
    const auto indices = ctx->get_saved_variables()[0];
    auto grad = grads[0].gather(dim, squeezed ? indices.unsqueeze(dim) : indices);
    return {squeezed ? grad.squeeze(dim) : grad, Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

Tensor value_selecting_reduction_backward(
    const Tensor& grad, int64_t dim, const Tensor& indices, c10::SymIntArrayRef sizes, bool keepdim) {
  return Select::apply(grad, dim, indices, sizes.vec(), keepdim);
}

// The same if indices may repeat: values are added.
struct ScatterAdd : torch::autograd::Function<ScatterAdd> {
  static Tensor forward(AutogradContext* ctx, const Tensor& grad, const Tensor& input, const Tensor& indices, int64_t dim) {
    ctx->save_for_backward({indices});
    ctx->saved_data["dim"] = dim;
    at::AutoDispatchBelowADInplaceOrView below;
    return at::cummaxmin_backward(grad, input, indices, dim);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    auto grad = grads[0].gather(ctx->saved_data["dim"].toInt(), ctx->get_saved_variables()[0]);
    return {grad, Tensor(), Tensor(), Tensor()};
  }
};

Tensor cummaxmin_backward(const Tensor& grad, const Tensor& input, const Tensor& indices, int64_t dim) {
  return ScatterAdd::apply(grad, input, indices, dim);
}

// For second derivatives, uses torch's own composition.
Tensor cumprod_backward(const Tensor& grad, const Tensor& input, int64_t dim, const Tensor& output) {
  if (at::GradMode::is_enabled() && (grad.requires_grad() || input.requires_grad())) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("aten::cumprod_backward", "")
                               .typed<Tensor(const Tensor&, const Tensor&, int64_t, const Tensor&)>();
    return op.redispatch(c10::DispatchKeySet(c10::DispatchKey::CompositeImplicitAutograd), grad, input, dim, output);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return at::cumprod_backward(grad, input, dim, output);
}

// Sums of each index and all before it, or (`after`) all after it. Each is the other's gradient.
struct RunningSum : torch::autograd::Function<RunningSum> {
  static Tensor forward(AutogradContext* ctx, const Tensor& t, int64_t dim, std::optional<at::ScalarType> dtype, bool after) {
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["dtype"] = static_cast<int64_t>(t.scalar_type());
    ctx->saved_data["after"] = after;
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("shardtensor::suffix_sum", "").typed<Tensor(const Tensor&, int64_t)>();
    at::AutoDispatchBelowADInplaceOrView below;
    return after ? op.call(t, dim) : at::cumsum(t, dim, dtype);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto grad = grads[0].to(static_cast<at::ScalarType>(ctx->saved_data["dtype"].toInt()));
    const bool after = ctx->saved_data["after"].toBool();
    return {apply(grad, ctx->saved_data["dim"].toInt(), std::nullopt, !after), Tensor(), Tensor(), Tensor()};
  }
};

Tensor cumsum(c10::DispatchKeySet keys, const Tensor& self, int64_t dim, std::optional<at::ScalarType> dtype) {
  const auto* impl = as_shard_tensor(self);
  const auto d = dim < 0 ? dim + self.dim() : dim;
  const bool cut = impl && d >= 0 && d < self.dim() && impl->layout().shards(d);
  if (!cut || has_tangent(self) || !self.requires_grad() || !at::GradMode::is_enabled()) {
    return at::_ops::cumsum::redispatch(torchs_autograd(keys), self, dim, dtype);
  }
  return RunningSum::apply(self, d, dtype, false);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse2, m) {
  m.impl("cumsum", cumsum);
  m.impl("cummaxmin_backward", cummaxmin_backward);
  m.impl("cumprod_backward", cumprod_backward);
  m.impl("value_selecting_reduction_backward", value_selecting_reduction_backward);
}

} // namespace

} // namespace shardtensor
