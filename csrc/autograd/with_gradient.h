// Ops with a gradient of our own, written as two functions. Uses torch's custom functions.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>

namespace shardtensor {

using OpFn = std::function<at::Tensor()>;
// From the gradient of an op's result, and the tensors that were saved, to the gradients of its inputs.
using GradientFn =
    std::function<torch::autograd::variable_list(const at::Tensor& grad, const torch::autograd::variable_list& saved)>;

// The result of `op`, which runs below autograd. `gradient` captures the numbers that it needs; tensors have to be `saved`, so
// that they are freed after the backward, and writes to them are noticed.
at::Tensor with_gradient(at::TensorList inputs, torch::autograd::variable_list saved, const OpFn& op, const GradientFn& gradient);

// One of our own ops: "shardtensor::shifted".
template <typename Signature>
c10::TypedOperatorHandle<Signature> own_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

} // namespace shardtensor
