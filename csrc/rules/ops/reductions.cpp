// Reductions: the reduced dims are factors that the result lacks. If the reduction can be finished later (sum, max, norm), the
// result is Partial; else a kernel combines small tensors. A piece may be empty: kernels use the neutral value for it.
#include "redistribute/neutral_value.h"
#include "rules/exact_dtypes.h"
#include "rules/kernel_utils.h"
#include "rules/registry.h"

#include <ATen/ATen.h>
#include "comm/tensor_kind.h"

#include <cmath>
#include <limits>

namespace shardtensor::rules {

namespace {

// The dims (bits) that the argument `dim` names; all if it is None or empty.
uint64_t reduced_dims(const Call& call, int64_t ndim) {
  const auto arg = argument(call, "dim");
  if (arg < 0 || !call.has(arg)) {
    return kAllFactors;
  }
  uint64_t mask = 0;
  const auto dims = call.ints(arg);
  for (auto d : dims) {
    const auto named = uint64_t{1} << wrap_dim(d, ndim);
    TORCH_CHECK(!(mask & named), "dim ", wrap_dim(d, ndim), " appears multiple times in the list of dims");
    mask |= named;
  }
  return dims.empty() ? kAllFactors : mask;
}

// The kernel's data of a rule made by reduce().
struct ReductionSpec {
  uint64_t dims; // bits
  bool keepdim;
  c10::SmallVector<at::Scalar, 2> neutral{};    // per result: its value for an empty piece
  std::optional<at::ScalarType> neutral_type{}; // if not the operand's, or as the call says
  ReduceOp extreme = ReduceOp::Max;             // of max, argmax and the like
  bool flat = false;                            // argmax, argmin: without a dim
  bool root = false, with_mean = false;         // for var and std
};

// One operand; the reduced dims have factors like `f`. Factor d is the operand's dim d.
Rule reduce(const Call& call, const Factor& f, uint64_t mask) {
  Rule rule;
  const auto& x = call.tensors[0];
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
  rule.results.assign(call.schema.returns().size(), Result(out));
  add_outputs(call, rule);
  rule.kernel_data = ReductionSpec{mask, keepdim};
  return rule;
}

Rule reduce(const Call& call, const Factor& f) {
  return reduce(call, f, reduced_dims(call, call.tensors[0].dim()));
}

void passes(const Call& call, Rule& rule, uint32_t reductions, double norm_order = 2.0) {
  rule.linear.push_back({.operands = with_outputs(call, 1), .reductions = reductions, .norm_order = norm_order});
}

// The input of a kernel of a rule made by reduce().
struct ReductionInput {
  at::Tensor x;
  c10::SymIntArrayRef sizes; // global
  const ReductionSpec& how;
  Sizes dims;
  uint64_t mesh_dims;

  explicit ReductionInput(KernelRun& run)
      : x(run.arg(0).toTensor()),
        sizes(run.operands[0].symbols),
        how(kernel_data<ReductionSpec>(run.solution)),
        dims(dims_in(how.dims, x.dim())),
        mesh_dims(mesh_dims_of(run, how.dims)) {}

  c10::SymInt count() const {
    return count_along(x.sym_sizes(), dims);
  }
  c10::SymInt global_count() const {
    return count_along(sizes, dims);
  }
  // If the whole is empty, torch's own error is right; if only this piece is, the kernel uses the neutral value.
  bool only_this_piece_is_empty() const {
    return count() == 0 && global_count() > 0;
  }
  SymSizes result_sizes() const {
    SymSizes out;
    for (int64_t d = 0; d < x.dim(); ++d) {
      const bool reduced = std::find(dims.begin(), dims.end(), d) != dims.end();
      if (!reduced || how.keepdim) {
        out.push_back(reduced ? c10::SymInt(1) : x.sym_size(d));
      }
    }
    return out;
  }
};

// The result of an empty piece, for which torch raises or has another value.
void neutral_kernel(KernelRun& run) {
  const ReductionInput r(run);
  if (!r.only_this_piece_is_empty()) {
    return run.call_op();
  }
  const auto arg = argument(run, "dtype");
  const auto given = arg >= 0 ? run.arg(arg).toOptional<at::ScalarType>() : std::nullopt;
  const auto dtype = r.how.neutral_type.value_or(given.value_or(r.x.scalar_type()));
  std::vector<at::Tensor> out;
  for (const auto& value : r.how.neutral) {
    out.push_back(at::full_symint(r.result_sizes(), value, r.x.options().dtype(c10::toRealValueType(dtype))));
  }
  return_results(run, out);
}

// The rule with these values for empty pieces.
Rule with_neutral(Rule rule, c10::SmallVector<at::Scalar, 2> values) {
  kernel_data<ReductionSpec>(rule).neutral = std::move(values);
  rule.kernel = neutral_kernel;
  rule.kernel_if = is_empty;
  return rule;
}

// ---- sums ----

std::optional<at::ScalarType> dtype_argument(const Call& call) {
  const auto arg = argument(call, "dtype");
  return arg >= 0 && call.has(arg) ? std::optional(call.arg(arg).toScalarType()) : std::nullopt;
}

// In which dtype a sum or product is computed.
at::ScalarType computed_in(const Call& call) {
  const auto from = call.tensors[0].dtype;
  return dtype_argument(call).value_or(c10::isIntegralType(from, true) ? at::kLong : from);
}

// Sums of pieces add up. But summands do not pass: a value skipped in a summand (NaN, zero) may count in the sum.
Rule counted(const Call& call) {
  return reduce(call, {.reduce = ReduceOp::Sum});
}

Rule summed(const Call& call, bool by_kernel) {
  auto rule = reduce(call, {.kernel = by_kernel, .reduce = ReduceOp::Sum});
  rule.linear.push_back(adds(call, with_outputs(call, 1), computed_in(call)));
  return rule;
}

Rule sum(const Call& call) {
  return summed(call, false);
}

// Sums locally and divides by the global count, so pieces may have any size.
void mean_kernel(KernelRun& run) {
  const ReductionInput r(run);
  const auto& given = run.arg(argument(run, "dtype"));
  const auto dtype = given.isNone() ? r.x.scalar_type() : given.toScalarType();
  TORCH_CHECK(
      c10::isFloatingType(dtype) || c10::isComplexType(dtype),
      "mean(): could not infer output dtype. Input dtype must be either a floating point or complex dtype. Got: ", dtype);
  auto total = at::sum(r.x, r.dims, r.how.keepdim, accumulate_type(dtype));
  return_results(run, {total.div_(at::Scalar(r.global_count())).to(dtype)});
}

Rule mean(const Call& call) {
  auto rule = summed(call, true);
  rule.kernel = mean_kernel;
  return rule;
}

// Backends cannot multiply complex numbers over ranks.
Rule prod(const Call& call) {
  const bool whole = c10::isComplexType(dtype_argument(call).value_or(call.tensors[0].dtype));
  auto rule = reduce(call, {.whole = whole, .reduce = ReduceOp::Product});
  if (moves(call, with_outputs(call, 1), computed_in(call)).any_reduction) { // casts nothing
    passes(call, rule, bit(ReduceOp::Product));
  }
  return rule;
}

// ---- extremes ----

template <ReduceOp op>
Rule extreme_of(const Call& call) {
  auto rule = with_neutral(reduce(call, {.reduce = op}), {neutral_value(op, call.tensors[0].dtype)});
  passes(call, rule, bit(op));
  return rule;
}

Rule aminmax(const Call& call) {
  constexpr ReduceOp ops[] = {ReduceOp::Min, ReduceOp::Max};
  const auto dtype = call.tensors[0].dtype;
  auto rule = with_neutral(reduce(call, {.reduce = ops[1]}), {neutral_value(ops[0], dtype), neutral_value(ops[1], dtype)});
  for (size_t i = 0; i < 2; ++i) {
    rule.results[i].reduce.emplace(ops[i]);
    if (rule.operands.size() > 1) {
      rule.operands[1 + i].reduce.emplace(ops[i]);
    }
  }
  return rule;
}

// any and all. The results are bool (uint8 for uint8), 0 or 1. An empty list of dims reduces nothing.
template <ReduceOp op>
Rule truth(const Call& call) {
  const auto arg = argument(call, "dim");
  const bool none = arg >= 0 && call.has(arg) && call.arg(arg).isIntList() && call.ints(arg).empty();
  const auto& x = call.tensors[0];
  auto rule = reduce(call, {.reduce = op}, none ? 0 : reduced_dims(call, x.dim()));
  if (x.dtype == at::kBool) {
    passes(call, rule, bit(op));
  }
  return rule;
}

// ---- the extreme value and its index ----

struct Winner {
  at::Tensor value, index; // index: the largest integer if there is none
};

Winner best_along(const at::Tensor& x, int64_t dim, ReduceOp op) {
  if (x.sym_size(dim) == 0) {
    auto value = extreme(x, {dim}, op);
    auto index = at::full_like(value, std::numeric_limits<int64_t>::max(), x.options().dtype(at::kLong));
    return {std::move(value), std::move(index)};
  }
  auto [value, index] = op == ReduceOp::Max ? at::max(x, dim, true) : at::min(x, dim, true);
  return {value, index};
}

// The best value over ranks, and its first index: two small reductions. NaN beats every number, as in torch.
Winner best_of(const Winner& mine, const KernelRun& run, uint64_t mesh_dims, ReduceOp op) {
  auto value = over_ranks(mine.value.clone(), run, mesh_dims, op);
  auto stands = mine.value.eq(value);
  if (value.is_floating_point()) {
    stands.logical_or_(mine.value.isnan().logical_and_(value.isnan()));
  }
  auto index = at::where(stands, mine.index, std::numeric_limits<int64_t>::max());
  return {std::move(value), over_ranks(index, run, mesh_dims, ReduceOp::Min)};
}

// Converts local flat indices to global ones.
at::Tensor to_global(const at::Tensor& flat, const ReductionInput& r, const KernelRun& run) {
  auto rest = flat;
  auto out = at::zeros_like(flat);
  c10::SymInt stride = 1;
  for (int64_t d = r.x.dim() - 1; d >= 0; --d) {
    const at::Scalar length(r.x.sym_size(d));
    out.add_(rest.remainder(length).add_(at::Scalar(mine(run, 0, d).start)), at::Scalar(stride));
    rest = rest.div(length, "floor");
    stride = stride * r.sizes[d];
  }
  return out;
}

// The index of the extreme value along a dim, or (`flat`) of all; before it the value, if the op returns it.
void best_kernel(KernelRun& run) {
  const ReductionInput r(run);
  if (r.global_count() == 0) {
    return run.call_op();
  }
  const auto op = r.how.extreme;
  const bool flat = r.how.flat;
  auto local = flat ? best_along(r.x.reshape({-1}), 0, op) : best_along(r.x, r.dims[0], op);
  if (flat && r.count() != 0) {
    local.index = to_global(local.index, r, run);
  } else if (r.count() != 0) {
    local.index.add_(at::Scalar(mine(run, 0, r.dims[0]).start));
  }
  const auto best = best_of(local, run, r.mesh_dims, op);
  const auto shaped = [&](const at::Tensor& t) {
    return flat ? t.reshape_symint(r.result_sizes()) : squeeze_dims(t, r.dims, r.how.keepdim);
  };
  const bool with_value = run.op.schema().returns().size() == 2;
  return_results(run, with_value ? std::vector{shaped(best.value), shaped(best.index)} : std::vector{shaped(best.index)});
}

template <ReduceOp op>
Rule best(const Call& call) {
  auto rule = reduce(call, {.kernel = true});
  rule.kernel = best_kernel;
  kernel_data<ReductionSpec>(rule).extreme = op;
  kernel_data<ReductionSpec>(rule).flat = !call.has(argument(call, "dim"));
  return rule;
}

// median, mode, kthvalue: whole along the dim.
Rule in_order(const Call& call) {
  return reduce(call, {.whole = true});
}

// ---- norms ----

double norm_order(const Call& call) {
  const auto ord = argument(call, "ord");
  const auto arg = ord < 0 ? argument(call, "p") : ord;
  return arg >= 0 && call.has(arg) ? call.arg(arg).toScalar().toDouble() : 2.0;
}

Rule norm(const Call& call) {
  const auto order = norm_order(call);
  const auto f = normed(order);
  auto rule = with_neutral(reduce(call, f), {order < 0 ? std::numeric_limits<double>::infinity() : 0.0});
  if (f.reduce == ReduceOp::Norm) {
    passes(call, rule, bit(ReduceOp::Norm), order);
  }
  return rule;
}

// The sum of |x|^ord, without the root.
Rule power_sum(const Call& call) {
  return reduce(call, {.reduce = ReduceOp::Sum});
}

// Scales each slice along a dim down to a maximal norm. Argument `dim` is the dim that is not reduced.
void renorm_kernel(KernelRun& run) {
  const auto x = run.arg(0).toTensor();
  const auto p = run.arg(1).toScalar().toDouble();
  const auto limit = run.arg(3).toScalar().toDouble();
  const auto mask = kernel_data<ReductionSpec>(run.solution).dims;
  const auto dims = dims_in(mask, x.dim());
  const auto wide = accumulate_type(x.scalar_type());
  auto power = x.to(wide).abs();
  power = std::isinf(p) ? extreme(power, dims, ReduceOp::Max).clamp_min_(0) : at::sum(power.pow_(p), dims, true);
  power = over_ranks(power, run, mesh_dims_of(run, mask), std::isinf(p) ? ReduceOp::Max : ReduceOp::Sum);
  const auto norms = std::isinf(p) ? power : power.pow_(1 / p);
  const auto scale = at::where(norms.gt(limit), limit / (norms + 1e-7), at::ones_like(norms));
  return_results(run, {x.to(scale.scalar_type()).mul(scale).to(x.scalar_type())});
}

Rule renorm(const Call& call) {
  const auto& x = call.tensors[0];
  const auto kept = call.dim(2, x.dim());
  Rule rule;
  const auto dims = fresh_dims(rule, x.dim(), {.whole = c10::isComplexType(x.dtype), .kernel = true});
  if (x.dim() > 0) {
    rule.factors[kept] = {};
  }
  rule.operands.emplace_back(dims);
  rule.results.emplace_back(dims);
  add_outputs(call, rule);
  rule.kernel = renorm_kernel;
  rule.kernel_data = ReductionSpec{kAllFactors & ~(uint64_t{1} << kept), true};
  return rule;
}

// ---- moments ----

// Combines each piece's count, mean and sum of squared deviations by two small all-reduces (Chan et al.). Complex numbers are
// pairs of reals: torch divides them by numbers only, not by a graph's symbols.
void var_kernel(KernelRun& run) {
  const ReductionInput r(run);
  const auto& given = run.arg(argument(run, "correction"));
  const double correction = given.isNone() ? 1.0 : given.toScalar().toDouble();
  const c10::SymFloat n = r.count(), total = r.global_count();
  const auto wide = r.x.to(accumulate_type(r.x.scalar_type()));
  const bool pairs = wide.is_complex();
  const auto x = pairs ? at::view_as_real(wide.resolve_conj()) : wide;
  at::Tensor mean, squares;
  if (r.count() != 0) {
    std::tie(squares, mean) = at::var_mean(x, r.dims, at::Scalar(0), true);
    squares = squares * at::Scalar(n);
  } else {
    mean = at::sum(x, r.dims, true);
    squares = at::zeros_like(mean);
  }
  const auto whole_mean = over_ranks(mean * at::Scalar(n / total), run, r.mesh_dims, ReduceOp::Sum);
  squares = squares + (mean - whole_mean).square_().mul_(at::Scalar(n));
  squares = over_ranks(pairs ? squares.sum(-1) : squares, run, r.mesh_dims, ReduceOp::Sum);
  auto var = squares.div_(at::Scalar((total - correction).max(0.0)));
  if (r.how.root) {
    var.sqrt_();
  }
  const auto dtype = r.x.scalar_type();
  std::vector<at::Tensor> out{squeeze_dims(var, r.dims, r.how.keepdim).to(c10::toRealValueType(dtype))};
  if (r.how.with_mean) {
    const auto whole = pairs ? at::view_as_complex(whole_mean) : whole_mean;
    out.push_back(squeeze_dims(whole, r.dims, r.how.keepdim).to(dtype));
  }
  return_results(run, out);
}

template <bool root>
Rule var(const Call& call) {
  auto rule = reduce(call, {.kernel = true});
  rule.kernel = var_kernel;
  kernel_data<ReductionSpec>(rule).root = root;
  kernel_data<ReductionSpec>(rule).with_mean = call.schema.returns().size() == 2;
  return rule;
}

void logsumexp_kernel(KernelRun& run) {
  const ReductionInput r(run);
  const bool whole_number = c10::isIntegralType(r.x.scalar_type(), true);
  const auto dtype = whole_number ? c10::get_default_dtype_as_scalartype() : r.x.scalar_type();
  const auto x = r.x.to(accumulate_type(dtype));
  auto top = over_ranks(extreme(x, r.dims, ReduceOp::Max), run, r.mesh_dims, ReduceOp::Max);
  top.masked_fill_(top.isinf(), 0);
  const auto total = over_ranks((x - top).exp_().sum(r.dims, true), run, r.mesh_dims, ReduceOp::Sum);
  return_results(run, {squeeze_dims(total.log().add_(top), r.dims, r.how.keepdim).to(dtype)});
}

Rule logsumexp(const Call& call) {
  auto rule = reduce(call, {.whole = c10::isComplexType(call.tensors[0].dtype), .kernel = true});
  rule.kernel = logsumexp_kernel;
  return rule;
}

// The bits of all elements, joined by exclusive or.
Rule hash(const Call& call) {
  auto rule = with_neutral(reduce(call, {.reduce = ReduceOp::Bxor}), {0});
  kernel_data<ReductionSpec>(rule).neutral_type = at::kUInt64;
  return rule;
}

// ---- segments of dim `axis`, which stays whole; lengths and offsets have it and the dims before it ----

// torch computes the minimum of the lengths, and there are none.
void segments_kernel(KernelRun& run) {
  const auto data = run.arg(argument(run, "data")).toTensor();
  const auto lengths = run.arg(argument(run, "lengths")), offsets = run.arg(argument(run, "offsets"));
  const auto counted = (lengths.isNone() ? offsets : lengths).toTensor();
  const bool forward = argument(run, "grad") < 0;
  auto sizes = data.sizes().vec();
  if (forward) {
    sizes[counted.dim() - 1] = counted.size(-1) - lengths.isNone();
  }
  if (c10::multiply_integers(sizes) && counted.numel()) {
    return run.call_op();
  }
  run.returns({at::empty(sizes, data.options())});
}

Rule segments(const Call& call) {
  const auto lengths = call.operand(argument(call, "lengths")), offsets = call.operand(argument(call, "offsets"));
  const auto counted = lengths < 0 ? offsets : lengths;
  const auto& data = call.tensor(argument(call, "data"));
  TORCH_CHECK(counted >= 0, "segment_reduce(): Either lengths or offsets must be defined.");
  const auto axis = call.dim(argument(call, "axis"), data.dim());
  TORCH_CHECK(
      axis + 1 == call.tensors[counted].dim(), "segment_reduce(): Expected axis to be the last dimension of ",
      lengths < 0 ? "offsets" : "lengths", " but got ", axis, ".");
  Rule rule;
  auto dims = dims_beside(rule, data.dim(), axis);
  for (const auto& t : call.tensors) {
    TORCH_CHECK(t.dim() <= data.dim(), "segment_reduce(): ", t.dim(), " dims where the data have ", data.dim());
    rule.operands.emplace_back(Dims(dims.begin(), dims.begin() + t.dim()));
  }
  rule.results.emplace_back(std::move(dims));
  rule.kernel = segments_kernel;
  rule.kernel_if = is_empty;
  return rule;
}

// ---- results that are not tensors ----

// Every rank must return the same, also with an empty piece.
void equal_kernel(KernelRun& run) {
  const auto a = run.arg(0).toTensor();
  const auto b = run.arg(1).toTensor();
  need_values(a, "equal");
  bool same = run.operands[0].sizes() == run.operands[1].sizes();
  if (same) {
    const auto mine = at::full({1}, at::equal(a, b), a.options().dtype(at::kBool));
    same = over_ranks(mine, run, mesh_dims_of(run, kAllFactors), ReduceOp::Min).item<bool>();
  }
  run.returns({c10::IValue(same)});
}

Rule equal(const Call& call) {
  Rule rule;
  const bool alike = call.tensors[0].sizes() == call.tensors[1].sizes();
  rule.operands.assign(2, Operand(fresh_dims(rule, alike ? call.tensors[0].dim() : 0, {.kernel = true})));
  for (auto& o : rule.operands) {
    o.free = !alike; // different sizes already decide the result
  }
  rule.always(equal_kernel);
  return rule;
}

} // namespace

void register_reductions(Registry& r) {
  const char* family = "reductions";
  const Options numbers{.symbols = true, .takes = kReals | kComplex}, ordered{.symbols = true, .takes = kAllNumbers & ~kComplex};
  r.add(family, {"_assert_async", "_assert_async.msg", "_local_scalar_dense"}, replicate);
  r.add(family, {"_is_all_true", "_is_any_true", "allclose", "dist", "dist.out", "is_same_size"}, kAsOtherOps);
  r.add(family, {"all", "all.all_out", "all.dim", "all.dims", "all.dims_out", "all.out"}, truth<ReduceOp::Min>);
  r.add(family, {"amax", "amax.out", "max", "max.unary_out"}, extreme_of<ReduceOp::Max>, ordered);
  r.add(family, {"amin", "amin.out", "min", "min.unary_out"}, extreme_of<ReduceOp::Min>, ordered);
  r.add(family, {"_aminmax", "_aminmax.dim", "_aminmax.dim_out", "_aminmax.out", "aminmax", "aminmax.out"}, aminmax, ordered);
  r.add(family, {"any", "any.all_out", "any.dim", "any.dims", "any.dims_out", "any.out"}, truth<ReduceOp::Max>);
  r.add(family, {"argmax", "argmax.out"}, best<ReduceOp::Max>, ordered);
  r.add(family, {"argmin", "argmin.out"}, best<ReduceOp::Min>, ordered);
  r.add(
      family,
      {"count_nonzero", "count_nonzero.dim_IntList", "count_nonzero.dim_IntList_out", "count_nonzero.out", "nansum",
       "nansum.out"},
      counted);
  r.add(family, {"equal"}, equal);
  r.add(family, {"_has_same_storage_numel"}, kAsOtherOps, {.autograd = formulas::has_same_storage});
  r.add(family, {"hash_tensor", "hash_tensor.out"}, hash);
  r.add(
      family,
      {"kthvalue", "kthvalue.values", "median", "median.dim", "median.dim_values", "median.out", "mode", "mode.values",
       "nanmedian", "nanmedian.dim", "nanmedian.dim_values", "nanmedian.out"},
      in_order, ordered);
  r.add(
      family,
      {"linalg_vector_norm", "linalg_vector_norm.out", "norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype",
       "norm.ScalarOpt_dtype", "norm.ScalarOpt_dtype_out", "norm.Scalar_out", "norm.dtype_out", "norm.out"},
      norm, numbers);
  r.add(family, {"linalg__powsum", "linalg__powsum.out"}, power_sum, numbers);
  r.add(family, {"logsumexp", "logsumexp.out"}, logsumexp, {.symbols = true});
  r.add(family, {"max.dim", "max.dim_max"}, best<ReduceOp::Max>, ordered);
  r.add(family, {"mean", "mean.dtype_out"}, mean, {.autograd = formulas::mean, .symbols = true});
  r.add(family, {"mean.dim", "mean.out"}, mean, {.autograd = formulas::mean_dim, .symbols = true});
  r.add(family, {"min.dim", "min.dim_min"}, best<ReduceOp::Min>, ordered);
  r.add(family, {"nanquantile"}, kAsOtherOps, {.autograd = formulas::nanquantile});
  r.add(family, {"nanquantile.scalar"}, kAsOtherOps, {.autograd = formulas::nanquantile_number});
  r.add(family, {"prod", "prod.out"}, prod, {.autograd = formulas::prod});
  r.add(family, {"prod.dim_int", "prod.int_out"}, prod, {.autograd = formulas::prod_dim});
  r.add(family, {"quantile"}, kAsOtherOps, {.autograd = formulas::quantile});
  r.add(family, {"quantile.scalar"}, kAsOtherOps, {.autograd = formulas::quantile_number});
  r.add(family, {"renorm", "renorm.out", "renorm_"}, renorm, numbers);
  r.add(family, {"std.correction", "std.correction_out", "std_mean.correction", "std_mean.correction_out"}, var<true>, numbers);
  r.add(family, {"_segment_reduce_backward"}, linear_in_first<segments>);
  r.add(family, {"segment_reduce"}, segments);
  r.add(family, {"sum", "sum.IntList_out", "sum.dim_IntList", "sum.out"}, sum, {.symbols = true});
  r.add(family, {"var.correction", "var.correction_out", "var_mean.correction", "var_mean.correction_out"}, var<false>, numbers);
}

} // namespace shardtensor::rules
