// Elementwise ops: every dim is a factor of its own, broadcast dims stay whole.
// To add one, put its name into the table of its kind; add_forms adds the in-place and out= forms.
#include "rules/exact_dtypes.h"
#include "rules/kernel_utils.h"
#include "rules/registry.h"
#include "tensor/move.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace shardtensor::rules {

namespace {

// Summands do not pass: f(a + b) is not f(a) + f(b).
constexpr RuleFn pointwise = broadcast;

// x + y holds summands if both do.
Rule linear_jointly(const Call& call) {
  auto rule = broadcast(call);
  rule.linear.push_back(computes(call, OperandSet::first(call.tensors.size()), promoted(call)));
  return rule;
}

Rule sum_of_two(const Call& call) {
  auto rule = broadcast(call);
  rule.linear.push_back(adds(call, OperandSet::first(call.tensors.size()), promoted(call)));
  return rule;
}

// Picked summands can lose a -0.0 in a difference with a zero: -0.0 - -0.0 is 0.0. That is accepted if both sides are sums,
// because they are then reduced once; beside a whole tensor there would be no gain.
Rule difference(const Call& call) {
  auto rule = sum_of_two(call);
  rule.linear[0].adds = std::all_of(
      call.tensors.begin(), call.tensors.end(), [](const TensorArg& t) { return t.output || t.layout->has_partial(); });
  return rule;
}

// x * y is linear in each, the other whole.
Rule linear_in_each(const Call& call) {
  auto rule = broadcast(call);
  rule.linear.push_back(computes(call, 0b01, promoted(call)));
  rule.linear.push_back(computes(call, 0b10, promoted(call)));
  return rule;
}

// -x and 2 * x are also linear for integers that wrap; divisions are not.
Rule linear_in_wrapping(const Call& call) {
  auto rule = broadcast(call);
  rule.linear.push_back(computes(call, 1, promoted(call)));
  return rule;
}

Rule divide(const Call& call) {
  auto rule = broadcast(call);
  if (!(call.tensors[0].layout->has_partial() && (call.kinds_of_numbers() & kZero))) { // 0 / 0 is not a number
    rule.linear_in({0});
  }
  return rule;
}

Rule where(const Call& call) {
  auto rule = broadcast(call);
  rule.linear.push_back(moves(call, with_outputs(call, 0b110), promoted(call, 0b110)));
  return rule;
}

Rule addcmul(const Call& call) {
  auto rule = broadcast(call);
  rule.linear.push_back(computes(call, with_outputs(call, 0b011), promoted(call)));
  rule.linear.push_back(computes(call, with_outputs(call, 0b101), promoted(call)));
  return rule;
}

// a * b + c, to which dynamo turns addcmul and add if their number is a tensor.
Rule fma(const Call& call) {
  auto rule = broadcast(call);
  rule.linear.push_back(computes(call, 0b101, promoted(call)));
  rule.linear.push_back(computes(call, 0b110, promoted(call)));
  return rule;
}

// addcdiv is linear in self and the dividend together, lerp in start and end; the third is whole.
Rule linear_in_two(const Call& call) {
  auto rule = broadcast(call);
  rule.jointly_linear(with_outputs(call, 0b011));
  return rule;
}

template <ReduceOp op>
Rule commutes_with(const Call& call) {
  auto rule = broadcast(call);
  auto group = moves(call, OperandSet::first(call.tensors.size()), promoted(call));
  group.reductions = group.any_reduction ? bit(op) : group.reductions & bit(op);
  group.any_reduction = group.moves = false;
  rule.linear.push_back(std::move(group));
  return rule;
}

// On the CPU the buffer has the input's sizes; on other devices it is empty.
Rule log_sigmoid(const Call& call) {
  if (call.mesh.description().device_type == "cpu") {
    return broadcast(call);
  }
  const bool backward = call.tensors.size() > 1;
  auto rule = broadcast(call, backward ? 2 : 1);
  if (backward) {
    rule.operands.emplace_back(Dims(call.tensors[2].dim(), Dim(kNone)));
  } else {
    rule.results[1] = {};
    rule.results[1].same_over = ~uint64_t{0};
  }
  return rule;
}

// One half of a dim gates the other, so the dim stays whole. The gradient, if there is one, is the first operand.
Rule glu(const Call& call) {
  Rule rule;
  const auto n = call.tensors[0].dim();
  auto dims = dims_beside(rule, n, call.dim(call.position("dim"), n));
  for (const auto& t : call.tensors) {
    rule.operands.emplace_back(Dims(dims.begin(), dims.begin() + t.dim()));
  }
  rule.results.emplace_back(std::move(dims));
  return rule;
}

// The layout of half of a dim whose whole is cut along one mesh dim: in the same proportions. Along several: evenly.
LayoutPtr of_half(const Layout& whole, int64_t dim, int64_t size) {
  auto placements = whole.placements();
  auto cuts = whole.cuts();
  int64_t along = -1, count = 0;
  for (int64_t m = 0; m < whole.ndim(); ++m) {
    if (placements[m].is_shard() && placements[m].dim == dim) {
      placements[m] = Placement::shard(dim);
      cuts[m] = nullptr;
      along = m;
      ++count;
    }
  }
  if (count == 1 && whole.placement(along).split_factor == 1) {
    std::vector<int64_t> sizes;
    auto at = whole.mesh().coordinate();
    for (at[along] = 0; at[along] < whole.mesh().size(along); ++at[along]) {
      const auto run = whole.intervals(dim, size, at)[0];
      sizes.push_back((run.end()) / 2 - run.start / 2);
    }
    cuts[along] = std::make_shared<const PieceSizes>(std::move(sizes));
  }
  return Layout::make(whole.mesh_ptr(), std::move(placements), std::move(cuts));
}

// Both halves of a cut dim are cut alike, so that they are on the same ranks.
struct Halves {
  int64_t dim;
  LayoutPtr layout;
  std::vector<at::Tensor> parts;
};
std::optional<Halves> halves_of(const at::Tensor& self, int64_t given) {
  const auto* impl = as_shard_tensor(self);
  const auto dim = given < 0 ? given + self.dim() : given;
  if (!impl || dim < 0 || dim >= self.dim() || !impl->layout().shards(dim)) {
    return std::nullopt;
  }
  const auto size = self.sym_size(dim).guard_int(__FILE__, __LINE__); // in a graph: a number
  if (size % 2) {
    return std::nullopt;
  }
  return Halves{
      dim, of_half(impl->layout(), dim, size), {at::slice(self, dim, 0, size / 2), at::slice(self, dim, size / 2, size)}};
}

constexpr const char* kHalves = "both halves of it are cut alike";

std::optional<at::Tensor> glu_as_calls(c10::ArrayRef<c10::IValue> arguments) {
  const auto halves = halves_of(arguments[0].toTensor(), arguments[1].toInt());
  if (!halves) {
    return std::nullopt;
  }
  const auto& [dim, layout, parts] = *halves;
  const auto both = moved(parts, {layout, layout}, MoveCause{"aten::glu", "self", kHalves});
  return at::squeeze_copy(at::glu(at::stack(both, dim), dim), dim); // not a view, as torch's
}

// (gradient, self, dim)
std::optional<at::Tensor> glu_backward_as_calls(c10::ArrayRef<c10::IValue> arguments) {
  const auto& grad = arguments[0].toTensor();
  const auto halves = as_shard_tensor(grad) ? halves_of(arguments[1].toTensor(), arguments[2].toInt()) : std::nullopt;
  if (!halves) {
    return std::nullopt;
  }
  const auto& [dim, layout, parts] = *halves;
  constexpr MoveCause cause{"aten::glu_backward", "self", kHalves};
  const auto there = moved({parts[0], parts[1], grad}, {layout, layout, layout}, cause);
  const auto grads = at::glu_backward(there[2].unsqueeze(dim), at::stack({there[0], there[1]}, dim), dim);
  const std::vector<LayoutPtr> homes{as_shard_tensor(parts[0])->layout_ptr(), as_shard_tensor(parts[1])->layout_ptr()};
  return at::cat(moved({grads.select(dim, 0), grads.select(dim, 1)}, homes, cause), dim);
}

} // namespace

void register_pointwise(Registry& r) {
  const Options o{.symbols = true, .broadcasts = true};
  const Options with_zeros{.autograd = formulas::with_zeros, .symbols = true, .broadcasts = true};
  // In-place forms with formulas of their own come before add_forms(), which keeps what is there.
  r.add("pointwise", {"add_.Tensor"}, sum_of_two, {.autograd = formulas::add_, .symbols = true, .broadcasts = true});
  r.add(
      "pointwise",
      {"eq_.Scalar", "eq_.Tensor", "ge_.Scalar", "ge_.Tensor", "gt_.Scalar", "gt_.Tensor", "le_.Scalar", "le_.Tensor",
       "lt_.Scalar", "lt_.Tensor", "ne_.Scalar", "ne_.Tensor"},
      pointwise, with_zeros);
  r.add_forms("pointwise", {"copysign.Scalar", "copysign.Tensor", "nextafter", "sgn"}, pointwise, with_zeros);
  r.add_forms(
      "pointwise",
      {
          "abs",
          "acos",
          "acosh",
          "angle",
          "asin",
          "asinh",
          "atan",
          "atan2",
          "atanh",
          "bitwise_and.Scalar",
          "bitwise_and.Scalar_Tensor",
          "bitwise_and.Tensor",
          "bitwise_left_shift.Scalar_Tensor",
          "bitwise_left_shift.Tensor",
          "bitwise_left_shift.Tensor_Scalar",
          "bitwise_not",
          "bitwise_or.Scalar",
          "bitwise_or.Scalar_Tensor",
          "bitwise_or.Tensor",
          "bitwise_right_shift.Scalar_Tensor",
          "bitwise_right_shift.Tensor",
          "bitwise_right_shift.Tensor_Scalar",
          "bitwise_xor.Scalar",
          "bitwise_xor.Scalar_Tensor",
          "bitwise_xor.Tensor",
          "ceil",
          "celu",
          "clamp",
          "clamp.Tensor",
          "clamp_max",
          "clamp_max.Tensor",
          "clamp_min",
          "clamp_min.Tensor",
          "complex",
          "cos",
          "cosh",
          "digamma",
          "div.Scalar_mode",
          "div.Tensor_mode",
          "elu",
          "eq.Scalar",
          "eq.Tensor",
          "erf",
          "erfc",
          "erfinv",
          "exp",
          "exp2",
          "expm1",
          "floor",
          "floor_divide",
          "floor_divide.Scalar",
          "floor_divide_.Tensor",
          "fmax",
          "fmin",
          "fmod.Scalar",
          "fmod.Tensor",
          "frac",
          "frexp.Tensor",
          "gcd",
          "ge.Scalar",
          "ge.Tensor",
          "gelu",
          "gt.Scalar",
          "gt.Tensor",
          "hardshrink",
          "hardsigmoid",
          "hardswish",
          "hardtanh",
          "heaviside",
          "hypot",
          "i0",
          "igamma",
          "igammac",
          "isinf",
          "isnan",
          "isneginf",
          "isposinf",
          "lcm",
          "ldexp.Tensor",
          "le.Scalar",
          "le.Tensor",
          "leaky_relu",
          "lgamma",
          "log",
          "log10",
          "log1p",
          "log2",
          "logaddexp",
          "logaddexp2",
          "logical_and",
          "logical_not",
          "logical_or",
          "logical_xor",
          "logit",
          "lt.Scalar",
          "lt.Tensor",
          "mish",
          "mvlgamma",
          "nan_to_num",
          "ne.Scalar",
          "ne.Tensor",
          "polar",
          "polygamma",
          "pow.Scalar",
          "pow.Tensor_Scalar",
          "pow.Tensor_Tensor",
          "reciprocal",
          "relu",
          "relu6",
          "remainder.Scalar",
          "remainder.Scalar_Tensor",
          "remainder.Tensor",
          "round",
          "round.decimals",
          "rsqrt",
          "rsub.Scalar",
          "sigmoid",
          "sign",
          "signbit",
          "silu",
          "sin",
          "sinc",
          "sinh",
          "softplus",
          "softshrink",
          "add.Scalar",
          "sub.Scalar",
          "special_airy_ai",
          "special_bessel_j0",
          "special_bessel_j1",
          "special_bessel_y0",
          "special_bessel_y1",
          "special_chebyshev_polynomial_t",
          "special_chebyshev_polynomial_t.n_scalar",
          "special_chebyshev_polynomial_t.x_scalar",
          "special_chebyshev_polynomial_u",
          "special_chebyshev_polynomial_u.n_scalar",
          "special_chebyshev_polynomial_u.x_scalar",
          "special_chebyshev_polynomial_v",
          "special_chebyshev_polynomial_v.n_scalar",
          "special_chebyshev_polynomial_v.x_scalar",
          "special_chebyshev_polynomial_w",
          "special_chebyshev_polynomial_w.n_scalar",
          "special_chebyshev_polynomial_w.x_scalar",
          "special_entr",
          "special_erfcx",
          "special_hermite_polynomial_h",
          "special_hermite_polynomial_h.n_scalar",
          "special_hermite_polynomial_h.x_scalar",
          "special_hermite_polynomial_he",
          "special_hermite_polynomial_he.n_scalar",
          "special_hermite_polynomial_he.x_scalar",
          "special_i0e",
          "special_i1",
          "special_i1e",
          "special_laguerre_polynomial_l",
          "special_laguerre_polynomial_l.n_scalar",
          "special_laguerre_polynomial_l.x_scalar",
          "special_legendre_polynomial_p",
          "special_legendre_polynomial_p.n_scalar",
          "special_legendre_polynomial_p.x_scalar",
          "special_log_ndtr",
          "special_modified_bessel_i0",
          "special_modified_bessel_i1",
          "special_modified_bessel_k0",
          "special_modified_bessel_k1",
          "special_ndtri",
          "special_scaled_modified_bessel_k0",
          "special_scaled_modified_bessel_k1",
          "special_shifted_chebyshev_polynomial_t",
          "special_shifted_chebyshev_polynomial_t.n_scalar",
          "special_shifted_chebyshev_polynomial_t.x_scalar",
          "special_shifted_chebyshev_polynomial_u",
          "special_shifted_chebyshev_polynomial_u.n_scalar",
          "special_shifted_chebyshev_polynomial_u.x_scalar",
          "special_shifted_chebyshev_polynomial_v",
          "special_shifted_chebyshev_polynomial_v.n_scalar",
          "special_shifted_chebyshev_polynomial_v.x_scalar",
          "special_shifted_chebyshev_polynomial_w",
          "special_shifted_chebyshev_polynomial_w.n_scalar",
          "special_shifted_chebyshev_polynomial_w.x_scalar",
          "special_spherical_bessel_j0",
          "special_xlog1py",
          "special_xlog1py.other_scalar",
          "special_xlog1py.self_scalar",
          "special_zeta",
          "special_zeta.other_scalar",
          "special_zeta.self_scalar",
          "sqrt",
          "square",
          "tan",
          "tanh",
          "threshold",
          "trunc",
          "xlogy.Scalar_Other",
          "xlogy.Scalar_Self",
          "xlogy.Tensor",
          "xlogy.OutTensor",
      },
      pointwise, o);
  r.add(
      "pointwise",
      {"__ilshift__.Scalar", "__ilshift__.Tensor", "__irshift__.Scalar", "__irshift__.Tensor", "__lshift__.Scalar",
       "__lshift__.Tensor", "__rshift__.Scalar", "__rshift__.Tensor", "xlogy.OutScalar_Other", "xlogy.OutScalar_Self",
       "log_sigmoid_forward.output", "clamp.Minmax"},
      pointwise, o);

  r.add_forms("pointwise", {"_conj_physical", "conj_physical", "mul.Scalar", "neg", "positive"}, linear_in_wrapping, o);
  r.add_forms("pointwise", {"deg2rad", "rad2deg"}, linear_in_first<broadcast>, o);
  r.add_forms("pointwise", {"div.Scalar", "div.Tensor"}, divide, o);
  r.add(
      "pointwise",
      {"elu_backward", "gelu_backward", "hardshrink_backward", "hardsigmoid_backward", "hardswish_backward", "hardtanh_backward",
       "leaky_relu_backward", "logit_backward", "mish_backward", "native_dropout_backward", "sigmoid_backward", "silu_backward",
       "softplus_backward", "softshrink_backward", "tanh_backward", "threshold_backward"},
      linear_in_first<broadcast>, o);
  r.add(
      "pointwise",
      {"elu_backward.grad_input", "gelu_backward.grad_input", "hardshrink_backward.grad_input", "hardsigmoid_backward.grad_input",
       "hardtanh_backward.grad_input", "leaky_relu_backward.grad_input", "log_sigmoid_backward.grad_input",
       "logit_backward.grad_input", "sigmoid_backward.grad_input", "silu_backward.grad_input", "softplus_backward.grad_input",
       "softshrink_backward.grad_input", "tanh_backward.grad_input", "threshold_backward.grad_input"},
      pointwise, o);

  Options same_each_time = o;
  same_each_time.repeats = true;
  r.add_forms("pointwise", {"masked_fill.Scalar", "masked_fill.Tensor"}, pointwise, same_each_time);
  r.add("pointwise", {"_prelu_kernel", "_prelu_kernel_backward"}, pointwise, o);
  r.add("pointwise", {"log_sigmoid_forward"}, log_sigmoid);
  r.add("pointwise", {"log_sigmoid_backward"}, linear_in_first<log_sigmoid>);
  r.add("pointwise", {"glu"}, glu, {.calls = glu_as_calls});
  r.add("pointwise", {"glu_backward"}, linear_in_first<glu>, {.calls = glu_backward_as_calls});
  r.add_forms("pointwise", {"add.Tensor"}, sum_of_two, o);
  r.add_forms("pointwise", {"sub.Tensor", "rsub.Tensor"}, difference, o);
  r.add_forms("pointwise", {"lerp.Scalar"}, linear_jointly, o);
  r.add_forms("pointwise", {"mul.Tensor"}, linear_in_each, o);
  r.add_forms("pointwise", {"lerp.Tensor"}, linear_in_two, o);
  r.add_forms("pointwise", {"addcmul"}, addcmul, o);
  r.add("pointwise", {"prims::fma"}, fma, o);
  r.add_forms("pointwise", {"addcdiv"}, linear_in_two, o);
  r.add_forms("pointwise", {"where.self"}, where, o);
  r.add_forms("pointwise", {"maximum"}, commutes_with<ReduceOp::Max>, o);
  r.add_forms("pointwise", {"minimum"}, commutes_with<ReduceOp::Min>, o);
}

} // namespace shardtensor::rules
