#include "rules/separable_filter.h"

#include "rules/kernel_utils.h"
#include "rules/pad_empty.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace shardtensor::rules {

namespace {

// For the n results `of` along one dim: the first element that each one reads, and the weights of the `taps` elements from there
// on.
struct FilterWeights {
  at::Tensor first;   // [n], indices of the whole
  at::Tensor weights; // [n, taps]
};

at::Tensor lines(const at::Tensor& results, int64_t num, int64_t offset, int64_t den) {
  return at::div(results.mul(num).add(offset), den, "floor");
}

FilterWeights weights_of_counts(
    const KernelRun& run, const SeparableFilter& filter, int64_t i, const Interval& of, const at::TensorOptions& options) {
  const auto ends = filter.counts(run, filter, i, options).cumsum(0);
  const auto results = at::arange(of.start, of.end(), options);
  return {at::searchsorted(ends, results, false, true), at::ones({of.length, 1}, options)};
}

// The op is linear and reads at most `taps` neighbours for a result. So for an input that is one at every taps-th place and
// zero elsewhere, a result is the weight of the single one that it reads. The `taps` shifts of this input are the rows of one
// call.
FilterWeights weights_of(
    const KernelRun& run, const SeparableFilter& filter, int64_t i, const Interval& of, const at::TensorOptions& options) {
  const auto& r = filter.space[i].reach;
  const auto size = filter.space[i].size, count = filter.space[i].count;
  int64_t taps = 1;
  for (int64_t o = 0; o < count; ++o) {
    taps = std::max(taps, std::min(r.hi(o), size) - std::max<int64_t>(r.lo(o), 0));
  }
  const auto numbers = at::TensorOptions(at::kLong).device(options.device());
  const auto space = filter.ndim();
  // torch's antialiased kernels are wrong for one column, and copy if there are as many results as elements.
  constexpr int64_t kBroad = 2;
  std::vector<int64_t> sizes(filter.lead + space, 1), out(space, kBroad + 1);
  std::fill(sizes.begin() + filter.lead, sizes.end(), kBroad);
  sizes[0] = taps;
  sizes[filter.lead + i] = size;
  out[i] = count;
  std::vector<int64_t> row(sizes.size(), 1), column(sizes.size(), 1);
  row[0] = taps;
  column[filter.lead + i] = size;
  const auto comb = at::eq(at::arange(size, numbers).remainder(taps).view(column), at::arange(taps, numbers).view(row));
  auto shown = filter.op(run, comb.to(options.dtype()).expand(sizes).contiguous(), out, i);
  for (int64_t d = 0; d < filter.lead + space; ++d) { // [taps, count]
    if (d != 0 && d != filter.lead + i) {
      shown = shown.narrow(d, 0, 1);
    }
  }
  shown = shown.reshape({taps, count}).narrow(1, of.start, of.length).t();
  const auto results = at::arange(of.start, of.end(), numbers);
  const auto first = lines(results, r.num, r.first, r.den).clamp_min(0);
  const auto end = lines(results, r.num, r.last, r.den).add(1).clamp_max(size);
  const auto read = first.unsqueeze(1).add(at::arange(taps, numbers));
  const auto weights = shown.gather(1, read.remainder(taps)).mul(at::lt(read, end.unsqueeze(1)));
  return {first, weights};
}

at::Tensor column_of(const at::Tensor& weights, int64_t tap, int64_t dim, int64_t ndim) {
  std::vector<int64_t> sizes(ndim, 1);
  sizes[dim] = weights.size(0);
  return weights.select(1, tap).view(sizes);
}

void forward_kernel(KernelRun& run) {
  const auto& filter = kernel_data<SeparableFilter>(run.solution);
  const auto x = run.arg(0).toTensor();
  const auto sizes = sizes_of_piece(run);
  auto out = x.to(accumulate_type(x.scalar_type()));
  if (is_empty(x) || has_no_elements(sizes)) {
    weights_of(run, filter, 0, {0, 0}, out.options()); // raises if other ranks raise
    return run.returns({x.new_zeros_symint(sizes)});
  }
  for (int64_t i = 0; i < filter.ndim(); ++i) {
    const auto d = filter.lead + i;
    const auto share = share_of(run, filter, i);
    const auto& read = share.reads.inside;
    const auto along = weights_of(run, filter, i, share.makes, out.options());
    at::Tensor sum;
    for (int64_t tap = 0; tap < along.weights.size(1); ++tap) {
      const auto at = along.first.add(tap - read.start).clamp(0, read.length - 1);
      const auto part = out.index_select(d, at).mul(column_of(along.weights, tap, d, out.dim()));
      sum = sum.defined() ? sum.add(part) : part;
    }
    out = sum;
  }
  run.returns({out.to(x.scalar_type())});
}

// The transposed map: each result's gradient goes to the elements that it read.
void backward_kernel(KernelRun& run) {
  const auto& filter = kernel_data<SeparableFilter>(run.solution);
  const auto grad = run.arg(0).toTensor();
  const auto sizes = sizes_of_piece(run);
  auto out = grad.to(accumulate_type(grad.scalar_type()));
  const auto of_results = [&](int64_t i, const Interval& of) {
    return (filter.counts ? weights_of_counts : weights_of)(run, filter, i, of, out.options());
  };
  if (is_empty(grad) || has_no_elements(sizes)) {
    of_results(0, {0, 0});
    return run.returns({grad.new_zeros_symint(sizes)});
  }
  for (int64_t i = 0; i < filter.ndim(); ++i) {
    const auto d = filter.lead + i;
    const auto share = share_of(run, filter, i);
    const auto& mine = share.makes;
    const auto along = of_results(i, share.reads.inside);
    auto sum_sizes = out.sizes().vec();
    sum_sizes[d] = mine.length;
    auto sum = out.new_zeros(sum_sizes);
    for (int64_t tap = 0; tap < along.weights.size(1); ++tap) {
      const auto at = along.first.add(tap - mine.start);
      const auto here = at::logical_and(at::ge(at, 0), at::lt(at, mine.length)).unsqueeze(1);
      const auto weights = column_of(along.weights.narrow(1, tap, 1).mul(here), 0, d, out.dim());
      sum = sum.index_add(d, at.clamp(0, mine.length - 1), out.mul(weights));
    }
    out = sum;
  }
  run.returns({out.to(grad.scalar_type())});
}

} // namespace

c10::OperatorHandle forward_op(const KernelRun& run) {
  const std::string suffix = "_backward";
  auto name = run.op.schema().name();
  if (name.size() > suffix.size() && name.compare(name.size() - suffix.size(), suffix.size(), suffix) == 0) {
    name.resize(name.size() - suffix.size());
  }
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
}

void add_separable_filter(Rule& rule, SymSizes sizes, SeparableFilter filter) {
  read_through(rule, filter, std::move(sizes));
  rule.operands[0].padding = std::nullopt;
  rule.always(filter.reversed ? backward_kernel : forward_kernel);
  rule.kernel_if = nullptr;
  rule.kernel_data = std::move(filter);
}

} // namespace shardtensor::rules
