// foreach and fused optimizer ops: lists of tensors, each index an elementwise op of its own, resolved by the rule of that op.
// dispatch/lists.cpp runs them: one call on the lists of local tensors.
#include "rules/registry.h"

#include <ATen/ATen.h>

#include <array>
#include <limits>
#include <string>

namespace shardtensor::rules {

namespace {

struct Family {
  const char* name; // _foreach_<name>
  const char* like; // the op whose rule holds for each index
};

constexpr Family kFamilies[] = {
    {"abs", "abs"},
    {"acos", "acos"},
    {"add", "add.Tensor"},
    {"addcdiv", "addcdiv"},
    {"addcmul", "addcmul"},
    {"asin", "asin"},
    {"atan", "atan"},
    {"ceil", "ceil"},
    {"clamp_max", "clamp_max"},
    {"clamp_min", "clamp_min"},
    {"clone", "clone"},
    {"copy", "copy_"},
    {"cos", "cos"},
    {"cosh", "cosh"},
    {"div", "div.Tensor"},
    {"erf", "erf"},
    {"erfc", "erfc"},
    {"exp", "exp"},
    {"expm1", "expm1"},
    {"floor", "floor"},
    {"frac", "frac"},
    {"lerp", "lerp.Scalar"},
    {"lgamma", "lgamma"},
    {"log", "log"},
    {"log10", "log10"},
    {"log1p", "log1p"},
    {"log2", "log2"},
    {"maximum", "maximum"},
    {"minimum", "minimum"},
    {"mul", "mul.Tensor"},
    {"neg", "neg"},
    {"pow", "pow.Tensor_Scalar"},
    {"reciprocal", "reciprocal"},
    {"round", "round"},
    {"rsqrt", "rsqrt"},
    {"sigmoid", "sigmoid"},
    {"sign", "sign"},
    {"sin", "sin"},
    {"sinh", "sinh"},
    {"sqrt", "sqrt"},
    {"sub", "sub.Tensor"},
    {"tan", "tan"},
    {"tanh", "tanh"},
    {"trunc", "trunc"},
    {"zero", "zero_"},
};

constexpr std::array<const char*, 6> kOverloads = {"", "List", "Scalar", "ScalarAndTensor", "ScalarList", "Tensor"};

// Each norm is left Partial. The op itself refuses some norms of an empty piece.
void norm_of_nothing(Run& run) {
  const auto x = run.arg(0).toTensorList().get(0);
  const auto dtype = run.arg(2).isNone() ? x.scalar_type() : run.arg(2).toScalarType();
  const double nothing = run.arg(1).toScalar().toDouble() < 0 ? std::numeric_limits<double>::infinity() : 0.0;
  run.returns({c10::List<at::Tensor>({at::full({}, nothing, x.options().dtype(c10::toRealValueType(dtype)))})});
}

Rule norms(const Call& call) {
  auto rule = registry().find("linalg_vector_norm")->rule(call);
  rule.kernel = norm_of_nothing;
  return rule;
}

// A number added to summands would be added once per rank.
bool is_affine(const std::string& name, const std::string& overload) {
  return (name == "add" || name == "sub") && overload.rfind("Scalar", 0) == 0;
}

} // namespace

void register_lists(Registry& r) {
  Options o;
  o.any_args = true;
  o.lists = true;
  o.elementwise = true;
  for (const auto& family : kFamilies) {
    const auto* like = r.find(family.like);
    TORCH_INTERNAL_ASSERT(like, "no rule for ", family.like);
    for (const std::string overload : kOverloads) {
      const std::string name = std::string("_foreach_") + family.name;
      const auto rule = is_affine(family.name, overload) ? r.find("add.Scalar")->rule : like->rule;
      const auto suffix = overload.empty() ? "" : "." + overload;
      for (const auto& full : {name + suffix, name + "_" + suffix, name + "." + (overload.empty() ? "out" : overload + "_out")}) {
        r.add("lists", {full.c_str()}, rule, o);
      }
    }
  }
  o.dense = true;
  for (const std::string optimizer : {"adagrad", "adam", "adamw", "sgd"}) {
    for (const std::string overload : {"", ".tensor_lr"}) {
      r.add("lists", {("_fused_" + optimizer + "_" + overload).c_str()}, broadcast, o);
    }
  }
  Options norm;
  norm.lists = true;
  r.add("lists", {"_foreach_norm.Scalar"}, norms, norm);
  r.add("lists", {"_amp_foreach_non_finite_check_and_unscale_"}, broadcast, o);
}

} // namespace shardtensor::rules
