// Reshapes, and views as another dtype.
#include "rules/ops/views.h"

#include "rules/registry.h"

#include <ATen/ATen.h>
#include <ATen/InferSize.h>

#include <algorithm>

namespace shardtensor::rules {

namespace {

// The least common multiple of two products of sizes.
c10::SymInt common_multiple(const c10::SymInt& a, const c10::SymInt& b) {
  if (a == 1 || a == b) {
    return b;
  }
  if (b == 1 || a % b == 0) {
    return a;
  }
  return b % a == 0 ? b : c10::SymInt(std::lcm(a.guard_int(__FILE__, __LINE__), b.guard_int(__FILE__, __LINE__)));
}

// Matches runs of dims whose products are equal. In each run the first dims of both sides share a factor; one index of the
// factor stands for the smallest number of elements that gives whole indices on both sides. Returns true if some dims are
// merged.
bool match(Rule& rule, const SymSizes& from, const SymSizes& to, Dims& in, Dims& out) {
  bool merges = false;
  size_t i = 0, j = 0;
  while (i < from.size() || j < to.size()) {
    if (i < from.size() && j < to.size() && from[i] == to[j]) {
      in[i++] = out[j++] = Dim(rule.factor());
      continue;
    }
    if (i < from.size() && from[i] == 1) {
      ++i;
      continue;
    }
    if (j < to.size() && to[j] == 1) {
      ++j;
      continue;
    }
    const auto a = i, b = j;
    c10::SymInt left = from[i++], right = to[j++], in_row = 1, out_row = 1;
    while (left != right) {
      if (left < right) {
        merges = true;
        in_row = in_row * from[i++];
        left = from[a] * in_row;
      } else {
        out_row = out_row * to[j++];
        right = to[b] * out_row;
      }
    }
    const auto unit = common_multiple(in_row, out_row);
    if (unit < left) {
      const auto f = rule.factor();
      in[a] = Dim(f, unit / in_row);
      out[b] = Dim(f, unit / out_row);
      rule.spread.push_back(f);
    }
  }
  return merges;
}

// Local strides differ from global ones: if the piece cannot be viewed, it is copied.
void view_kernel(KernelRun& run) {
  run.returns({own(run, run.arg(0).toTensor().reshape_symint(run.arg(1).toSymIntVector()))});
}

} // namespace

Rule reshaped(const Call& call, const SymSizes& to, ReshapeArguments told) {
  Rule rule;
  const auto& x = call.tensors[0];
  bool merges = false;
  Dims in(x.dim(), Dim(kNone)), out(to.size(), Dim(kNone));
  const auto from = x.sym_sizes();
  if (numel_of(from) > 0) {
    merges = match(rule, from, to, in, out);
  } else {
    for (size_t d = 0; d < std::min(in.size(), out.size()) && from[d] == to[d]; ++d) {
      in[d] = out[d] = Dim(rule.factor());
    }
  }
  rule.operands.emplace_back(std::move(in));
  rule.results.emplace_back(std::move(out), to);
  rule.results[0].geometry.emplace();
  rule.results[0].geometry->reshaped = true;
  rule.sizes_arg = 1;
  rule.kernel = view_kernel;
  rule.always_kernel = told == ReshapeArguments::Strides;
  // A dim with any stride can be split, so only merging needs the kernel.
  rule.kernel_if = merges || told != ReshapeArguments::Sizes ? is_strided : nullptr;
  rule.passes_partial();
  return rule;
}

namespace {

template <ReshapeArguments told>
Rule view(const Call& call) {
  const auto& x = call.tensors[0];
  const auto to = at::infer_size_dv(c10::SymIntArrayRef(call.sym_ints(1)), numel_of(x.sym_sizes()));
  return reshaped(call, SymSizes(to.begin(), to.end()), told);
}

// torch requires strides that are multiples of the new dtype's size. The strides of an empty piece are arbitrary.
void view_empty_as_dtype(KernelRun& run) {
  const auto x = run.arg(0).toTensor();
  auto strides = x.strides().vec();
  for (size_t d = 0; d + 1 < strides.size(); ++d) {
    strides[d] *= 16; // bytes of the largest dtype
  }
  run.arg(0) = x.as_strided(x.sizes(), strides);
  run.call_op();
}

// The bits as another dtype: the size of the last dim changes. Summands do not pass.
Rule view_dtype(const Call& call) {
  Rule rule;
  const auto& x = call.tensors[0];
  const auto had = static_cast<int64_t>(c10::elementSize(x.dtype));
  const auto has = static_cast<int64_t>(c10::elementSize(call.arg(1).toScalarType()));
  auto in = fresh_dims(rule, x.dim());
  auto out = in;
  auto to = x.sym_sizes();
  if (had != has && x.dim() > 0) {
    const auto d = x.dim() - 1;
    TORCH_CHECK(
        had > has || to[d] % (has / had) == 0, "self.size(-1) must be divisible by ", has / std::max<int64_t>(had, 1),
        " to view ", x.dtype, " as ", call.arg(1).toScalarType(), " (different element sizes), but got ", to[d]);
    in[d].inner = had < has ? has / had : 1;
    out[d].inner = had > has ? had / has : 1;
    to[d] = had > has ? to[d] * (had / has) : to[d] / (has / had);
  }
  rule.operands.emplace_back(std::move(in));
  rule.results.emplace_back(std::move(out), std::move(to));
  rule.kernel = view_empty_as_dtype;
  rule.kernel_if = is_empty;
  return rule;
}

Rule view_as_real(const Call& call) {
  Rule rule;
  auto dims = fresh_dims(rule, call.tensors[0].dim());
  rule.operands.emplace_back(dims);
  dims.emplace_back(kNone);
  rule.results.emplace_back(std::move(dims));
  rule.linear_in({0});
  return rule;
}

Rule view_as_complex(const Call& call) {
  Rule rule;
  const auto n = call.tensors[0].dim();
  TORCH_CHECK(n > 0, "view_as_complex: input tensor must have one or more dimensions");
  auto dims = fresh_dims(rule, n - 1);
  rule.results.emplace_back(dims);
  dims.emplace_back(kNone);
  rule.operands.emplace_back(std::move(dims));
  rule.linear_in({0});
  return rule;
}

} // namespace

void register_view_reshape(Registry& r) {
  r.add("views", {"_reshape_alias"}, view<ReshapeArguments::Strides>, {.symbols = true});
  r.add("views", {"_reshape_copy"}, kAsOtherOps);
  r.add("views", {"_unsafe_view", "view_copy"}, view<ReshapeArguments::SizesOfCopy>, {.symbols = true});
  r.add("views", {"view"}, view<ReshapeArguments::Sizes>, {.symbols = true});
  r.add("views", {"view.dtype", "view_copy.dtype"}, view_dtype, {.symbols = true});
  r.add("views", {"view_as_complex", "view_as_complex_copy"}, view_as_complex);
  r.add("views", {"view_as_real", "view_as_real_copy"}, view_as_real, {.symbols = true});
}

} // namespace shardtensor::rules
