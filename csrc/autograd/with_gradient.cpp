#include "autograd/with_gradient.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

namespace shardtensor {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct GradientHolder final : torch::CustomClassHolder {
  GradientHolder(GradientFn f, bool saves_) : gradient(std::move(f)), saves(saves_) {}
  GradientFn gradient;
  bool saves; // otherwise a second backward is allowed without retain_graph
};

struct WithGradient : torch::autograd::Function<WithGradient> {
  static at::Tensor forward(
      AutogradContext* ctx, at::TensorList, const variable_list& saved, const OpFn& op, const GradientFn& gradient) {
    ctx->save_for_backward(saved);
    ctx->saved_data["gradient"] = c10::IValue::make_capsule(c10::make_intrusive<GradientHolder>(gradient, !saved.empty()));
    at::AutoDispatchBelowADInplaceOrView below;
    return op();
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto held = c10::static_intrusive_pointer_cast<GradientHolder>(ctx->saved_data["gradient"].toCapsule());
    auto out = held->gradient(grads[0], held->saves ? ctx->get_saved_variables() : variable_list());
    out.resize(out.size() + 3); // of the other arguments of forward()
    return out;
  }
};

} // namespace

at::Tensor with_gradient(at::TensorList inputs, variable_list saved, const OpFn& op, const GradientFn& gradient) {
  return WithGradient::apply(inputs, saved, op, gradient);
}

} // namespace shardtensor
