// Embeddings: if a table is sharded over its rows, each rank looks up its own rows, and the result holds summands.
#include "redistribute/neutral_value.h"
#include "rules/kernel_utils.h"
#include "rules/registry.h"

#include "comm/tensor_kind.h"
#include "rules/solution.h"

#include <ATen/ATen.h>
#include <torch/library.h>

namespace shardtensor::rules {

namespace {

// Checks against the whole table: a rank has only its own rows.
void check_bounds(const at::Tensor& indices, const c10::SymInt& rows) {
  if (is_empty(indices)) {
    return;
  }
  if (indices.is_cpu() && !is_traced(indices)) {
    const auto low = indices.min().item<int64_t>(), high = indices.max().item<int64_t>();
    TORCH_CHECK_INDEX(
        low >= 0 && rows > high, "index out of range in self: embedding got index ", low < 0 ? low : high, " for a table of ",
        rows, " rows");
  } else {
    at::_assert_async((indices >= 0).logical_and(indices < at::Scalar(rows)).all(), "index out of range in self: embedding");
  }
}

// Rows that this rank does not hold give zeros: the sum over the ranks is the lookup.
void embedding_kernel(KernelRun& run) {
  const auto weight = run.arg(0).toTensor();
  const auto indices = run.arg(1).toTensor();
  check_bounds(indices, run.operands[0].symbols[0]);
  const auto held = mine(run, 0, 0);
  const auto nothing = neutral_summand(ReduceOp::Sum, weight.scalar_type());
  if (held.length == 0) {
    auto sizes = indices.sym_sizes().vec();
    sizes.push_back(weight.sym_size(1));
    run.returns({at::full_symint(sizes, nothing, weight.options())});
    return;
  }
  const auto at = inside(indices, held);
  run.returns({at::embedding(weight, at.index).masked_fill_(at.outside.unsqueeze(-1), nothing)});
}

// (weight, indices, padding_idx, scale_grad_by_freq, sparse)
Rule embedding(const Call& call) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !call.flag(4), "embedding: argument 'sparse' is True; gradients of ShardTensors are dense, pass sparse=False");
  TORCH_CHECK(call.tensors[0].dim() == 2, "'weight' must be 2-D");
  Rule rule;
  const auto v = rule.factor({.kernel = true, .reduce = ReduceOp::Sum, .picked = true});
  auto indices = fresh_dims(rule, call.tensors[1].dim());
  auto out = indices;
  out.emplace_back(rule.factor());
  rule.operands = {Operand({v, out.back()}), Operand(indices)};
  rule.results = {Result(out)};
  rule.kernel = embedding_kernel;
  rule.linear_in({0});
  return rule;
}

// The dims of the indices. A gradient sums over them; with `frequencies`, each rank needs all indices.
Dims summed_indices(Rule& rule, const Call& call, bool frequencies) {
  return fresh_dims(rule, call.tensors[1].dim(), {.whole = frequencies, .reduce = ReduceOp::Sum});
}

// (grad_output, indices, num_weights, padding_idx, scale_grad_by_freq)
Rule embedding_dense_backward(const Call& call) {
  Rule rule;
  const auto indices = summed_indices(rule, call, call.flag(4));
  auto grad = indices;
  grad.emplace_back(rule.factor());
  rule.operands = {Operand(grad), Operand(indices)};
  rule.results = {Result(Dims{Dim(), grad.back()})};
  rule.linear_in({0});
  return rule;
}

// The gradient of this rank's rows of the result, from all indices.
void table_backward_kernel(KernelRun& run) {
  const auto grad = run.arg(0).toTensor(), indices = run.arg(1).toTensor();
  const auto padding = run.arg(4).toInt();
  const auto held = mine(*run.solution.results[0].layout, 0, run.arg(3).toSymInt());
  const at::Scalar spare(held.length);
  const auto at = inside(indices, held, spare).index.masked_fill_(indices == padding, spare);
  const auto rows = at::embedding_dense_backward_symint(grad, at, held.length + 1, held.length, run.arg(5).toBool());
  run.returns({rows.narrow_symint(0, 0, held.length)});
}

// (grad_output, indices, weight, num_weights, padding_idx, scale_grad_by_freq): if the table's rows are sharded, each rank
// computes the gradient of its own rows.
Rule table_backward(const Call& call) {
  Rule rule;
  const auto indices = summed_indices(rule, call, call.flag(5));
  auto grad = indices;
  grad.emplace_back(rule.factor());
  const Dims table{rule.factor({.kernel = true}), grad.back()};
  rule.operands = {Operand(grad), Operand(indices), Operand(table)};
  rule.operands[2].free = true; // only its layout is read
  rule.results = {Result(table)};
  rule.kernel = table_backward_kernel;
  rule.linear_in({0});
  return rule;
}

// Each rank renormalises the indexed rows that it holds; it needs all indices.
void embedding_renorm_kernel(KernelRun& run) {
  auto weight = run.arg(0).toTensor();
  need_values(weight, "embedding_renorm_ (an embedding with max_norm)");
  const auto indices = run.arg(1).toTensor().reshape(-1);
  check_bounds(indices, run.operands[0].symbols[0]);
  const auto held = mine(run, 0, 0).numbers();
  const auto here = at::masked_select(indices - held.start, (indices >= held.start).logical_and_(indices < held.end()));
  if (here.numel()) {
    at::embedding_renorm_(weight, here, run.arg(2).toDouble(), run.arg(3).toDouble());
  }
  run.returns({std::move(weight)});
}

// (weight, indices, max_norm, norm_type)
Rule embedding_renorm(const Call& call) {
  Rule rule;
  Dims table{rule.factor({.kernel = true}), rule.whole()};
  rule.operands = {Operand(table), Operand(Dims(call.tensors[1].dim(), Dim()))};
  rule.results = {Result(table)};
  rule.always(embedding_renorm_kernel); // torch's kernel does not check the indices
  return rule;
}

// ---- embedding_bag: the columns are independent; a bag needs all rows and indices ----

constexpr int64_t kMax = 2; // mode

// (weight, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights?, ...)
//   -> output [bags, d], offset2bag, bag_size, max_indices
Rule embedding_bag(const Call& call) {
  auto rule = replicate(call);
  const auto d = rule.factor();
  rule.operands[0].dims[1] = d;
  rule.results.resize(4);
  rule.results[0].dims = {Dim(), d};
  for (size_t i : {1, 2, 3}) {
    rule.results[i].reduce.emplace(std::nullopt);
  }
  if (call.integer(4) == kMax) {
    rule.results[3].dims = {Dim(), d};
  }
  return rule;
}

// (grad [bags, d], indices, ..., maximum_indices, ...) -> [num_weights, d]
Rule embedding_bag_backward(const Call& call) {
  auto rule = replicate(call);
  const auto d = rule.factor();
  rule.operands[0].dims[1] = d;
  const auto picked = call.operand(call.position("maximum_indices"));
  if (call.integer(call.position("mode")) == kMax && picked >= 0) {
    rule.operands[picked].dims[1] = d;
  }
  rule.results.emplace_back(Dims{Dim(), d});
  rule.linear_in({0});
  return rule;
}

// (grad [bags, d], weight [v, d], ...) -> one number per index
Rule embedding_bag_per_sample_weights_backward(const Call& call) {
  auto rule = replicate(call);
  const auto d = rule.reduced(ReduceOp::Sum);
  rule.operands[0].dims[1] = d;
  rule.operands[1].dims[1] = d;
  rule.results.emplace_back(Dims{});
  rule.linear_in({0, 1});
  return rule;
}

// ---- one_hot ----

// If the number of classes must be inferred, it is inferred from all pieces.
void one_hot_kernel(KernelRun& run) {
  const auto x = run.arg(0).toTensor();
  auto classes = run.arg(1).toInt();
  if (classes == -1) {
    need_values(x, "one_hot without a number of classes");
    const auto most = x.numel() ? x.max().reshape({}) : at::full({}, -1, x.options());
    classes = over_ranks(most, run, mesh_dims_of(run, kAllFactors), ReduceOp::Max).item<int64_t>() + 1;
    TORCH_CHECK(classes > 0, "Can not infer total number of classes from empty tensor.");
  }
  run.returns({at::one_hot(x, classes)});
}

// (self, num_classes)
Rule one_hot(const Call& call) {
  TORCH_CHECK(call.tensors[0].dtype == at::kLong, "one_hot: expected classes of dtype int64, got ", call.tensors[0].dtype);
  Rule rule;
  auto dims = fresh_dims(rule, call.tensors[0].dim());
  rule.operands.emplace_back(dims);
  dims.emplace_back(kNone);
  rule.results.emplace_back(dims);
  rule.always(one_hot_kernel);
  return rule;
}

at::Tensor embedding_backward(
    const at::Tensor& grad,
    const at::Tensor& indices,
    const at::Tensor& /*weight*/,
    c10::SymInt num_weights,
    int64_t padding_idx,
    bool scale_grad_by_freq) {
  return at::embedding_dense_backward_symint(grad, indices, std::move(num_weights), padding_idx, scale_grad_by_freq);
}

// torch's backward op does not get the table, whose layout says which rows' gradient a rank computes.
TORCH_LIBRARY(shardtensor, m) {
  m.def(
      "embedding_backward(Tensor grad_output, Tensor indices, Tensor weight, SymInt num_weights, int padding_idx, bool "
      "scale_grad_by_freq) -> Tensor");
  m.impl("embedding_backward", c10::DispatchKey::CompositeExplicitAutograd, embedding_backward);
}

} // namespace

void register_embedding(Registry& r) {
  const Options bag{.symbols = true, .plain = true};
  r.add("embedding", {"_embedding_bag", "_embedding_bag_forward_only"}, embedding_bag, bag);
  r.add("embedding", {"_embedding_bag_backward", "_embedding_bag_dense_backward"}, embedding_bag_backward, bag);
  r.add("embedding", {"_embedding_bag_per_sample_weights_backward"}, embedding_bag_per_sample_weights_backward, bag);
  r.add("embedding", {"embedding"}, embedding, {.autograd = formulas::embedding, .symbols = true});
  r.add("embedding", {"embedding_dense_backward"}, embedding_dense_backward, {.symbols = true});
  r.add("embedding", {"shardtensor::embedding_backward"}, table_backward, {.symbols = true});
  r.add("embedding", {"embedding_renorm_"}, embedding_renorm, {.takes = kReals});
  r.add("embedding", {"one_hot"}, one_hot, {.autograd = formulas::integers, .symbols = true});
}

} // namespace shardtensor::rules
