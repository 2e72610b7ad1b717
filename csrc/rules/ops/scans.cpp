// Ops along a dim that keep the dim: cumsum and similar scans, sort, topk. A scan along a sharded dim runs on each piece and
// then adds the totals of the pieces before it: one slice per rank is gathered, never the data.
#include "redistribute/neutral_value.h"
#include "rules/exact_dtypes.h"
#include "rules/kernel_utils.h"
#include "rules/registry.h"

#include "comm/comm.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <limits>

namespace shardtensor::rules {

namespace {

// `n` operands and every result have the dims of the first one. Factor d is dim d; `f` is the factor of the scanned dim.
Rule along(const Call& call, const Factor& f, size_t operands = 1) {
  Rule rule;
  const auto ndim = call.tensors[0].dim(), dim = call.dim(argument(call, "dim"), ndim);
  const auto dims = dims_along(rule, ndim, dim, f);
  rule.operands.assign(operands, Operand(dims));
  rule.results.assign(call.schema.returns().size(), Result(dims));
  add_outputs(call, rule);
  rule.kernel_data = WorkDim{dim};
  return rule;
}

// ---- scans ----

// The combined total of all pieces before this rank's. `combine` reduces slices joined along `dim` to one; `nothing` is its
// neutral slice. Later mesh dims cut the pieces of earlier ones, so they are combined first.
// `after`: of the pieces after this rank's.
template <typename Combine>
at::Tensor before_me(
    at::Tensor total, const at::Tensor& nothing, int64_t dim, const KernelRun& run, Combine combine, bool after = false) {
  const auto& mesh = run.mesh();
  auto out = nothing;
  for (int64_t m = mesh.ndim() - 1; m >= 0; --m) {
    if (!(run.mesh_dims(dim) >> m & 1)) {
      continue;
    }
    const auto totals = gather_slices(total, dim, mesh, m);
    const auto mine = mesh.coordinate()[m];
    const auto others = combine(after ? totals.narrow(dim, mine + 1, mesh.size(m) - mine - 1) : totals.narrow(dim, 0, mine));
    out = combine(at::cat({others, out}, dim));
    total = combine(totals);
  }
  return out;
}

// The last slice of a scan; of one that goes backwards the first.
at::Tensor end_slice(const at::Tensor& scan, const at::Tensor& nothing, int64_t dim, bool first = false) {
  const auto n = scan.sym_size(dim);
  return n == 0 ? nothing : scan.narrow_symint(dim, first ? c10::SymInt(0) : n - 1, 1);
}

at::Tensor slice_of(const at::Tensor& scan, int64_t dim, const at::Scalar& value) {
  auto sizes = scan.sym_sizes().vec();
  sizes[dim] = 1;
  return at::full_symint(sizes, value, scan.options());
}

std::optional<at::ScalarType> dtype_of(const KernelRun& run) {
  const auto& given = run.arg(argument(run, "dtype"));
  return given.isNone() ? std::nullopt : std::optional(given.toScalarType());
}

// A piece's running sums, plus the totals of the pieces before it. `after`: sums of each index and all that follow.
at::Tensor with_sums(at::Tensor scan, int64_t dim, const KernelRun& run, bool after = false) {
  const auto nothing = slice_of(scan, dim, 0);
  const auto sum = [&](const at::Tensor& t) { return at::sum(t, {dim}, true, scan.scalar_type()); };
  return scan.add_(before_me(end_slice(scan, nothing, dim, after), nothing, dim, run, sum, after));
}

at::Tensor with_products(at::Tensor scan, int64_t dim, const KernelRun& run) {
  const auto nothing = slice_of(scan, dim, 1);
  const auto product = [&](const at::Tensor& t) { return at::prod(t, dim, true, scan.scalar_type()); };
  return scan.mul_(before_me(end_slice(scan, nothing, dim), nothing, dim, run, product));
}

void cumsum_kernel(KernelRun& run) {
  const auto dim = kernel_data<WorkDim>(run.solution).dim;
  return_results(run, {with_sums(at::cumsum(run.arg(0).toTensor(), dim, dtype_of(run)), dim, run)});
}

void cumprod_kernel(KernelRun& run) {
  const auto dim = kernel_data<WorkDim>(run.solution).dim;
  return_results(run, {with_products(at::cumprod(run.arg(0).toTensor(), dim, dtype_of(run)), dim, run)});
}

// ---- their gradients ----

// Sums of each index and all after it: the gradient of cumsum.
at::Tensor suffix_sum(const at::Tensor& t, int64_t dim) {
  return t.flip(dim).cumsum(dim).flip(dim);
}

void suffix_sum_kernel(KernelRun& run) {
  const auto dim = kernel_data<WorkDim>(run.solution).dim;
  run.returns({with_sums(suffix_sum(run.arg(0).toTensor(), dim), dim, run, /*after=*/true)});
}

// (grad, input, dim, output). Before the first zero of a line, each product is divided by the element. At the zero, the sum goes
// over the products up to the next zero, without this one. Behind it all products are zero whatever the element.
void cumprod_backward_kernel(KernelRun& run) {
  const auto dim = kernel_data<WorkDim>(run.solution).dim;
  const auto grad = run.arg(0).toTensor(), input = run.arg(1).toTensor(), output = run.arg(3).toTensor();
  const auto zero = input.eq(0);
  const auto zeros = with_sums(zero.to(at::kLong).cumsum(dim), dim, run); // up to here
  const auto in_front = zeros.eq(0), first = zero.logical_and(zeros.eq(1));
  const auto weighed = output.conj().mul(grad).masked_fill(in_front.logical_not(), 0);
  const auto sums = with_sums(suffix_sum(weighed, dim), dim, run, /*after=*/true);
  const auto others = with_products(input.masked_fill(first, 1).cumprod(dim), dim, run); // without the first zero
  const auto at_first = others.conj().mul(grad).masked_fill(zeros.ne(1), 0).sum({dim}, true, grad.scalar_type());
  const auto total = over_ranks(at_first, run, run.mesh_dims(dim), ReduceOp::Sum);
  const auto in = sums.div(input.masked_fill(zero, 1).conj());
  run.returns({at::where(in_front, in, at::where(first, total, at::zeros({}, in.options())))});
}

// (grad, input, indices, dim): gradients are added at the places of the running extremes. If such a place is in an earlier
// piece, it is always the same one: the best before this piece. So each rank tells the others one sum and its index.
void cumulative_extreme_backward_kernel(KernelRun& run) {
  const auto dim = kernel_data<WorkDim>(run.solution).dim;
  const auto grad = run.arg(0).toTensor(), input = run.arg(1).toTensor(), index = run.arg(2).toTensor();
  const auto piece = mine(run, 1, dim);
  const at::Scalar start(piece.start), end(piece.end());
  auto out = at::zeros_like(input, input.options().dtype(grad.scalar_type()));
  const auto add = [&](const at::Tensor& values, const at::Tensor& at) {
    const auto here = at.ge(start).logical_and(at.lt(end));
    out = out.scatter_add(dim, at.sub(start).masked_fill(here.logical_not(), 0), values.masked_fill(here.logical_not(), 0));
  };
  const bool none = is_empty(input);
  if (!none) {
    add(grad, index);
  }
  const auto earlier = index.lt(start);
  auto sums = grad.masked_fill(earlier.logical_not(), 0).sum({dim}, true, grad.scalar_type());
  auto places = extreme(index.masked_fill(earlier.logical_not(), -1), {dim}, ReduceOp::Max);
  for (int64_t m = run.mesh().ndim() - 1; m >= 0; --m) {
    if (run.mesh_dims(dim) >> m & 1) {
      sums = gather_slices(sums, dim, run.mesh(), m);
      places = gather_slices(places, dim, run.mesh(), m);
    }
  }
  if (!none) {
    add(sums, places);
  }
  run.returns({out});
}

void logcumsumexp_kernel(KernelRun& run) {
  const auto dim = kernel_data<WorkDim>(run.solution).dim;
  const auto scan = at::logcumsumexp(run.arg(0).toTensor(), dim);
  const auto nothing = slice_of(scan, dim, -std::numeric_limits<double>::infinity());
  const auto sum = [&](const at::Tensor& t) { return t.size(dim) ? at::logsumexp(t, {dim}, true) : nothing; };
  return_results(run, {at::logaddexp(scan, before_me(end_slice(scan, nothing, dim), nothing, dim, run, sum))});
}

// The running extreme and its index. Earlier pieces win only if they are strictly better, or NaN.
template <ReduceOp op>
void cumulative_extreme_kernel(KernelRun& run) {
  const auto dim = kernel_data<WorkDim>(run.solution).dim;
  const auto x = run.arg(0).toTensor();
  const auto scan_of = [&](const at::Tensor& t) { return op == ReduceOp::Max ? at::cummax(t, dim) : at::cummin(t, dim); };
  auto [values, indices] = scan_of(x);
  indices = indices + at::Scalar(mine(run, 0, dim).start);
  const auto nothing = slice_of(values, dim, neutral_value(op, x.scalar_type()));
  const auto nowhere = slice_of(indices, dim, -1);
  auto value = end_slice(values, nothing, dim), index = end_slice(indices, nowhere, dim);
  at::Tensor before = nothing, where = nowhere;
  // Whether a value wins over one before it.
  const auto wins = [](const at::Tensor& value, const at::Tensor& over) {
    auto out = op == ReduceOp::Max ? value.ge(over) : value.le(over);
    return value.is_floating_point() ? out.logical_and_(over.isnan().logical_not_()).logical_or_(value.isnan()) : out;
  };
  // Reduces slices joined along dim to the last entry of their scan, ignoring slices of empty pieces.
  const auto combine = [&](const at::Tensor& v, const at::Tensor& i) {
    auto best_value = nothing, best_index = nowhere;
    for (int64_t k = 0; k < v.size(dim); ++k) {
      const auto next = v.narrow(dim, k, 1), at = i.narrow(dim, k, 1);
      const auto better = wins(next, best_value).logical_and_(at.ge(0));
      best_value = at::where(better, next, best_value);
      best_index = at::where(better, at, best_index);
    }
    return std::pair(best_value, best_index);
  };
  for (int64_t m = run.mesh().ndim() - 1; m >= 0; --m) {
    if (!(run.mesh_dims(dim) >> m & 1)) {
      continue;
    }
    const auto all_values = gather_slices(value, dim, run.mesh(), m);
    const auto all_indices = gather_slices(index, dim, run.mesh(), m);
    const auto mine = run.mesh().coordinate()[m];
    const auto earlier = combine(all_values.narrow(dim, 0, mine), all_indices.narrow(dim, 0, mine));
    std::tie(before, where) = combine(at::cat({earlier.first, before}, dim), at::cat({earlier.second, where}, dim));
    std::tie(value, index) = combine(all_values, all_indices);
  }
  const auto stays = wins(values, before).logical_or_(where.lt(0));
  return_results(run, {at::where(stays, values, before), at::where(stays, indices, where)});
}

// The dtype in which a sum or product along a dim is computed.
at::ScalarType scanned_in(const Call& call) {
  const auto self = call.tensors[0].dtype;
  const auto arg = argument(call, "dtype");
  const auto dtype = call.tensors.size() > 1                   ? call.tensors[1].dtype
                     : call.schema.arguments()[0].alias_info() ? self
                     : call.has(arg)                           ? call.arg(arg).toScalarType()
                     : c10::isIntegralType(self, true)         ? at::kLong
                                                               : self;
  TORCH_CHECK_NOT_IMPLEMENTED(dtype != at::kBool, call.schema.name(), ": not implemented for '", dtype, "'");
  return dtype;
}

template <Kernel kernel>
Rule scan(const Call& call) {
  auto rule = along(call, {.kernel = true});
  rule.kernel = kernel;
  return rule;
}

Rule cumsum(const Call& call) {
  auto rule = scan<cumsum_kernel>(call);
  rule.linear.push_back(adds(call, 1, scanned_in(call)));
  return rule;
}

Rule cumprod(const Call& call) {
  scanned_in(call);
  return scan<cumprod_kernel>(call);
}

// A complex logarithm's branch depends on the order of the sums.
Rule logcumsumexp(const Call& call) {
  auto rule = along(call, {.whole = c10::isComplexType(call.tensors[0].dtype), .kernel = true});
  rule.kernel = logcumsumexp_kernel;
  return rule;
}

// ---- sorts ----

// Whole along the dim; other dims may be cut.
Rule sort(const Call& call) {
  return along(call, {.whole = true});
}

// Each piece's best k are candidates; only these are gathered.
void topk_kernel(KernelRun& run) {
  const auto x = run.arg(0).toTensor();
  const auto k = run.arg(1).toInt();
  const auto dim = kernel_data<WorkDim>(run.solution).dim;
  const bool largest = run.arg(3).toBool();
  const bool sorted = run.arg(4).toBool();
  const auto& at = run.operands[0];
  const auto few = [&](const c10::SymInt& n) { return n < k ? n : c10::SymInt(k); };
  TORCH_CHECK_INDEX(k >= 0 && at.symbols[dim] >= k, "selected index k out of range");
  auto [values, indices] = at::topk_symint(x, few(x.sym_size(dim)), dim, largest, sorted);
  indices = indices + at::Scalar(mine(run, 0, dim).start);
  for (int64_t m = run.mesh().ndim() - 1; m >= 0; --m) {
    if (!(run.mesh_dims(dim) >> m & 1)) {
      continue;
    }
    // The number of candidates of each coordinate along m: the indices of the dim that it and the later mesh dims hold, at
    // most k.
    auto coordinate = run.mesh().coordinate();
    std::vector<at::Tensor> all_values, all_indices;
    for (coordinate[m] = 0; coordinate[m] < run.mesh().size(m); ++coordinate[m]) {
      auto sizes = values.sym_sizes().vec();
      sizes[dim] = few(sym_extent_before(*at.layout, m + 1, dim, at.symbols[dim], coordinate));
      all_values.push_back(at::empty_symint(sizes, values.options()));
      all_indices.push_back(at::empty_symint(sizes, indices.options()));
    }
    comm::all_gather(all_values, values.contiguous(), run.mesh(), m);
    comm::all_gather(all_indices, indices.contiguous(), run.mesh(), m);
    const auto candidates = at::cat(all_values, dim);
    const auto positions = at::cat(all_indices, dim);
    at::Tensor best;
    std::tie(values, best) = at::topk_symint(candidates, few(candidates.sym_size(dim)), dim, largest, sorted);
    indices = positions.gather(dim, best);
  }
  return_results(run, {values, indices});
}

Rule topk(const Call& call) {
  auto rule = scan<topk_kernel>(call);
  const auto dim = kernel_data<WorkDim>(rule).dim;
  for (auto& r : rule.results) {
    if (!r.dims.empty()) {
      r.dims[dim] = kNone;
    }
  }
  for (size_t i = 1; i < rule.operands.size(); ++i) {
    rule.operands[i].dims = rule.results[0].dims;
  }
  return rule;
}

// ---- gradients ----

// Writes grad at the indices along a whole dim; other dims may be cut. The sizes are an argument.
Rule value_selecting_reduction_backward(const Call& call) {
  Rule rule;
  const auto sizes = call.sym_ints(argument(call, "sizes"));
  const auto ndim = static_cast<int64_t>(sizes.size());
  const auto dim = call.dim(argument(call, "dim"), ndim);
  const bool keepdim = call.flag(argument(call, "keepdim"));
  const auto out = dims_beside(rule, ndim, dim);
  auto in = out;
  if (!keepdim && ndim > 0) {
    in.erase(in.begin() + dim);
  }
  rule.operands.assign(2, Operand(in));
  rule.results.emplace_back(out, sizes);
  rule.sizes_arg = static_cast<int16_t>(argument(call, "sizes"));
  rule.linear_in({0});
  return rule;
}

// grad, input and indices or output have the same dims; linear in grad.
template <Kernel kernel>
Rule scan_backward(const Call& call) {
  auto rule = along(call, {.kernel = true}, 3);
  rule.linear_in({0});
  rule.kernel = kernel;
  return rule;
}

TORCH_LIBRARY_FRAGMENT(shardtensor, m) {
  m.def("suffix_sum(Tensor self, int dim) -> Tensor");
  m.impl("suffix_sum", c10::DispatchKey::CompositeExplicitAutograd, suffix_sum);
}

// ---- search ----

// The sorted sequence is whole along its last dim; its other dims are those of the values.
Rule searchsorted(const Call& call) {
  Rule rule;
  const auto sequence = call.operand(0);
  const auto values = call.operand(1);
  Dims in;
  const auto n = call.tensors[sequence].dim();
  const auto out = fresh_dims(rule, values < 0 ? 0 : call.tensors[values].dim());
  for (int64_t d = 0; d < n; ++d) {
    in.push_back(d + 1 < n && d < static_cast<int64_t>(out.size()) ? out[d] : Dim(kNone));
  }
  const auto sorter = call.operand(argument(call, "sorter"));
  rule.results.emplace_back(out);
  for (int64_t i = 0; i < static_cast<int64_t>(call.tensors.size()); ++i) {
    if (i == sequence || i == sorter) {
      rule.operands.emplace_back(in);
    } else if (i == values) {
      rule.operands.emplace_back(out);
    }
  }
  add_outputs(call, rule);
  return rule;
}

Rule bucketize(const Call& call) {
  Rule rule;
  const auto values = call.operand(0);
  const auto out = fresh_dims(rule, values < 0 ? 0 : call.tensors[values].dim());
  rule.results.emplace_back(out);
  if (values >= 0) {
    rule.operands.emplace_back(out);
  }
  rule.operands.emplace_back(Dims(1, Dim(kNone)));
  add_outputs(call, rule);
  return rule;
}

// Counts of pieces add up if the bounds do not depend on the values.
Rule histc(const Call& call) {
  const auto low = call.arg(argument(call, "min")).toScalar().toDouble();
  const auto high = call.arg(argument(call, "max")).toScalar().toDouble();
  Rule rule;
  rule.operands.emplace_back(fresh_dims(rule, call.tensors[0].dim(), {.whole = low >= high, .reduce = ReduceOp::Sum}));
  rule.results.emplace_back(Dims(1, Dim(kNone)));
  add_outputs(call, rule);
  return rule;
}

at::ScalarType dtype_of_counts(at::ScalarType weights) {
  return weights == at::kFloat ? at::kFloat : at::kDouble;
}

// Counts of pieces add up if they have one length, which the greatest value of all pieces decides.
void bincount_kernel(KernelRun& run) {
  const auto x = run.arg(0).toTensor();
  const auto minlength = run.arg(2).toInt();
  if (minlength < 0 || run.operands[0].size(0) == 0) {
    return run.call_op(); // refused by all ranks; or nothing to count
  }
  const auto own = extreme(x.to(at::kLong), {0}, ReduceOp::Max).add(1).clamp_min(minlength);
  const auto length = over_ranks(own, run, mesh_dims_of(run, kAllFactors), ReduceOp::Max).item().toSymInt();
  if (!is_empty(x) && !is_traced(x)) {
    run.arg(2) = length;
    return run.call_op();
  }
  // torch's op returns an empty piece's counts in another dtype, and in a graph as many as a symbol of its own says.
  const auto weights = run.arg(1).toOptional<at::Tensor>();
  const auto dtype = weights ? dtype_of_counts(weights->scalar_type()) : at::kLong;
  const auto added = weights ? weights->to(dtype) : at::ones_like(x, dtype);
  run.returns({at::zeros_symint({length}, x.options().dtype(dtype)).scatter_add(0, x.to(at::kLong), added)});
}

// (self, weights?, minlength)
Rule bincount(const Call& call) {
  Rule rule;
  const auto number = rule.factor({.kernel = true, .reduce = ReduceOp::Sum});
  for (const auto& t : call.tensors) {
    if (t.dim() != 1) {
      return replicate(call); // the op says what is wrong
    }
    rule.operands.emplace_back(Dims{Dim(number)});
  }
  if (call.tensors.size() > 1) {
    rule.linear.push_back(computes(call, 0b10, dtype_of_counts(call.tensors[1].dtype)));
  }
  rule.results.emplace_back(Dims{Dim(kNone)}); // the sum over the ranks is left for later
  rule.kernel = bincount_kernel;
  return rule;
}

struct Columns {
  int64_t number; // 0: of one dim, whatever the shape
};

// (self, bins, range?, weight?, density). Without a range, torch takes the least and the greatest of all values, for each
// column of histogramdd. So these two are added to every piece, with weight 0.
void histogram_kernel(KernelRun& run) {
  const auto range = argument(run, "range"), weight = argument(run, "weight");
  const auto x = run.arg(0).toTensor();
  if (range >= 0 && run.arg(range).isNone() && c10::multiply_integers(run.operands[0].sizes())) {
    const auto columns = kernel_data<Columns>(run.solution).number;
    const auto values = x.reshape({columns ? x.numel() / columns : x.numel(), std::max<int64_t>(columns, 1)});
    const auto outermost = [&](ReduceOp op) {
      return over_ranks(extreme(values, {0}, op), run, mesh_dims_of(run, kAllFactors), op);
    };
    const auto least = outermost(ReduceOp::Min), greatest = outermost(ReduceOp::Max);
    const auto weights = run.arg(weight).isNone() ? at::ones(values.size(0), x.options()) : run.arg(weight).toTensor().flatten();
    const auto all = at::cat({values, least, greatest});
    run.arg(0) = columns ? all : all.flatten();
    run.arg(weight) = at::cat({weights, at::zeros(2, weights.options())});
  }
  run.call_op();
}

// Counts of pieces add up; a density is divided by all of them. histogramdd's last dim has the columns.
template <bool dd>
Rule histogram(const Call& call) {
  const auto& x = call.tensors[0];
  if (dd && x.dim() < 2) {
    return replicate(call); // the op says what is wrong
  }
  Rule rule;
  const bool whole = call.flag(argument(call, "density"));
  const auto samples = fresh_dims(rule, x.dim() - dd, {.whole = whole, .kernel = true, .reduce = ReduceOp::Sum});
  auto in = samples;
  if (dd) {
    in.emplace_back(kNone);
  }
  const auto columns = dd ? x.size(x.dim() - 1) : 1;
  for (const auto& t : call.tensors) {
    rule.operands.emplace_back(t.arg == 0 ? in : t.arg == argument(call, "weight") ? samples : Dims(t.dim(), Dim(kNone)));
  }
  for (const auto& r : call.schema.returns()) {
    const bool edges = r.name() == "bin_edges" || r.type()->kind() == c10::TypeKind::ListType;
    for (int64_t i = 0; i < (dd && edges ? columns : 1); ++i) {
      auto& result = rule.results.emplace_back(Dims(edges ? 1 : columns, Dim(kNone)));
      if (edges) {
        result.reduce.emplace(std::nullopt); // the same on all ranks
      }
    }
  }
  rule.kernel = histogram_kernel;
  rule.kernel_data = Columns{dd ? columns : 0};
  return rule;
}

} // namespace

void register_scans(Registry& r) {
  const Options ordered{.takes = kAllNumbers & ~kComplex}, searched{.takes = kIntegers | kReals};
  const Options cumulative{.symbols = true, .takes = ordered.takes};
  const char* family = "scans";
  r.add(family, {"_unique", "_unique2", "unique_consecutive", "unique_dim", "unique_dim_consecutive"}, replicate);
  r.add(family, {"bincount"}, bincount, {.takes = kIntegers});
  r.add(family, {"bucketize.Scalar", "bucketize.Scalar_out", "bucketize.Tensor", "bucketize.Tensor_out"}, bucketize, searched);
  r.add(family, {"cummax", "cummax.out"}, scan<cumulative_extreme_kernel<ReduceOp::Max>>, cumulative);
  r.add(family, {"cummin", "cummin.out"}, scan<cumulative_extreme_kernel<ReduceOp::Min>>, cumulative);
  r.add(
      family, {"cummaxmin_backward"}, scan_backward<cumulative_extreme_backward_kernel>,
      {.autograd = formulas::cummaxmin_backward, .symbols = true});
  r.add(family, {"cumprod", "cumprod.out", "cumprod_"}, cumprod, {.symbols = true});
  r.add(
      family, {"cumprod_backward"}, scan_backward<cumprod_backward_kernel>,
      {.autograd = formulas::cumprod_backward, .symbols = true});
  r.add(family, {"cumsum"}, cumsum, {.autograd = formulas::cumsum, .symbols = true});
  r.add(family, {"cumsum.out", "cumsum_"}, cumsum, {.symbols = true});
  r.add(
      family, {"_histogramdd_bin_edges", "_histogramdd_from_bin_cts", "_histogramdd_from_bin_tensors"}, histogram<true>, ordered);
  r.add(family, {"histc", "histc.out"}, histc);
  r.add(family, {"histogram.bin_ct", "histogram.bins_tensor"}, histogram<false>, ordered);
  r.add(family, {"_logcumsumexp", "_logcumsumexp.out", "logcumsumexp", "logcumsumexp.out"}, logcumsumexp, {.symbols = true});
  r.add(
      family, {"searchsorted.Scalar", "searchsorted.Scalar_out", "searchsorted.Tensor", "searchsorted.Tensor_out"}, searchsorted,
      searched);
  r.add(family, {"shardtensor::suffix_sum"}, linear_in_first<scan<suffix_sum_kernel>>, {.symbols = true});
  r.add(family, {"sort", "sort.stable", "sort.values", "sort.values_stable"}, sort);
  r.add(family, {"topk", "topk.values"}, topk, {.symbols = true});
  r.add(
      family, {"value_selecting_reduction_backward"}, value_selecting_reduction_backward,
      {.autograd = formulas::value_selecting_reduction_backward, .symbols = true});
  r.add(family, {"vander"}, kAsOtherOps, {.autograd = formulas::vander});
}

} // namespace shardtensor::rules
