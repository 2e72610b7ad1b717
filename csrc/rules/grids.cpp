// Sampling of images and volumes, patches, distances, and a few other ops whose batch may be cut.
#include "rules/batched.h"
#include "rules/pieces.h"
#include "rules/registry.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace shardtensor::rules {

namespace {

// (grad_output, input, grid): the channels are summed over in the grid's gradient, so they stay whole.
Rule grid_sampler_2d_backward(const Call& call) {
  return linear(batched(call, "N...,N...,N...->N...,N..."), {0});
}
Rule grid_sampler_3d_backward(const Call& call) {
  return linear(batched(call, "N....,N....,N....->N....,N...."), {0});
}

// theta [n, 2, 3] -> [n, h, w, 2], or one dim more. Arguments give n, c, h, w.
void affine_grid_kernel(Run& run) {
  auto sizes = run.arg(1).toIntVector();
  sizes[0] = run.arg(0).toTensor().size(0);
  run.arg(1) = c10::List<int64_t>(sizes);
  run.call_op();
}

Rule affine_grid(const Call& call) {
  const auto sizes = call.ints(1);
  TORCH_CHECK(
      !sizes.empty() && call.tensors[0].size(0) == sizes[0], "Expected a batch of ", c10::IntArrayRef(sizes),
      " affine matrices, got ", call.tensors[0].sizes());
  auto rule = linear(batched(call, sizes.size() == 4 ? "N..->N..." : "N..->N...."), {0});
  rule.kernel = affine_grid_kernel;
  rule.always_kernel = true;
  return rule;
}

// [n, c, h, w] or [c, h, w], and columns [n, c * k * k, blocks].
Rule im2col(const Call& call) {
  return linear(batched(call, call.tensors[0].dim() == 4 ? "N...->N.." : "...->.."), {0});
}
Rule col2im(const Call& call) {
  return linear(batched(call, call.tensors[0].dim() == 3 ? "N..->N..." : "..->..."), {0});
}

// A distance for each pair of rows, so rows stay whole; features may be cut, over which it is a norm.
Rule pdist(const Call& call) {
  if (call.tensors[0].dim() != 2) {
    return replicate(call); // the op says what is wrong
  }
  Rule rule;
  const auto features = rule.factor(normed(call.arg(1).toDouble()));
  rule.operands.emplace_back(Dims{Dim(kNone), Dim(features)});
  rule.results.emplace_back(Dims{Dim(kNone)});
  return rule;
}

// The product of three operands, each broadcast along the dims that it lacks, summed over some dims.
Rule trilinear(const Call& call) {
  Rule rule;
  const auto has = [](const Sizes& dims, int64_t d) { return std::find(dims.begin(), dims.end(), d) != dims.end(); };
  const auto summed = call.ints(6);
  Dims out;
  const auto ndim = call.tensors[0].dim() + static_cast<int64_t>(call.ints(3).size());
  for (int64_t d = 0; d < ndim; ++d) {
    const auto f = has(summed, d) ? rule.reduced(ReduceOp::Sum) : rule.factor();
    if (!has(summed, d)) {
      out.emplace_back(f);
    }
  }
  for (int64_t i = 0; i < 3; ++i) {
    const auto lacking = call.ints(3 + i);
    Dims dims;
    for (int64_t d = 0; d < ndim; ++d) {
      if (!has(lacking, d)) {
        dims.emplace_back(d);
      }
    }
    rule.operands.emplace_back(std::move(dims));
  }
  rule.results.emplace_back(std::move(out));
  rule.linear_in({0, 1, 2});
  return rule;
}

// Each element is searched among all test elements.
Rule isin(const Call& call) {
  Rule rule;
  auto dims = fresh_dims(rule, call.tensors[0].dim());
  rule.operands.emplace_back(dims);
  for (size_t i = 1; i < call.tensors.size(); ++i) {
    rule.operands.emplace_back(Dims(call.tensors[i].dim(), Dim(kNone)));
  }
  rule.results.emplace_back(dims);
  return rule;
}

// By copies, for any dtype: torch's kernel rejects some dtypes, but not on a rank with an empty piece.
void channel_shuffle_kernel(Run& run) {
  const auto x = run.arg(0).toTensor();
  const auto groups = run.arg(1).toInt();
  run.returns({x.unflatten(1, {groups, x.size(1) / groups}).transpose(1, 2).reshape(x.sizes())});
}

Rule channel_shuffle(const Call& call) {
  const auto& x = call.tensors[0];
  TORCH_CHECK(x.dim() > 2, "channel_shuffle expects input with > 2 dims, but got input with sizes ", x.sizes());
  const auto groups = call.integer(1);
  TORCH_CHECK(groups > 0, "Number of groups to divide channels in must be positive. Value of groups:", groups);
  TORCH_CHECK(
      x.size(1) % groups == 0, "Number of channels must be divisible by groups. Got ", x.size(1), " channels and ", groups,
      " groups.");
  Rule rule;
  rule.kernel = channel_shuffle_kernel;
  rule.always_kernel = true;
  auto dims = fresh_dims(rule, x.dim());
  dims[1] = Dim(kNone);
  rule.operands.emplace_back(dims);
  rule.results.emplace_back(dims);
  rule.passes_partial();
  return rule;
}

// v may be cut along the dim that has a norm for each index: g and the norms have that dim, and size 1 elsewhere. Also the
// backward.
Rule weight_norm(const Call& call) {
  Rule rule;
  const auto ndim = call.tensors[0].dim();
  const auto dim = call.integer(call.position("dim"));
  Dims dims(ndim, Dim(kNone));
  if (dim >= 0 && dim < ndim) {
    dims[dim] = Dim(rule.factor());
  }
  for (const auto& t : call.tensors) {
    rule.operands.emplace_back(t.dim() == ndim ? dims : Dims(t.dim(), Dim(kNone)));
  }
  rule.results = {Result(dims), Result(dims)};
  return rule;
}

} // namespace

void register_grids(Registry& r) {
  Options order;
  order.asks_order = true;
  const auto sampling = [](const Call& c) { return linear(batched(c, "NC..,N...->NC.."), {0}); };
  Options real;
  real.takes = kReals;
  Options same = real;
  same.one_dtype = 0b11;
  Options gradient = real;
  gradient.one_dtype = 0b111;
  Options patches;
  patches.takes = kAllNumbers & ~kIntegers;
  Options products;
  products.takes = kReals | kComplex;
  Options ordered;
  ordered.takes = kAllNumbers & ~kComplex;
  Options distances = order;
  distances.takes = kWideReals;
  distances.one_dtype = 0b11;
  r.add("sampling", {"_grid_sampler_2d_cpu_fallback", "grid_sampler_2d"}, sampling, same);
  r.add("sampling", {"affine_grid_generator"}, affine_grid, real);
  r.add("sampling", {"grid_sampler_2d_backward"}, grid_sampler_2d_backward, gradient);
  r.add(
      "sampling", {"grid_sampler_3d"}, [](const Call& c) { return linear(batched(c, "NC...,N....->NC..."), {0}); }, same);
  r.add("sampling", {"grid_sampler_3d_backward"}, grid_sampler_3d_backward, gradient);

  r.add("patches", {"channel_shuffle"}, channel_shuffle);
  r.add("patches", {"col2im"}, col2im, patches);
  r.add("patches", {"im2col"}, im2col, patches);

  r.add(
      "distances", {"_cdist_backward"}, [](const Call& c) { return linear(batched(c, "*R.,*R.,*..,*R.->*R."), {0}); }, distances);
  r.add(
      "distances", {"_cdist_forward"}, [](const Call& c) { return batched(c, "*R.,*C.->*RC"); }, distances);
  r.add(
      "distances", {"_pdist_backward"}, [](const Call& c) { return linear(batched(c, ".,.K,.->.K"), {0}); }, distances);
  r.add("distances", {"_pdist_forward"}, pdist, real);

  r.add("various", {"_trilinear"}, trilinear, products);
  r.add("various", {"_weight_norm_interface", "_weight_norm_interface_backward"}, weight_norm, real);
  r.add("various", {"isin.Tensor_Scalar", "isin.Tensor_Tensor"}, isin, ordered);
}

} // namespace shardtensor::rules
