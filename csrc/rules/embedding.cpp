// Embeddings: a table sharded over its rows is looked up where the rows are, and leaves summands.
#include "rules/registry.h"

#include "rules/resolve.h"

#include <ATen/ATen.h>

namespace shardtensor::rules {

namespace {

Interval rows_held(const Run& run) {
  const auto& table = run.operands[0];
  return table.layout->intervals(0, table.sizes[0], run.mesh().coordinate())[0];
}

// A rank sees its own rows alone, so the bounds are those of the whole table.
void check_bounds(const at::Tensor& indices, int64_t rows) {
  if (indices.numel() == 0) {
    return;
  }
  if (indices.is_cpu()) {
    const auto low = indices.min().item<int64_t>(), high = indices.max().item<int64_t>();
    TORCH_CHECK_INDEX(
        low >= 0 && high < rows,
        "index out of range in self: embedding got index ", low < 0 ? low : high, " for a table of ", rows, " rows");
  } else {
    at::_assert_async((indices >= 0).logical_and(indices < rows).all());
  }
}

// Rows that this rank does not hold are zeros: the sum over ranks is the lookup.
void embedding_kernel(Run& run) {
  const auto weight = run.arg(0).toTensor();
  const auto indices = run.arg(1).toTensor();
  check_bounds(indices, run.operands[0].sizes[0]);
  const auto held = rows_held(run);
  if (held.length == 0) {
    auto sizes = indices.sizes().vec();
    sizes.push_back(weight.size(1));
    run.returns({at::zeros(sizes, weight.options())});
    return;
  }
  const auto elsewhere = (indices < held.start).logical_or_(indices >= held.start + held.length);
  const auto at = (indices - held.start).masked_fill_(elsewhere, 0);
  run.returns({at::embedding(weight, at).masked_fill_(elsewhere.unsqueeze(-1), 0)});
}

// (weight, indices, padding_idx, scale_grad_by_freq, sparse)
Rule embedding(const Call& call) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !call.flag(4), "embedding: argument 'sparse' is True; gradients of ShardTensors are dense, pass sparse=False");
  TORCH_CHECK(call.tensors[0].dim() == 2, "'weight' must be 2-D");
  Rule rule;
  Factor row;
  row.kernel = true;
  row.reduce = ReduceOp::Sum;
  const auto v = rule.factor(row);
  Dims indices;
  for (int64_t d = 0; d < call.tensors[1].dim(); ++d) {
    indices.emplace_back(rule.factor());
  }
  auto out = indices;
  out.emplace_back(rule.factor());
  rule.operands = {Operand({v, out.back()}), Operand(indices)};
  rule.results = {Result(out)};
  rule.kernel = embedding_kernel;
  rule.linear_in({0});
  return rule;
}

// (grad_output, indices, num_weights, padding_idx, scale_grad_by_freq)
Rule embedding_dense_backward(const Call& call) {
  Rule rule;
  Factor f;
  f.reduce = ReduceOp::Sum;
  f.whole = call.flag(4); // frequencies count all indices
  Dims indices;
  for (int64_t d = 0; d < call.tensors[1].dim(); ++d) {
    indices.emplace_back(rule.factor(f));
  }
  auto grad = indices;
  grad.emplace_back(rule.factor());
  rule.operands = {Operand(grad), Operand(indices)};
  rule.results = {Result(Dims{Dim(), grad.back()})};
  rule.linear_in({0});
  return rule;
}

// Each rank renormalises those of the named rows that it holds; it must see all indices.
void renorm_kernel(Run& run) {
  auto weight = run.arg(0).toTensor();
  const auto indices = run.arg(1).toTensor().reshape(-1);
  check_bounds(indices, run.operands[0].sizes[0]);
  const auto held = rows_held(run);
  const auto here = at::masked_select(indices - held.start, (indices >= held.start).logical_and_(indices < held.start + held.length));
  if (here.numel()) {
    at::embedding_renorm_(weight, here, run.arg(2).toDouble(), run.arg(3).toDouble());
  }
  run.returns({std::move(weight)});
}

// (weight, indices, max_norm, norm_type)
Rule embedding_renorm(const Call& call) {
  Rule rule;
  Factor row;
  row.kernel = true;
  Dims table{rule.factor(row), rule.whole()};
  rule.operands = {Operand(table), Operand(Dims(call.tensors[1].dim(), Dim()))};
  rule.results = {Result(table)};
  rule.kernel = renorm_kernel;
  return rule;
}

} // namespace

void register_embedding(Registry& r) {
  Options o;
  o.any_args = true;
  r.add("embedding", {"embedding"}, embedding);
  r.add("embedding", {"embedding_dense_backward"}, embedding_dense_backward);
  r.add("embedding", {"embedding_renorm_"}, embedding_renorm, o);
}

} // namespace shardtensor::rules
