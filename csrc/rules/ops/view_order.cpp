// Views with the dims in another order, or with more or fewer dims: transposes, squeeze, expand.
#include "rules/ops/views.h"

#include "rules/registry.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

namespace shardtensor::rules {

Geometry strides_of(c10::ArrayRef<int64_t> dims) {
  Geometry g;
  for (auto d : dims) {
    g.strides.push_back({d, 1});
  }
  return g;
}

Sizes dims_in_order(int64_t n) {
  Sizes order(n);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

at::Tensor own(const KernelRun& run, at::Tensor view) {
  return run.op.hasTag(at::Tag::view_copy) ? view.clone(at::MemoryFormat::Contiguous) : view;
}

Rule as_view(Rule rule, Dims in, Dims out, Geometry geometry, SymSizes sizes) {
  rule.operands.emplace_back(std::move(in));
  rule.results.emplace_back(std::move(out), std::move(sizes)).geometry = std::move(geometry);
  rule.passes_partial();
  return rule;
}

Rule permuted(const Call& call, c10::ArrayRef<int64_t> order) {
  Rule rule;
  auto in = fresh_dims(rule, call.tensors[0].dim());
  Dims out;
  for (auto d : order) {
    out.push_back(in[d]);
  }
  return as_view(std::move(rule), std::move(in), std::move(out), strides_of(order));
}

Rule same(const Call& call) {
  return permuted(call, dims_in_order(call.tensors[0].dim()));
}

namespace {

using Term = Geometry::Term;

Rule t(const Call& call) {
  const auto n = call.tensors[0].dim();
  TORCH_CHECK(n <= 2, "t() expects a tensor with <= 2 dimensions, but self is ", n, "D");
  auto order = dims_in_order(n);
  std::reverse(order.begin(), order.end());
  return permuted(call, order);
}

void transpose_kernel(KernelRun& run) {
  run.returns({run.arg(0).toTensor().transpose(run.arg(1).toInt(), run.arg(2).toInt())});
}

Rule transpose(const Call& call) {
  const auto n = call.tensors[0].dim();
  auto order = dims_in_order(n);
  const auto a = call.dim(1, n);
  const auto b = call.dim(2, n);
  if (n > 0) {
    std::swap(order[a], order[b]);
  }
  return permuted(call, order);
}

Rule permute(const Call& call) {
  const auto n = call.tensors[0].dim();
  const auto dims = call.ints(1);
  TORCH_CHECK(static_cast<int64_t>(dims.size()) == n, "permute: ", dims.size(), " dims given for a tensor of ", n, " dims");
  Sizes order;
  uint64_t seen = 0;
  for (auto d : dims) {
    order.push_back(wrap_dim(d, n));
    TORCH_CHECK(!(seen >> order.back() & 1), "permute(): duplicate dims are not allowed.");
    seen |= uint64_t{1} << order.back();
  }
  return permuted(call, order);
}

// ---- dims of size 1 come and go ----

void unsqueeze_kernel(KernelRun& run) {
  run.returns({run.arg(0).toTensor().unsqueeze(run.arg(1).toInt())});
}

Rule unsqueeze(const Call& call) {
  Rule rule;
  const auto n = call.tensors[0].dim();
  const auto at = call.dim(1, n + 1);
  auto in = fresh_dims(rule, n);
  auto out = in;
  out.insert(out.begin() + at, Dim(kNone));
  auto strides = strides_of(dims_in_order(n));
  strides.strides.insert(strides.strides.begin() + at, at < n ? Geometry::Term{at, Geometry::kItsSize} : Geometry::Term{-1, 1});
  return as_view(std::move(rule), std::move(in), std::move(out), std::move(strides));
}

struct SqueezedDims {
  Sizes dims;
};

// A piece may have one row of a dim that is larger, so the kernel names the dims to drop.
void squeeze_kernel(KernelRun& run) {
  run.returns({own(run, run.arg(0).toTensor().squeeze(kernel_data<SqueezedDims>(run.solution).dims))});
}

Rule squeeze(const Call& call) {
  Rule rule;
  const auto& x = call.tensors[0];
  uint64_t named = ~uint64_t{0};
  if (call.schema.arguments().size() > 1) {
    named = 0;
    for (auto d : call.ints(1)) {
      named |= uint64_t{1} << wrap_dim(d, x.dim());
    }
  }
  Dims in, out;
  Sizes kept, dropped;
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (x.is_one(d) && (named >> d & 1)) {
      in.emplace_back(kNone);
      dropped.push_back(d);
    } else {
      in.emplace_back(rule.factor());
      out.push_back(in.back());
      kept.push_back(d);
    }
  }
  rule.kernel_data = SqueezedDims{std::move(dropped)};
  rule.always(squeeze_kernel);
  return as_view(std::move(rule), std::move(in), std::move(out), strides_of(kept));
}

Rule expand(const Call& call) {
  Rule rule;
  const auto& x = call.tensors[0];
  auto to = call.sym_ints(1);
  const auto lead = static_cast<int64_t>(to.size()) - x.dim();
  TORCH_CHECK(
      lead >= 0, "expand: the number of sizes provided (", to.size(),
      ") must be greater or equal to the number of dimensions in the tensor (", x.dim(), ")");
  Dims in, out(lead, Dim(kNone));
  Geometry g;
  g.strides.resize(lead, Term{-1, 0});
  for (int64_t d = 0; d < x.dim(); ++d) {
    auto& s = to[lead + d];
    const auto size = x.sym_size(d);
    s = s == -1 ? size : s;
    const bool stretched = s != size;
    TORCH_CHECK(
        !stretched || x.is_one(d), "The expanded size of the tensor (", s, ") must match the existing size (", size,
        ") at non-singleton dimension ", lead + d, ".  Target sizes: ", to, ".  Tensor sizes: ", x.sizes());
    in.push_back(stretched ? Dim(kNone) : Dim(rule.factor()));
    out.push_back(in.back());
    g.strides.push_back(stretched ? Term{-1, 0} : Term{d, 1});
  }
  rule.sizes_arg = 1;
  return as_view(std::move(rule), std::move(in), std::move(out), std::move(g), std::move(to));
}

} // namespace

void register_view_order(Registry& r) {
  r.add("views", {"_conj", "_neg_view"}, [](const Call& call) {
    auto rule = same(call);
    rule.linear[0].any_reduction = rule.linear[0].moves = false;
    return rule;
  });
  r.add("views", {"alias", "alias_copy", "detach_", "detach_copy"}, same);
  r.add("views", {"detach"}, same, {.autograd = formulas::detach});
  r.add("views", {"expand", "expand_copy"}, expand, {.symbols = true});
  r.add("views", {"permute", "permute_copy"}, permute);
  r.add(
      "views",
      {"squeeze", "squeeze.dim", "squeeze.dims", "squeeze_", "squeeze_.dim", "squeeze_.dims", "squeeze_copy", "squeeze_copy.dim",
       "squeeze_copy.dims"},
      squeeze, {.symbols = true});
  r.add("views", {"t", "t_copy"}, t);
  // In-place forms do not change the local tensor itself, because it may be shared.
  r.add("views", {"t_"}, always<t, unary_kernel<at::t>>, {.symbols = true});
  r.add("views", {"transpose.int", "transpose_copy.int"}, transpose);
  r.add("views", {"transpose_"}, always<transpose, transpose_kernel>, {.symbols = true});
  r.add("views", {"unsqueeze", "unsqueeze_copy"}, unsqueeze);
  r.add("views", {"unsqueeze_"}, always<unsqueeze, unsqueeze_kernel>, {.symbols = true});
}

} // namespace shardtensor::rules
