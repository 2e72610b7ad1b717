// Sampling of images and volumes, patches, distances, and a few ops more whose batch may be cut.
#include "rules/batched.h"
#include "rules/registry.h"

#include <ATen/ATen.h>

namespace shardtensor::rules {

namespace {

Rule linear(Rule rule, std::initializer_list<int> operands) {
  rule.linear_in(operands);
  return rule;
}

// (grad_output, input, grid): the channels are summed over in the grid's gradient, so they stay whole.
Rule grid_sampler_2d_backward(const Call& call) {
  return linear(batched(call, "N...,N...,N...->N...,N..."), {0});
}
Rule grid_sampler_3d_backward(const Call& call) {
  return linear(batched(call, "N....,N....,N....->N....,N...."), {0});
}

// [n, c, h, w] or [c, h, w], and columns [n, c * k * k, blocks].
Rule im2col(const Call& call) {
  return linear(batched(call, call.tensors[0].dim() == 4 ? "N...->N.." : "...->.."), {0});
}
Rule col2im(const Call& call) {
  return linear(batched(call, call.tensors[0].dim() == 3 ? "N..->N..." : "..->..."), {0});
}

// Elements are looked up one by one, among all test elements.
Rule isin(const Call& call) {
  Rule rule;
  Dims dims;
  for (int64_t d = 0; d < call.tensors[0].dim(); ++d) {
    dims.emplace_back(rule.factor());
  }
  rule.operands.emplace_back(dims);
  for (size_t i = 1; i < call.tensors.size(); ++i) {
    rule.operands.emplace_back(Dims(call.tensors[i].dim(), Dim(kNone)));
  }
  rule.results.emplace_back(dims);
  return rule;
}

Rule channel_shuffle(const Call& call) {
  Rule rule;
  Dims dims;
  for (int64_t d = 0; d < call.tensors[0].dim(); ++d) {
    dims.push_back(d == 1 ? Dim(kNone) : Dim(rule.factor()));
  }
  rule.operands.emplace_back(dims);
  rule.results.emplace_back(dims);
  rule.passes_partial();
  return rule;
}

// v is cut along the dim that has a norm for each index: g and the norms have that dim, and 1 elsewhere. Backward likewise.
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
  Options decompose;
  decompose.decompose = true;
  const auto sampling = [](const Call& c) { return linear(batched(c, "NC..,N...->NC.."), {0}); };
  r.add("sampling", {"_grid_sampler_2d_cpu_fallback", "grid_sampler_2d"}, sampling);
  r.add("sampling", {"grid_sampler_2d_backward"}, grid_sampler_2d_backward);
  r.add("sampling", {"grid_sampler_3d"}, [](const Call& c) { return linear(batched(c, "NC...,N....->NC..."), {0}); });
  r.add("sampling", {"grid_sampler_3d_backward"}, grid_sampler_3d_backward);

  r.add("patches", {"channel_shuffle"}, channel_shuffle);
  r.add("patches", {"col2im"}, col2im);
  r.add("patches", {"im2col"}, im2col);

  r.add(
      "distances", {"_cdist_backward"}, [](const Call& c) { return linear(batched(c, "*R.,*R.,*..,*R.->*R."), {0}); }, order);
  r.add(
      "distances", {"_cdist_forward"}, [](const Call& c) { return batched(c, "*R.,*C.->*RC"); }, order);

  r.add("various", {"_trilinear"}, nullptr, decompose);
  r.add("various", {"_weight_norm_interface", "_weight_norm_interface_backward"}, weight_norm);
  r.add("various", {"isin.Tensor_Scalar", "isin.Tensor_Tensor"}, isin);
}

} // namespace shardtensor::rules
