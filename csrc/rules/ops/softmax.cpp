// Softmax and log_softmax, also along a sharded dim: two small all-reduces (one in the backward), never a gather.
#include "rules/kernel_utils.h"
#include "rules/registry.h"

#include <ATen/ATen.h>

namespace shardtensor::rules {

namespace {

// All operands and the result have the same dims. Factor d is dim d. The kernel is told the dim that adds up to one.
Rule along(const Call& call, Kernel kernel) {
  Rule rule;
  const auto& x = call.tensors[0];
  const auto dim = call.dim(argument(call, "dim"), x.dim());
  const auto dims = dims_along(rule, x.dim(), dim, {.kernel = true});
  rule.results.emplace_back(dims);
  for (const auto& t : call.tensors) {
    if (!t.mutated) {
      rule.operands.emplace_back(dims);
    }
  }
  add_outputs(call, rule);
  rule.kernel = kernel;
  rule.kernel_data = WorkDim{dim};
  return rule;
}

template <bool log>
void softmax_kernel(KernelRun& run) {
  const auto dim = kernel_data<WorkDim>(run.solution).dim;
  const auto ranks = run.mesh_dims(dim);
  const auto x = run.arg(0).toTensor();
  const auto dtype = run.arg(2).toBool() ? at::kFloat : x.scalar_type();
  const auto wide = x.to(accumulate_type(dtype));
  const auto top = over_ranks(extreme(wide, {dim}, ReduceOp::Max), run, ranks, ReduceOp::Max);
  auto shifted = wide - top;
  auto powers = log ? shifted.exp() : shifted.exp_();
  const auto total = over_ranks(powers.sum({dim}, true), run, ranks, ReduceOp::Sum);
  return_results(run, {(log ? shifted.sub_(total.log()) : powers.div_(total)).to(dtype)});
}

template <bool log>
Rule softmax(const Call& call) {
  return along(call, softmax_kernel<log>);
}

template <bool log>
void softmax_backward_kernel(KernelRun& run) {
  const auto dim = kernel_data<WorkDim>(run.solution).dim;
  const auto dtype = run.arg(3).toScalarType();
  const auto grad = run.arg(0).toTensor();
  const auto wide = accumulate_type(grad.scalar_type());
  const auto g = grad.to(wide);
  const auto y = run.arg(1).toTensor().to(wide);
  const auto weighed = log ? g : g * y;
  const auto total = over_ranks(weighed.sum({dim}, true), run, run.mesh_dims(dim), ReduceOp::Sum);
  return_results(run, {(log ? g - y.exp().mul_(total) : weighed - y * total).to(dtype)});
}

// Linear in the gradient.
template <bool log>
Rule backward(const Call& call) {
  return linear(along(call, softmax_backward_kernel<log>), {0});
}

// The dim stays whole. If the mask has another shape than the scores, everything does.
Rule masked(const Call& call) {
  const auto& x = call.tensors[0];
  for (const auto& t : call.tensors) {
    if (t.sizes() != x.sizes() || !call.has(argument(call, "dim"))) {
      return replicate(call);
    }
  }
  auto rule = along(call, nullptr);
  rule.factors[kernel_data<WorkDim>(rule).dim] = {.whole = true};
  return rule;
}

} // namespace

void register_softmax(Registry& r) {
  const char* family = "softmax";
  const Options real{.symbols = true, .takes = kReals};
  const Options gradient{.symbols = true, .takes = kReals, .one_dtype = 0b11}; // grad_output, output
  r.add(family, {"_log_softmax", "_log_softmax.out"}, softmax<true>, real);
  r.add(family, {"_log_softmax_backward_data", "_log_softmax_backward_data.out"}, backward<true>, gradient);
  r.add(family, {"_masked_softmax", "_masked_softmax_backward"}, masked);
  r.add(family, {"_safe_softmax", "log_softmax.int_out", "softmax.int_out"}, kAsOtherOps);
  r.add(family, {"_softmax", "_softmax.out"}, softmax<false>, real);
  r.add(family, {"_softmax_backward_data", "_softmax_backward_data.out"}, backward<false>, gradient);
}

} // namespace shardtensor::rules
