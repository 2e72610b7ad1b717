// Second derivatives of ops that read through windows. torch's formulas gather along cut dims, or give the zero gradient of an
// operand of which only the sizes are read as a plain tensor. Uses dispatch/plain_tensors, tensor/.
#include "autograd/make_formula.h"
#include "autograd/with_gradient.h"
#include "dispatch/plain_tensors.h"
#include "tensor/shard_tensor.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/ops/convolution_backward_ops.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <utility>

namespace shardtensor {

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using IValues = std::vector<c10::IValue>;

// True if our formula applies: an input requires grad and none has a forward-mode tangent.
bool is_differentiated(std::initializer_list<const Tensor*> tensors) {
  bool tracked = false, ours = false;
  for (const auto* t : tensors) {
    if (t->defined()) {
      if (has_tangent(*t) || needs_promotion(*t)) {
        return false;
      }
      tracked = tracked || t->requires_grad();
      ours = ours || as_shard_tensor(*t);
    }
  }
  return tracked && ours && at::GradMode::is_enabled();
}

// ---- gradients of pools and paddings, (grad_output, self, arguments, maybe indices): linear in the first; only the sizes of
// the second are read ----

// Such an op, by its name: "aten::avg_pool2d_backward". The derivative with respect to grad_output is the op `forward`, or picks
// the values at the indices.
struct BackwardOp {
  explicit BackwardOp(std::string name_) : name(std::move(name_)), forward(name.substr(0, name.rfind("_backward"))) {}

  int64_t space() const {
    return name[name.find_first_of("123")] - '0';
  }
  std::string picked_by() const { // "adaptive_max"
    constexpr size_t after = 6;   // "aten::"
    return "shardtensor::picked_by_" + name.substr(after, name.find("_pool") - after);
  }

  std::string name, forward;
};

Tensor called(const c10::OperatorHandle& op, IValues arguments) {
  op.callBoxed(arguments);
  return arguments[0].toTensor();
}

Tensor called(const std::string& name, IValues arguments) {
  return called(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), ""), std::move(arguments));
}

Tensor gradient(const BackwardOp& op, const Tensor& grad, const Tensor& self, const IValues& arguments, const Tensor& indices) {
  IValues all{grad, self};
  all.insert(all.end(), arguments.begin(), arguments.end());
  if (indices.defined()) {
    all.emplace_back(indices);
  }
  return called(op.name, std::move(all));
}

// The values at the indices that a max pool gave.
Tensor picked_by_pool(const BackwardOp& op, const Tensor& planes, const Tensor& indices, const IValues& arguments) {
  const auto pick = [&] {
    IValues all{planes, indices, op.space()};
    all.insert(all.end(), arguments.begin(), arguments.end());
    return called(op.picked_by(), std::move(all));
  };
  return with_gradient(
      {planes}, {planes, indices}, pick, [op, arguments](const Tensor& grad, const variable_list& saved) -> variable_list {
        return {gradient(op, grad, saved[0].detach(), arguments, saved[1])};
      });
}

Tensor gradient_with_gradient(
    const BackwardOp& op, const Tensor& given, const Tensor& self, const IValues& arguments, const Tensor& indices) {
  const auto second = [op, arguments, sizes = given.sym_sizes().vec(), more = self.requires_grad()](
                          const Tensor& grad, const variable_list& saved) -> variable_list {
    const auto none = more ? at::zeros_like(saved[1]) : Tensor(); // zeros as in torch, but in the layout of `self`
    if (saved[0].defined()) {
      return {picked_by_pool(op, grad, saved[0], arguments), none};
    }
    IValues all{grad};
    all.insert(all.end(), arguments.begin(), arguments.end());
    if (arguments.empty()) { // an adaptive pool, called with its result's sizes
      all.emplace_back(c10::SymIntArrayRef(sizes).slice(sizes.size() - op.space()));
    }
    return {called(op.forward, std::move(all)), none};
  };
  return with_gradient(
      {given, self}, {indices, self}, [&] { return gradient(op, given, self, arguments, indices); }, second);
}

void through_windows(const Op& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& parameters = op.schema().arguments();
  const auto given = torch::jit::last(*stack, parameters.size());
  const bool indexed = parameters.back().name() == "indices";
  const auto grad = given[0].toTensor(), self = given[1].toTensor();
  const auto indices = indexed ? given.back().toTensor() : Tensor();
  if (!is_differentiated({&grad, &self})) {
    return record(op, keys, stack);
  }
  const auto rest = given.slice(2, parameters.size() - 2 - indexed).vec();
  torch::jit::drop(*stack, parameters.size());
  stack->emplace_back(gradient_with_gradient(BackwardOp(op.name), grad, self, rest, indices));
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
    return c10::ivalue::Tuple::create(IValues{stride, padding, dilation, transposed, output_padding, groups});
  }
  static Convolution of(const c10::IValue& saved) {
    const auto v = saved.toTuple()->elements().vec();
    return {v[0].toSymIntVector(), v[1].toSymIntVector(), v[2].toSymIntVector(),
            v[3].toBool(),         v[4].toSymIntVector(), v[5].toSymInt()};
  }
};

// The gradients that are needed: the outputs of a Function must not be undefined.
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
// same form. torch's formula would treat the input's space as channels.
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
    const Op& op,
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
  torch::jit::Stack stack{grad, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask};
  record(op, keys, &stack);
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor()};
}

} // namespace

const Formula formulas::convolution_backward = formula<&shardtensor::convolution_backward>;
const Formula formulas::through_windows = formula<&shardtensor::through_windows>;

} // namespace shardtensor
