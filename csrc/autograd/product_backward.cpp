// Gradients of max, sort, topk, cummax, cumprod. torch's formulas write into plain zeros, which cannot become ShardTensors.
// Here these backward ops have rules of their own, and this file adds their derivatives. And cumsum along a cut dim, where
// torch's formula flips the whole twice; and prod, where it gathers the whole to look for zeros. Uses dispatch/plain_tensors,
// tensor/.
#include "autograd/make_formula.h"
#include "autograd/with_gradient.h"
#include "comm/tensor_kind.h"
#include "dispatch/plain_tensors.h"
#include "tensor/shard_tensor.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cumsum_ops.h>
#include <ATen/ops/prod_ops.h>
#include <torch/csrc/autograd/autograd.h>

namespace shardtensor {

namespace {

using at::Tensor;
using torch::autograd::variable_list;

// `op` writes a gradient at the indices along dim, or adds it if they may repeat. Its own gradient is read from there.
Tensor scattered_along(const Tensor& grad, const Tensor& indices, int64_t dim, bool squeezed, const OpFn& op) {
  return with_gradient({grad}, {indices}, op, [dim, squeezed](const Tensor& g, const variable_list& saved) -> variable_list {
    const auto read = g.gather(dim, squeezed ? saved[0].unsqueeze(dim) : saved[0]);
    return {squeezed ? read.squeeze(dim) : read};
  });
}

Tensor value_selecting_reduction_backward(
    const Tensor& grad, int64_t dim, const Tensor& indices, c10::SymIntArrayRef sizes, bool keepdim) {
  return scattered_along(grad, indices, dim, !keepdim && !sizes.empty(), [&] {
    return at::value_selecting_reduction_backward_symint(grad, dim, indices, sizes, keepdim);
  });
}

Tensor cummaxmin_backward(const Tensor& grad, const Tensor& input, const Tensor& indices, int64_t dim) {
  return scattered_along(grad, indices, dim, false, [&] { return at::cummaxmin_backward(grad, input, indices, dim); });
}

// The gradient of cumprod as a formula that can be differentiated again, even at zeros: for each element, the weighted sum of
// the products without it. It costs as much work and memory as torch's formula, which writes each element's part into plain
// zeros.
Tensor cumprod_backward_at_zeros(const Tensor& grad, const Tensor& input, int64_t dim) {
  const auto x = input.movedim(dim, -1).unsqueeze(-2), g = grad.movedim(dim, -1).unsqueeze(-2);
  auto sizes = x.sym_sizes().vec();
  sizes[sizes.size() - 2] = sizes.back(); // rows: the element that is left out; columns: the product
  const auto all = x.expand_symint(sizes);
  const auto counted = at::ones_like(all.detach(), all.options().dtype(at::kBool)).triu();
  const auto others = all.masked_fill(counted.tril(), 1).cumprod(-1).conj();
  return others.mul(g).masked_fill(counted.logical_not(), 0).sum(-1, false, grad.scalar_type()).movedim(-1, dim);
}

// For second derivatives, uses torch's own composition unless there is a zero.
Tensor cumprod_backward(const Op& ours, const Tensor& grad, const Tensor& input, int64_t dim, const Tensor& output) {
  if (at::GradMode::is_enabled() && (grad.requires_grad() || input.requires_grad())) {
    const auto* impl = as_shard_tensor(input);
    if (impl && input.dim() > 0 && !is_traced(impl->local()) && input.detach().eq(0).any().item<bool>()) {
      return cumprod_backward_at_zeros(grad, input, dim);
    }
    static const auto op = ours.handle.typed<Tensor(const Tensor&, const Tensor&, int64_t, const Tensor&)>();
    return op.redispatch(c10::DispatchKeySet(c10::DispatchKey::CompositeImplicitAutograd), grad, input, dim, output);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return at::cumprod_backward(grad, input, dim, output);
}

// Sums of each index and all before it, or (`after`) all after it. Each is the other's gradient.
Tensor running_sum(const Tensor& t, int64_t dim, std::optional<at::ScalarType> dtype, bool after) {
  static const auto suffix_sum = own_op<Tensor(const Tensor&, int64_t)>("shardtensor::suffix_sum");
  return with_gradient(
      {t}, {}, [&] { return after ? suffix_sum.call(t, dim) : at::cumsum(t, dim, dtype); },
      [dim, after, type = t.scalar_type()](const Tensor& grad, const variable_list&) -> variable_list {
        return {running_sum(grad.to(type), dim, std::nullopt, !after)};
      });
}

Tensor cumsum(c10::DispatchKeySet keys, const Tensor& self, int64_t dim, std::optional<at::ScalarType> dtype) {
  const auto* impl = as_shard_tensor(self);
  const auto d = dim < 0 ? dim + self.dim() : dim;
  const bool cut = impl && d >= 0 && d < self.dim() && impl->layout().shards(d);
  if (!cut || has_tangent(self) || !self.requires_grad() || !at::GradMode::is_enabled()) {
    return at::_ops::cumsum::redispatch(torchs_autograd(keys), self, dim, dtype);
  }
  return running_sum(self, d, dtype, false);
}

// A product along a dim, or of all elements.
Tensor product(const Tensor& t, std::optional<int64_t> dim, bool keepdim) {
  return dim ? t.prod(*dim, keepdim) : t.prod();
}

// Each element's gradient is the product of the others; if one element is zero, only its own gradient is not zero. Second
// derivatives use torch's formula.
Tensor product_backward(const Tensor& given, const Tensor& self, std::optional<int64_t> dim, bool keepdim) {
  if (at::GradMode::is_enabled()) {
    const c10::DispatchKeySet keys({c10::DispatchKey::AutogradOther, kKey});
    const auto out = dim ? at::_ops::prod_dim_int::redispatch(keys, self, *dim, keepdim, std::nullopt)
                         : at::_ops::prod::redispatch(keys, self, std::nullopt);
    return torch::autograd::grad({out}, {self}, {given}, /*retain_graph=*/true, /*create_graph=*/true)[0];
  }
  const auto grad = dim && !keepdim && self.dim() > 0 ? given.unsqueeze(*dim) : given;
  const auto zero = self.eq(0);
  const auto zeros = dim ? zero.sum(*dim, true) : zero.sum();
  const auto shown = self.masked_fill(zero, 1);
  const auto counts = at::where(zero, zeros.eq(1), zeros.eq(0)).to(self.scalar_type());
  return grad.mul(product(shown, dim, true).conj()).div(shown.conj()).mul(counts);
}

Tensor product_with_gradient(const Tensor& self, std::optional<int64_t> dim, bool keepdim) {
  return with_gradient(
      {self}, {self}, [&] { return product(self, dim, keepdim); },
      [dim, keepdim](const Tensor& grad, const variable_list& saved) -> variable_list {
        return {product_backward(grad, saved[0], dim, keepdim)};
      });
}

// Whether product_backward() computes prod's gradient. A cast before the product has a gradient of its own.
bool has_own_product(const Tensor& self, std::optional<at::ScalarType> dtype) {
  return as_shard_tensor(self) && self.requires_grad() && at::GradMode::is_enabled() && !has_tangent(self) &&
         (!dtype || dtype == self.scalar_type());
}

Tensor prod(c10::DispatchKeySet keys, const Tensor& self, std::optional<at::ScalarType> dtype) {
  return has_own_product(self, dtype) ? product_with_gradient(self, std::nullopt, false)
                                      : at::_ops::prod::redispatch(torchs_autograd(keys), self, dtype);
}

Tensor prod_dim(c10::DispatchKeySet keys, const Tensor& self, int64_t dim, bool keepdim, std::optional<at::ScalarType> dtype) {
  return has_own_product(self, dtype) ? product_with_gradient(self, dim, keepdim)
                                      : at::_ops::prod_dim_int::redispatch(torchs_autograd(keys), self, dim, keepdim, dtype);
}

} // namespace

const Formula formulas::cummaxmin_backward = formula<&shardtensor::cummaxmin_backward>;
const Formula formulas::cumprod_backward = formula<&shardtensor::cumprod_backward>;
const Formula formulas::cumsum = formula<&shardtensor::cumsum>;
const Formula formulas::prod = formula<&shardtensor::prod>;
const Formula formulas::prod_dim = formula<&shardtensor::prod_dim>;
const Formula formulas::value_selecting_reduction_backward = formula<&shardtensor::value_selecting_reduction_backward>;

} // namespace shardtensor
