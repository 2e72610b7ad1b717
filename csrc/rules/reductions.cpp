// Reductions: the reduced dims are factors that the result lacks.
#include "rules/registry.h"

#include <ATen/ATen.h>

namespace shardtensor::rules {

namespace {

// Which of `ndim` dims argument `arg` names; all where it is None or empty.
uint64_t reduced_dims(const Call& call, int64_t arg, int64_t ndim) {
  if (arg < 0 || !call.has(arg)) {
    return ~uint64_t{0};
  }
  uint64_t mask = 0;
  const auto dims = call.ints(arg);
  for (auto d : dims) {
    mask |= uint64_t{1} << wrap_dim(d, ndim);
  }
  return dims.empty() ? ~uint64_t{0} : mask;
}

int64_t argument(const Call& call, const char* name) {
  const auto i = call.schema.argumentIndexWithName(name);
  return i ? *i : -1;
}

// One operand; `f` is what the reduced dims' factors are.
Rule reduce(const Call& call, Factor f) {
  Rule rule;
  const auto& x = call.tensors[0];
  const auto mask = reduced_dims(call, argument(call, "dim"), x.dim());
  const auto keep = argument(call, "keepdim");
  const bool keepdim = keep >= 0 && call.flag(keep);
  Dims in, out;
  for (int64_t d = 0; d < x.dim(); ++d) {
    const bool reduced = mask >> d & 1;
    in.emplace_back(reduced ? rule.factor(f) : rule.factor());
    if (!reduced) {
      out.push_back(in.back());
    } else if (keepdim) {
      out.emplace_back(kNone);
    }
  }
  rule.operands.emplace_back(std::move(in));
  for (size_t i = 1; i < call.tensors.size(); ++i) {
    rule.operands.emplace_back(out);
  }
  for (size_t i = 0; i < call.schema.returns().size(); ++i) {
    rule.results.emplace_back(out);
  }
  return rule;
}

Rule sum(const Call& call) {
  Factor f;
  f.reduce = ReduceOp::Sum;
  auto rule = reduce(call, f);
  rule.linear_in({0});
  return rule;
}

// Sums locally and divides by the global count: pieces may be of any size.
void mean_kernel(Run& run) {
  const auto x = run.arg(0).toTensor();
  const auto& schema = run.op.schema();
  const auto dim = schema.argumentIndexWithName("dim");
  const auto keepdim = schema.argumentIndexWithName("keepdim");
  const auto dtype_at = *schema.argumentIndexWithName("dtype");
  const auto dtype = run.arg(dtype_at).isNone() ? std::nullopt : std::optional(run.arg(dtype_at).toScalarType());
  const auto sizes = run.operands[0].sizes;
  double count = 1;
  at::Tensor total;
  const auto dims = dim && !run.arg(*dim).isNone() ? run.arg(*dim).toIntVector() : std::vector<int64_t>{};
  if (dims.empty()) {
    count = static_cast<double>(c10::multiply_integers(sizes));
    total = dim ? at::sum(x, at::OptionalIntArrayRef(), run.arg(*keepdim).toBool(), dtype) : at::sum(x, dtype);
  } else {
    for (auto d : dims) {
      count *= static_cast<double>(sizes[wrap_dim(d, static_cast<int64_t>(sizes.size()))]);
    }
    total = at::sum(x, dims, run.arg(*keepdim).toBool(), dtype);
  }
  run.returns({total.div_(count)});
}

Rule mean(const Call& call) {
  Factor f;
  f.reduce = ReduceOp::Sum;
  f.kernel = true;
  auto rule = reduce(call, f);
  rule.kernel = mean_kernel;
  rule.linear_in({0});
  return rule;
}

} // namespace

void register_reductions(Registry& r) {
  r.add("reductions", {"sum", "sum.dim_IntList", "nansum"}, sum);
  r.add("reductions", {"mean", "mean.dim"}, mean);
}

} // namespace shardtensor::rules
