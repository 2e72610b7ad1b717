// Autograd for ops that torch itself would decompose, and that a rule takes whole (Options.composite).
// Uses the dispatcher alone: the kernels register themselves at AutogradPrivateUse2 when the module loads.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace shardtensor {

at::Tensor linear(c10::DispatchKeySet keys, const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

at::Tensor matmul(c10::DispatchKeySet keys, const at::Tensor& self, const at::Tensor& other);

at::Tensor max_pool1d(
    const at::Tensor& x,
    at::IntArrayRef kernel_size,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool ceil_mode);

} // namespace shardtensor
