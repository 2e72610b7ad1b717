// foreach and fused optimizer ops: lists of tensors, each index an elementwise op of its own, resolved by the rule of that op.
// dispatch/special.cpp runs them: one call on the lists of local tensors.
#include "rules/registry.h"

#include <array>
#include <string>

namespace shardtensor::rules {

namespace {

// A fused optimizer step: parameter, gradient and states of one index follow one layout.
Rule step(const Call& call) {
  return broadcast(call);
}

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

// A number added to summands would be added once per rank.
bool is_affine(const std::string& name, const std::string& overload) {
  return (name == "add" || name == "sub") && overload.rfind("Scalar", 0) == 0;
}

} // namespace

void register_lists(Registry& r) {
  Options o;
  o.any_args = true;
  o.lists = true;
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
  for (const std::string optimizer : {"adagrad", "adam", "adamw", "sgd"}) {
    for (const std::string overload : {"", ".tensor_lr"}) {
      r.add("lists", {("_fused_" + optimizer + "_" + overload).c_str()}, step, o);
    }
  }
  r.add("lists", {"_amp_foreach_non_finite_check_and_unscale_"}, step, o);
}

} // namespace shardtensor::rules
