// foreach and fused optimizer ops: lists of tensors. Each index is one elementwise op, resolved by the rule of that op.
// dispatch/lists.cpp runs them: one call on the lists of local tensors.
#include "comm/comm.h"
#include "redistribute/neutral_value.h"
#include "rules/registry.h"
#include "tensor/shard_tensor.h"
#include "tensor/versions.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>
#include <string>

namespace shardtensor::rules {

namespace {

// _foreach_<name>
constexpr std::array<const char*, 45> kFamilies = {
    "abs",   "acos",  "add",  "addcdiv", "addcmul", "asin", "atan",  "ceil",  "clamp_max",  "clamp_min", "clone",  "copy",
    "cos",   "cosh",  "div",  "erf",     "erfc",    "exp",  "expm1", "floor", "frac",       "lerp",      "lgamma", "log",
    "log10", "log1p", "log2", "maximum", "minimum", "mul",  "neg",   "pow",   "reciprocal", "round",     "rsqrt",  "sigmoid",
    "sign",  "sin",   "sinh", "sqrt",    "sub",     "tan",  "tanh",  "trunc", "zero",
};

constexpr std::array<const char*, 6> kOverloads = {"", "List", "Scalar", "ScalarAndTensor", "ScalarList", "Tensor"};

// Each norm stays Partial. The op itself rejects some norms of an empty piece.
void norm_of_nothing(KernelRun& run) {
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

// The op refuses an empty piece.
void max_of_nothing(KernelRun& run) {
  const auto x = run.arg(0).toTensorList().get(0);
  const auto sizes = run.operands[0].symbols;
  if (std::any_of(sizes.begin(), sizes.end(), [](const auto& n) { return n == 0; })) {
    return run.call_op(); // the whole is empty: torch's error
  }
  run.returns({c10::List<at::Tensor>({at::full({}, neutral_value(ReduceOp::Max, x.scalar_type()), x.options())})});
}

Rule maxima(const Call& call) {
  auto rule = registry().find("max")->rule(call);
  rule.kernel = max_of_nothing;
  return rule;
}

Rule power_sums(const Call& call) {
  return registry().find("linalg__powsum")->rule(call);
}

// The rule of the op for one index of the lists, by the type of its other argument.
RuleFn rule_of(const Registry& r, const std::string& name, const std::string& overload) {
  std::vector<std::string> ops;
  if (overload == "Scalar" || overload == "ScalarList") {
    ops = {name + ".Scalar", name + ".Tensor_Scalar", name};
  } else if (overload == "ScalarAndTensor") {
    ops = {name + ".Scalar"};
  } else {
    ops = {name + ".Tensor", name + ".Tensor_Tensor", name, name + "_"};
  }
  for (const auto& op : ops) {
    if (const auto* entry = r.find(op)) {
      return entry->rule;
    }
  }
  return nullptr;
}

// GradScaler's check: a bad value in any rank's piece counts on all ranks.
std::optional<at::Tensor> found_inf(c10::ArrayRef<c10::IValue> arguments) {
  std::vector<MeshPtr> meshes;
  const auto local_of = [&](const at::Tensor& t) {
    const auto* impl = as_shard_tensor(t);
    if (impl && std::count(meshes.begin(), meshes.end(), impl->layout().mesh_ptr()) == 0) {
      meshes.push_back(impl->layout().mesh_ptr());
    }
    return impl ? impl->local() : t;
  };
  const auto gradients = arguments[0].toTensorVector();
  std::vector<at::Tensor> locals;
  std::transform(gradients.begin(), gradients.end(), std::back_inserter(locals), local_of);
  auto found = local_of(arguments[1].toTensor());
  const at::AutoDispatchBelowADInplaceOrView below;
  at::_amp_foreach_non_finite_check_and_unscale_(locals, found, local_of(arguments[2].toTensor()));
  for (const auto& t : gradients) {
    if (auto* impl = as_shard_tensor(t)) {
      note_write_in_list(*impl);
    }
  }
  if (auto* impl = as_shard_tensor(arguments[1].toTensor())) {
    note_write_and_piece(*impl);
  }
  for (const auto& mesh : meshes) {
    for (int64_t m = 0; m < mesh->ndim(); ++m) {
      comm::all_reduce(found, *mesh, m, ReduceOp::Max);
    }
  }
  return at::Tensor();
}

} // namespace

void register_lists(Registry& r) {
  Options o{.way = Way::Lists, .elementwise = true};
  for (const std::string family : kFamilies) {
    const auto name = "_foreach_" + family;
    for (const std::string overload : kOverloads) {
      const auto rule = rule_of(r, family, overload);
      // One tensor with a number for each index.
      const bool numbers = overload == "Tensor" && (family == "addcdiv" || family == "addcmul");
      const auto suffix = overload.empty() ? "" : "." + overload;
      for (const auto& full : {name + suffix, name + "_" + suffix, name + "." + (overload.empty() ? "out" : overload + "_out")}) {
        if (numbers) {
          r.add("lists", {full.c_str()}, kAsOtherOps);
        } else if (rule) {
          r.add("lists", {full.c_str()}, rule, o);
        }
      }
    }
  }
  o.dense = true;
  for (const std::string optimizer : {"adagrad", "adam", "adamw", "sgd"}) {
    for (const std::string overload : {"", ".tensor_lr"}) {
      r.add("lists", {("_fused_" + optimizer + "_" + overload).c_str()}, broadcast, o);
    }
  }
  r.add("lists", {"_foreach_max"}, maxima, {.way = Way::Lists});
  r.add("lists", {"_foreach_norm.Scalar"}, norms, {.way = Way::Lists});
  r.add("lists", {"_foreach_powsum.Scalar"}, power_sums, {.way = Way::Lists});
  r.add("lists", {"_amp_foreach_non_finite_check_and_unscale_"}, kAsOtherOps, {.calls = found_inf});
}

} // namespace shardtensor::rules
