// Second derivatives of ops that read through windows. torch's formulas gather along cut dims, or give the zero gradient of an
// operand of which only the sizes are read as a plain tensor. Uses dispatch/plain, tensor/. Registers itself at
// AutogradPrivateUse2.
#include "dispatch/plain.h"
#include "tensor/shard_tensor.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/ops/convolution_backward_ops.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <utility>

namespace shardtensor {

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Values = std::vector<c10::IValue>;

// Whether our formula is for this call: something of it is differentiated again, none of it in forward mode.
bool is_differentiated(std::initializer_list<const Tensor*> tensors) {
  bool tracked = false, ours = false;
  for (const auto* t : tensors) {
    if (t->defined()) {
      if (has_tangent(*t) || wants_entrance(*t)) {
        return false;
      }
      tracked = tracked || t->requires_grad();
      ours = ours || as_shard_tensor(*t);
    }
  }
  return tracked && ours && at::GradMode::is_enabled();
}

// ---- gradients of pools and paddings, (grad_output, self, arguments, perhaps indices): linear in the first, and of the second
// only the sizes are read ----

struct Formula {
  const char *backward, *forward; // the derivative with respect to grad_output is the forward op
  enum class With : uint8_t { Arguments, Sizes, Indices } with = With::Arguments; // what that is called with
  int64_t space = 0;
};

using With = Formula::With;
constexpr std::array kFormulas{
    Formula{"_adaptive_avg_pool2d_backward", "aten::_adaptive_avg_pool2d", With::Sizes, 2},
    Formula{"_adaptive_avg_pool3d_backward", "aten::_adaptive_avg_pool3d", With::Sizes, 3},
    Formula{"adaptive_max_pool2d_backward", "shardtensor::picked_by_adaptive_max", With::Indices, 2},
    Formula{"adaptive_max_pool3d_backward", "shardtensor::picked_by_adaptive_max", With::Indices, 3},
    Formula{"avg_pool2d_backward", "aten::avg_pool2d"},
    Formula{"avg_pool3d_backward", "aten::avg_pool3d"},
    Formula{"fractional_max_pool2d_backward", "shardtensor::picked_by_fractional_max", With::Indices, 2},
    Formula{"fractional_max_pool3d_backward", "shardtensor::picked_by_fractional_max", With::Indices, 3},
    Formula{"max_pool2d_with_indices_backward", "shardtensor::picked_by_max", With::Indices, 2},
    Formula{"max_pool3d_with_indices_backward", "shardtensor::picked_by_max", With::Indices, 3},
    Formula{"reflection_pad1d_backward", "aten::reflection_pad1d"},
    Formula{"reflection_pad2d_backward", "aten::reflection_pad2d"},
    Formula{"reflection_pad3d_backward", "aten::reflection_pad3d"},
    Formula{"replication_pad1d_backward", "aten::replication_pad1d"},
    Formula{"replication_pad2d_backward", "aten::replication_pad2d"},
    Formula{"replication_pad3d_backward", "aten::replication_pad3d"},
};

Tensor called(const c10::OperatorHandle& op, Values arguments) {
  op.callBoxed(arguments);
  return arguments[0].toTensor();
}

Tensor called(const std::string& name, Values arguments) {
  return called(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), ""), std::move(arguments));
}

Tensor gradient(const Formula& formula, const Tensor& grad, const Tensor& self, const Values& arguments, const Tensor& indices) {
  Values all{grad, self};
  all.insert(all.end(), arguments.begin(), arguments.end());
  if (indices.defined()) {
    all.emplace_back(indices);
  }
  return called(std::string("aten::") + formula.backward, std::move(all));
}

// The values at the indices that a max pool gave.
struct Picked : torch::autograd::Function<Picked> {
  static Tensor forward(
      AutogradContext* ctx, const Tensor& planes, const Tensor& indices, const Values& arguments, int64_t formula) {
    ctx->save_for_backward({planes, indices});
    ctx->saved_data["arguments"] = c10::ivalue::Tuple::create(arguments);
    ctx->saved_data["formula"] = formula;
    Values all{planes, indices, kFormulas[formula].space};
    all.insert(all.end(), arguments.begin(), arguments.end());
    at::AutoDispatchBelowADInplaceOrView below;
    return called(kFormulas[formula].forward, std::move(all));
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto arguments = ctx->saved_data["arguments"].toTuple()->elements().vec();
    const auto& formula = kFormulas[ctx->saved_data["formula"].toInt()];
    return {gradient(formula, grads[0], saved[0].detach(), arguments, saved[1]), Tensor(), Tensor(), Tensor()};
  }
};

struct Gradient : torch::autograd::Function<Gradient> {
  static Tensor forward(
      AutogradContext* ctx,
      const Tensor& grad,
      const Tensor& self,
      const std::optional<Tensor>& indices,
      const Values& arguments,
      int64_t formula) {
    ctx->save_for_backward({indices.value_or(Tensor()), self});
    ctx->saved_data["arguments"] = c10::ivalue::Tuple::create(arguments);
    ctx->saved_data["formula"] = formula;
    ctx->saved_data["sizes"] = grad.sym_sizes().vec();
    at::AutoDispatchBelowADInplaceOrView below;
    return gradient(kFormulas[formula], grad, self, arguments, indices.value_or(Tensor()));
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto number = ctx->saved_data["formula"].toInt();
    const auto& formula = kFormulas[number];
    const auto arguments = ctx->saved_data["arguments"].toTuple()->elements().vec();
    Tensor out;
    if (formula.with == With::Indices) {
      out = Picked::apply(grads[0], ctx->get_saved_variables()[0], arguments, number);
    } else {
      Values all{grads[0]};
      all.insert(all.end(), arguments.begin(), arguments.end());
      if (formula.with == With::Sizes) {
        const auto sizes = ctx->saved_data["sizes"].toSymIntVector();
        all.emplace_back(c10::SymIntArrayRef(sizes).slice(sizes.size() - formula.space));
      }
      out = called(formula.forward, std::move(all));
    }
    // Zeros as torch has them, but laid out as `self`.
    const auto none = ctx->needs_input_grad(1) ? at::zeros_like(ctx->get_saved_variables()[1]) : Tensor();
    return {out, none, Tensor(), Tensor(), Tensor()};
  }
};

template <size_t number>
void gradient_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  static const auto& ours = installed_op((std::string("aten::") + kFormulas[number].backward).c_str());
  const auto count = op.schema().arguments().size();
  const auto given = torch::jit::last(*stack, count);
  const bool indexed = kFormulas[number].with == With::Indices;
  const auto grad = given[0].toTensor(), self = given[1].toTensor();
  const auto indices = indexed ? std::optional(given.back().toTensor()) : std::nullopt;
  if (!is_differentiated({&grad, &self})) {
    return record(ours, keys, stack);
  }
  const auto rest = given.slice(2, count - 2 - indexed).vec();
  torch::jit::drop(*stack, count);
  stack->emplace_back(Gradient::apply(grad, self, indices, rest, static_cast<int64_t>(number)));
}

// ---- the gradients of a convolution ----

struct Convolution {
  std::vector<c10::SymInt> stride, padding, dilation;
  bool transposed;
  std::vector<c10::SymInt> output_padding;
  c10::SymInt groups;

  Tensor forward(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias = {}) const {
    return at::convolution_symint(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
  }
  std::tuple<Tensor, Tensor, Tensor> gradients(
      const Tensor& grad,
      const Tensor& input,
      const Tensor& weight,
      const at::OptionalSymIntArrayRef& bias_sizes,
      std::array<bool, 3> mask) const {
    return at::convolution_backward_symint(
        grad, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask);
  }

  c10::IValue saved() const {
    return c10::ivalue::Tuple::create(Values{stride, padding, dilation, transposed, output_padding, groups});
  }
  static Convolution of(const c10::IValue& saved) {
    const auto v = saved.toTuple()->elements().vec();
    return {v[0].toSymIntVector(), v[1].toSymIntVector(), v[2].toSymIntVector(),
            v[3].toBool(),         v[4].toSymIntVector(), v[5].toSymInt()};
  }
};

// The Function's outputs are the gradients that are asked for: it takes no undefined ones.
variable_list asked_for(const std::array<Tensor, 3>& gradients, const std::array<bool, 3>& mask) {
  variable_list out;
  for (size_t i = 0; i < mask.size(); ++i) {
    if (mask[i]) {
      out.push_back(gradients[i]);
    }
  }
  return out;
}

template <typename Mask>
std::array<Tensor, 3> in_places(const variable_list& outputs, const Mask& mask) {
  std::array<Tensor, 3> out;
  size_t next = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    if (mask[i]) {
      out[i] = outputs[next++];
    }
  }
  return out;
}

// Each gradient is linear in two of (grad_output, input, weight): its derivatives are convolutions, or their gradients, of the
// same form. torch's formula would take the input's space for channels.
struct ConvolutionGradients : torch::autograd::Function<ConvolutionGradients> {
  static variable_list forward(
      AutogradContext* ctx,
      const Tensor& grad,
      const Tensor& input,
      const Tensor& weight,
      const at::OptionalSymIntArrayRef& bias_sizes,
      const Convolution& call,
      const std::array<bool, 3>& mask) {
    ctx->save_for_backward({grad, input, weight});
    ctx->saved_data["call"] = call.saved();
    ctx->saved_data["mask"] = std::vector<bool>(mask.begin(), mask.end());
    ctx->set_materialize_grads(false); // they would be plain tensors
    at::AutoDispatchBelowADInplaceOrView below;
    auto [to_input, to_weight, to_bias] = call.gradients(grad, input, weight, bias_sizes, mask);
    return asked_for({to_input, to_weight, to_bias}, mask);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto &grad = saved[0], &input = saved[1], &weight = saved[2];
    const auto of = in_places(grads, ctx->saved_data["mask"].toBoolList());
    const auto &of_input = of[0], &of_weight = of[1], &of_bias = of[2];
    const auto call = Convolution::of(ctx->saved_data["call"]);
    Tensor to_grad, to_input, to_weight;
    if (ctx->needs_input_grad(0)) {
      const auto add = [&](const Tensor& t) { to_grad = to_grad.defined() ? to_grad + t : t; };
      if (of_input.defined()) {
        add(call.forward(of_input, weight));
      }
      if (of_weight.defined()) {
        add(call.forward(input, of_weight));
      }
      if (of_bias.defined()) {
        std::vector<int64_t> along_channels(grad.dim() - 1, 1);
        along_channels[0] = -1;
        add(of_bias.view(along_channels).expand_as(grad));
      }
    }
    if (ctx->needs_input_grad(1) && of_weight.defined()) {
      to_input = std::get<0>(call.gradients(grad, input, of_weight, std::nullopt, {true, false, false}));
    }
    if (ctx->needs_input_grad(2) && of_input.defined()) {
      to_weight = std::get<1>(call.gradients(grad, of_input, weight, std::nullopt, {false, true, false}));
    }
    return {to_grad, to_input, to_weight, Tensor(), Tensor(), Tensor()};
  }
};

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    c10::DispatchKeySet keys,
    const Tensor& grad,
    const Tensor& input,
    const Tensor& weight,
    at::OptionalSymIntArrayRef bias_sizes,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool transposed,
    c10::SymIntArrayRef output_padding,
    c10::SymInt groups,
    std::array<bool, 3> mask) {
  if (is_differentiated({&grad, &input, &weight})) {
    const Convolution call{stride.vec(), padding.vec(), dilation.vec(), transposed, output_padding.vec(), groups};
    const auto out = in_places(ConvolutionGradients::apply(grad, input, weight, bias_sizes, call, mask), mask);
    return {out[0], out[1], out[2]};
  }
  static const auto& op = installed_op("aten::convolution_backward");
  torch::jit::Stack stack{grad, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask};
  record(op, keys, &stack);
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor()};
}

template <size_t... numbers>
void register_gradients(torch::Library& m, std::index_sequence<numbers...>) {
  (m.impl(kFormulas[numbers].backward, torch::CppFunction::makeFromBoxedFunction<gradient_kernel<numbers>>()), ...);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse2, m) {
  m.impl("convolution_backward", convolution_backward);
  register_gradients(m, std::make_index_sequence<kFormulas.size()>());
}

} // namespace

} // namespace shardtensor
