// Losses. A mean divides by the global count, so uneven pieces are right. nll_loss looks up sharded classes without a gather.
#include "rules/registry.h"

#include "comm/tensor_kind.h"
#include "rules/kernel_utils.h"
#include "rules/windows.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/Reduction.h>

#include <numeric>

namespace shardtensor::rules {

namespace {

int64_t reduction_of(const Call& call) {
  return call.integer(call.position("reduction"));
}

// How the factor of a loss's terms is reduced, if any is.
std::optional<ReduceOp> summed(bool none) {
  return none ? std::nullopt : std::optional(ReduceOp::Sum);
}

// ---- losses that are a sum over elements or samples ----

// The number of terms that a mean divides by: elements, or samples if each sample gives one term.
c10::SymInt terms(const KernelRun& run, bool per_sample) {
  const auto first = argument(run, "self"); // in a backward, self and target follow grad_output
  const auto self = run.operands[first].symbols;
  if (per_sample) {
    return self.size() < 2 ? c10::SymInt(1) : self[0];
  }
  return numel_of(at::infer_size_symdimvector(self, run.operands[first + 1].symbols));
}

// Some of torch's kernels do not write the result if there are no samples.
void sum_kernel(KernelRun& run) {
  const bool empty = run.arg(argument(run, "self")).toTensor().sym_numel() == 0;
  const auto returned = run.op.schema().returns().size();
  run.call_op();
  const auto result = run.stack[run.stack.size() - returned].toTensor();
  if (empty && result.dim() == 0) {
    result.zero_();
  }
}

// A mean over pieces of any size: the local sum divided by the global count. Backward: the gradient of the sum, divided by it
// too.
template <bool per_sample>
void mean_loss_kernel(KernelRun& run) {
  const auto count = terms(run, per_sample);
  run.arg(argument(run, "reduction")) = static_cast<int64_t>(at::Reduction::Sum);
  const auto returned = run.op.schema().returns().size();
  sum_kernel(run);
  auto& result = run.stack[run.stack.size() - returned];
  result = result.toTensor().div_(at::Scalar(count));
}

Rule with_mean(Rule rule, const Call& call, bool per_sample) {
  if (reduction_of(call) == at::Reduction::Mean) {
    rule.always(per_sample ? mean_loss_kernel<true> : mean_loss_kernel<false>);
  }
  return rule;
}

// Forward: each element gives one term.
Rule elementwise_loss(const Call& call) {
  auto rule = broadcast(call);
  if (reduction_of(call) == at::Reduction::None) {
    return rule;
  }
  for (auto& f : rule.factors) {
    f.reduce = ReduceOp::Sum;
  }
  rule.results = {Result(Dims{})};
  return with_mean(std::move(rule), call, false);
}

// Backward: linear in grad_output, which is a scalar unless nothing was reduced.
Rule elementwise_backward(const Call& call) {
  auto rule = broadcast(call);
  rule.linear_in({0});
  return with_mean(std::move(rule), call, false);
}

// For a scalar grad_output, or the target of a single sample [C], which has one element or none.
Dims fit(const Dims& dims, const TensorArg& t) {
  return t.dim() == static_cast<int64_t>(dims.size()) ? dims : Dims(t.dim(), Dim());
}

// Each sample of [N, C] gives one term, [C] is one sample. The classes of a sample stay on one rank.
struct SampleDims {
  Dims both, batch;
};
SampleDims samples(Rule& rule, int64_t ndim) {
  SampleDims s;
  if (ndim > 1) {
    s.batch.emplace_back(rule.factor());
  }
  s.both = s.batch;
  s.both.emplace_back(rule.whole());
  return s;
}

// multi_margin_loss(self, target, p, margin, weight?, reduction), multilabel_margin_loss_forward(self, target, reduction).
Rule margin(const Call& call) {
  if (call.tensors[0].dim() == 0) {
    return replicate(call); // one sample of one class
  }
  TORCH_CHECK(call.tensors[1].dtype == at::kLong, "expected scalar type Long but found ", call.tensors[1].dtype);
  Rule rule;
  const bool multilabel = call.schema.returns().size() > 1;
  const auto s = samples(rule, call.tensors[0].dim());
  const bool none = reduction_of(call) == at::Reduction::None;
  if (!none && !s.batch.empty()) {
    rule.factors[s.batch[0].factor].reduce = ReduceOp::Sum;
  }
  rule.operands.emplace_back(s.both);
  rule.operands.emplace_back(multilabel ? s.both : fit(s.batch, call.tensors[1]));
  if (call.tensors.size() > 2) {
    rule.operands.emplace_back(Dims{s.both.back()}); // weight
  }
  rule.results.emplace_back(none ? s.batch : Dims{});
  if (multilabel) {
    rule.results.emplace_back(s.both); // is_target
  }
  rule.kernel = sum_kernel;
  rule.always_kernel = !none;
  return with_mean(std::move(rule), call, true);
}

// (grad_output, self, target, ..., weight?) and (grad_output, self, target, reduction, is_target)
Rule margin_backward(const Call& call) {
  if (call.tensors[1].dim() == 0) {
    return replicate(call);
  }
  Rule rule;
  const auto s = samples(rule, call.tensors[1].dim());
  const bool multilabel = argument(call, "is_target") >= 0;
  rule.operands.emplace_back(fit(s.batch, call.tensors[0]));
  rule.operands.emplace_back(s.both);
  rule.operands.emplace_back(multilabel ? s.both : fit(s.batch, call.tensors[2]));
  if (call.tensors.size() > 3) {
    rule.operands.emplace_back(multilabel ? s.both : Dims{s.both.back()});
  }
  rule.results.emplace_back(s.both);
  rule.linear_in({0});
  return with_mean(std::move(rule), call, true);
}

// ---- nll_loss: self [N, C, ...], target [N, ...], weight [C] ----

// The dims of self: the classes are dim 1, or the only dim.
struct NllDims {
  Dims self, target, classes;
};
NllDims nll_dims(Rule& rule, int64_t ndim, const Factor& batch) {
  const Factor classes{.kernel = true, .reduce = ReduceOp::Sum};
  NllDims dims;
  const auto class_dim = ndim > 1 ? 1 : 0;
  for (int64_t d = 0; d < ndim; ++d) {
    dims.self.emplace_back(rule.factor(d == class_dim ? classes : batch));
    (d == class_dim ? dims.classes : dims.target).push_back(dims.self.back());
  }
  return dims;
}

// The classes that a rank holds, and the targets counted from its first class. Targets of other ranks' classes become -1, which
// the kernel ignores.
struct LocalTarget {
  SymInterval held;
  at::Tensor target;
};
constexpr int64_t kElsewhere = -1;

LocalTarget localize(const KernelRun& run, size_t self, const at::Tensor& given, int64_t ignore_index) {
  const auto target = given.to(at::kLong);
  const auto class_dim = run.operands[self].dim() > 1 ? 1 : 0;
  const at::Scalar classes(run.operands[self].symbols[class_dim]);
  const auto held = mine(run, self, class_dim);
  const at::Scalar first(held.start), end(held.end());
  const auto counted = target != ignore_index;
  if (!is_traced(target) && target.is_cpu() && target.numel()) {
    const auto bad = at::masked_select(target, counted.logical_and((target < 0).logical_or(target >= classes)));
    TORCH_CHECK_INDEX(bad.numel() == 0, "Target ", bad[0].item<int64_t>(), " is out of bounds.");
  } else if (target.sym_numel() != 0) {
    at::_assert_async(
        counted.logical_not().logical_or((target >= 0).logical_and(target < classes)).all(), "Target is out of bounds.");
  }
  const auto here = counted.logical_and(target >= first).logical_and(target < end);
  return {held, at::where(here, target - first, kElsewhere)};
}

// The factor of the classes.
struct ClassesFactor {
  int64_t factor;
};

void nll_forward(KernelRun& run) {
  const auto self = run.arg(0).toTensor();
  const auto reduction = run.arg(3).toInt();
  if (reduction == at::Reduction::Mean) {
    run.arg(3) = static_cast<int64_t>(at::Reduction::Sum);
  }
  at::Tensor output, total = at::zeros({}, self.options());
  if (run.mesh_dims(kernel_data<ClassesFactor>(run.solution).factor)) {
    const auto lookup = localize(run, 0, run.arg(1).toTensor(), run.arg(4).toInt());
    run.arg(1) = lookup.target;
    run.arg(4) = kElsewhere;
    if (lookup.held.length == 0) {
      const auto sizes = reduction == at::Reduction::None ? lookup.target.sym_sizes() : c10::SymIntArrayRef();
      output = at::zeros_symint(sizes, self.options());
    }
  }
  if (!output.defined()) {
    const auto results = results_of_op(run);
    output = results[0].toTensor();
    total = reduction == at::Reduction::None ? total : results[1].toTensor();
  }
  if (reduction == at::Reduction::Mean) {
    total = over_ranks(total, run, mesh_dims_of(run, kAllFactors), ReduceOp::Sum);
    output.div_(total);
  }
  run.returns({std::move(output), std::move(total)});
}

Rule nll(const Call& call) {
  Rule rule;
  const auto reduction = reduction_of(call);
  const bool none = reduction == at::Reduction::None;
  const auto dims = nll_dims(rule, call.tensors[0].dim(), {.reduce = summed(none)});
  rule.operands.emplace_back(dims.self);
  rule.operands.emplace_back(fit(dims.target, call.tensors[1]));
  if (call.tensors.size() > 2) {
    rule.operands.emplace_back(dims.classes);
  }
  rule.results.emplace_back(none ? dims.target : Dims{});
  rule.results.emplace_back(Dims{}); // total_weight
  if (reduction != at::Reduction::Sum) {
    rule.results[1].reduce.emplace(std::nullopt); // gathered, or not used
  }
  rule.always(nll_forward);
  rule.kernel_data = ClassesFactor{dims.classes[0].factor};
  return rule;
}

void nll_backward(KernelRun& run) {
  const auto lookup = localize(run, 1, run.arg(2).toTensor(), run.arg(5).toInt());
  if (lookup.held.length == 0) {
    return run.returns({at::empty_like(run.arg(1).toTensor())});
  }
  run.arg(2) = lookup.target;
  run.arg(5) = kElsewhere;
  run.call_op();
}

// (grad_output, self, target, weight?, reduction, ignore_index, total_weight)
Rule nll_backward_rule(const Call& call) {
  Rule rule;
  const auto dims = nll_dims(rule, call.tensors[1].dim(), {});
  rule.factors[dims.classes[0].factor].reduce.reset();
  rule.operands.emplace_back(fit(dims.target, call.tensors[0]));
  rule.operands.emplace_back(dims.self);
  rule.operands.emplace_back(fit(dims.target, call.tensors[2]));
  if (call.operand(3) >= 0) {
    rule.operands.emplace_back(dims.classes);
  }
  rule.operands.emplace_back(Dims(call.tensors.back().dim(), Dim())); // total_weight
  rule.operands.back().free = reduction_of(call) != at::Reduction::Mean;
  rule.results.emplace_back(dims.self);
  rule.kernel = nll_backward;
  rule.linear_in({0});
  return rule;
}

// ---- ctc_loss(log_probs [t, n, c], targets [n, s] or joined to one dim, lengths of both, blank, reduction, ...) ----

// The lengths of the samples that this rank holds. Every rank has the whole list, so all ranks refuse a wrong one.
c10::IValue cut_lengths(const c10::IValue& lengths, const char* name, const Interval& held, int64_t n, int64_t most) {
  if (lengths.isTensor()) {
    const auto given = lengths.toTensor();
    return given.size(0) == held.length ? given : given.narrow(0, held.start, held.length);
  }
  const auto all = lengths.toIntVector();
  TORCH_CHECK(static_cast<int64_t>(all.size()) == n, name, " must be of size batch_size");
  for (const auto length : all) {
    TORCH_CHECK(length >= 0, "Expected ", name, " to have value at least 0, but got value ", length);
    TORCH_CHECK(length <= most, "Expected ", name, " to have value at most ", most, ", but got value ", length);
  }
  return c10::List<int64_t>(c10::IntArrayRef(all).slice(held.start, held.length));
}

// The targets of those samples, if the targets are joined to one dim.
at::Tensor cut_joined(const at::Tensor& targets, const c10::IValue& lengths, const Interval& held) {
  std::vector<int64_t> all;
  if (lengths.isTensor()) {
    need_values(lengths.toTensor(), "ctc_loss of joined targets");
    const auto given = lengths.toTensor().to(at::kLong).cpu().contiguous();
    all.assign(given.const_data_ptr<int64_t>(), given.const_data_ptr<int64_t>() + given.numel());
  } else {
    all = lengths.toIntVector();
  }
  const auto first = [&](int64_t n) { return std::accumulate(all.begin(), all.begin() + n, int64_t{0}); };
  const auto total = first(static_cast<int64_t>(all.size()));
  TORCH_CHECK(
      total == targets.size(0), "Expected tensor to have size ", total, " at dimension 0, but got size ", targets.size(0),
      " for argument #2 'targets'");
  return targets.narrow(0, first(held.start), first(held.end()) - first(held.start));
}

at::Tensor ctc_reduced(const at::Tensor& losses, const c10::IValue& lengths, int64_t reduction, int64_t n) {
  if (reduction != at::Reduction::Mean) {
    return reduction == at::Reduction::Sum ? losses.sum() : losses;
  }
  const auto counts =
      lengths.isTensor() ? lengths.toTensor().to(losses.options()) : at::tensor(lengths.toIntVector(), losses.options());
  return losses.div(counts.clamp_min(1)).sum().div(n);
}

void ctc_kernel(KernelRun& run) {
  const auto x = run.arg(0).toTensor(), targets = run.arg(1).toTensor();
  const auto sizes = run.operands[0].sizes();
  const auto blank = run.arg(4).toInt(), reduction = run.arg(5).toInt();
  TORCH_CHECK(c10::multiply_integers(sizes) > 0, "log_probs tensor must not be empty");
  TORCH_CHECK(blank >= 0 && blank < sizes[2], "blank must be in label range");
  const auto held = mine(run, 0, 1).numbers();
  const auto inputs = cut_lengths(run.arg(2), "input_lengths", held, sizes[1], sizes[0]);
  const auto lengths = cut_lengths(run.arg(3), "target_lengths", held, sizes[1], targets.size(-1));
  if (targets.dim() == 1) {
    run.arg(1) = cut_joined(targets, run.arg(3), held);
  }
  if (held.length == 0) {
    need_values(x, "ctc_loss"); // the op reads values on the other ranks too
    return run.returns({reduction == at::Reduction::None ? x.sum(at::IntArrayRef({0, 2})) : x.sum()});
  }
  run.arg(2) = inputs;
  run.arg(3) = lengths;
  run.arg(5) = static_cast<int64_t>(at::Reduction::None);
  run.call_op();
  run.stack.back() = ctc_reduced(run.stack.back().toTensor(), lengths, reduction, sizes[1]);
}

// The batch may be cut. Joined targets stay whole, and so do their lengths: they give the start of each sample's targets.
Rule ctc(const Call& call) {
  const auto& x = call.tensors[0];
  const bool joined = call.tensors[1].dim() == 1, lengths = call.tensors.size() > 2;
  if (x.dim() != 3 || call.tensors[1].dim() > 2 || (lengths && (call.tensors[2].dim() != 1 || call.tensors[3].dim() != 1))) {
    return replicate(call); // a single sample
  }
  const bool none = reduction_of(call) == at::Reduction::None;
  Rule rule;
  const Dim batch(rule.factor({.kernel = true, .reduce = summed(none)})), whole(kNone);
  rule.operands.emplace_back(Dims{whole, batch, whole});
  rule.operands.emplace_back(joined ? Dims{whole} : Dims{batch, whole});
  for (size_t i = 2; i < call.tensors.size(); ++i) {
    const auto& t = call.tensors[i];
    const auto* name = i == 2 ? "input_lengths" : "target_lengths";
    TORCH_CHECK(c10::isIntegralType(t.dtype, false), name, " must be integral");
    TORCH_CHECK(t.size(0) == x.size(1), name, " must be of size batch_size");
    rule.operands.emplace_back(Dims{joined && i == 3 ? whole : batch});
  }
  rule.results.emplace_back(none ? Dims{batch} : Dims{});
  rule.kernel = ctc_kernel;
  return rule;
}

} // namespace

void register_losses(Registry& r) {
  const Options symbols{.symbols = true, .takes = kReals};
  const Options weighted{.symbols = true, .takes = kReals, .one_dtype = 0b101};  // self, weight
  const Options margins{.symbols = true, .takes = kReals, .one_dtype = 0b10001}; // self, weight
  r.add(
      "losses",
      {"binary_cross_entropy", "binary_cross_entropy_with_logits", "huber_loss", "mse_loss", "smooth_l1_loss",
       "soft_margin_loss"},
      elementwise_loss, {.symbols = true});
  r.add(
      "losses",
      {"binary_cross_entropy_backward", "huber_loss_backward", "mse_loss_backward", "smooth_l1_loss_backward",
       "soft_margin_loss_backward"},
      elementwise_backward, {.symbols = true});
  // torch's implementation reads the lengths from memory, or makes plain tensors of them.
  r.add("losses", {"ctc_loss.IntList", "ctc_loss.Tensor"}, ctc, {.autograd = formulas::local_autograd, .takes = kWideReals});
  r.add("losses", {"cross_entropy_loss"}, kAsOtherOps, {.autograd = formulas::cross_entropy});
  r.add("losses", {"nll_loss", "nll_loss2d", "nll_loss_nd"}, kAsOtherOps, {.autograd = formulas::loss_of_labels});
  r.add("losses", {"multi_margin_loss"}, margin, margins);
  r.add("losses", {"multi_margin_loss_backward", "multilabel_margin_loss_backward"}, margin_backward, symbols);
  r.add("losses", {"multilabel_margin_loss_forward"}, margin, symbols);
  r.add("losses", {"nll_loss2d_forward", "nll_loss_forward"}, nll, weighted);
  r.add("losses", {"nll_loss2d_backward", "nll_loss_backward"}, nll_backward_rule, symbols);
}

} // namespace shardtensor::rules
