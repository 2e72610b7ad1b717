// Copies and factories: ops that keep any layout of their tensor.
#include "rules/exact_dtypes.h"
#include "rules/kernel_utils.h"
#include "rules/registry.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

namespace shardtensor::rules {

namespace {

// Only moves values, so every kind of Partial passes.
Rule copy_of_first(const Call& call) {
  auto rule = broadcast(call);
  rule.linear.push_back(moves(call, OperandSet::first(call.tensors.size()), call.tensors[0].dtype));
  return rule;
}

// A cast.
Rule cast(const Call& call) {
  auto rule = broadcast(call);
  const auto& x = call.tensors[0];
  const auto arg = call.position("dtype");
  const auto to = call.has(arg) ? call.arg(arg).toScalarType() : x.dtype;
  rule.linear.push_back(moves(call, OperandSet::first(call.tensors.size()), to));
  return rule;
}

// self.copy_(src): src is brought to self's layout, cast and broadcast.
Rule copy_into(const Call& call) {
  auto rule = broadcast(call);
  rule.linear.push_back(moves(call, 0b11, call.tensors[0].dtype));
  return rule;
}

// zeros_like, ones_like: read the shape and the shards of the operand, but no values.
Rule like_self(const Call& call) {
  Rule rule;
  auto dims = fresh_dims(rule, call.tensors[0].dim());
  rule.operands.emplace_back(dims);
  rule.operands[0].free = true;
  for (size_t i = 1; i < call.tensors.size(); ++i) {
    rule.operands.emplace_back(dims);
  }
  rule.results.emplace_back(dims);
  return rule;
}

// Zeros for a tangent: the batch dims of the tangents, which the first operand has in front, and then all dims of the second
// operand. No values are read.
void zeros_like_second_kernel(KernelRun& run) {
  const auto tangent = run.arg(0).toTensor(), other = run.arg(1).toTensor();
  auto sizes = tangent.sym_sizes().slice(0, run.arg(2).toInt()).vec();
  const auto sizes_of_other = other.sym_sizes();
  sizes.insert(sizes.end(), sizes_of_other.begin(), sizes_of_other.end());
  run.returns({at::zeros_symint(sizes, tangent.options())});
}

Rule zeros_like_second(const Call& call) {
  Rule rule;
  const auto &tangent = call.tensors[0], &other = call.tensors[1];
  const auto dims = fresh_dims(rule, other.dim());
  Dims result(call.integer(2), Dim(kNone));
  result.insert(result.end(), dims.begin(), dims.end());
  rule.operands.emplace_back(Dims(tangent.dim(), Dim(kNone)));
  rule.operands[0].free = true;
  rule.operands.emplace_back(dims);
  rule.results.emplace_back(std::move(result));
  rule.passes_partial(0b10);
  rule.always(zeros_like_second_kernel);
  return rule;
}

// empty_like: the values are undefined, so it keeps Partial too, like DTensor's: Module.to_empty() does not change the
// placements of buffers.
Rule empty_like(const Call& call) {
  auto rule = like_self(call);
  rule.operands[0].free = false;
  rule.passes_partial();
  rule.linear[0].moves = false; // values that are written into it need not be picked
  return rule;
}

// new_zeros and similar ops read no values of self. Dims with the size of self's dim are cut like it, so that the zeros into
// which torch's formulas write gradients (of gather, of indexing) have the gradient's layout. Other dims are whole.
Rule new_like(const Call& call) {
  Rule rule;
  const auto& x = call.tensors[0];
  auto sizes = call.sym_ints(1);
  Dims in, out(sizes.size(), Dim(kNone));
  for (int64_t d = 0; d < x.dim(); ++d) {
    in.emplace_back(rule.factor());
    if (static_cast<int64_t>(sizes.size()) == x.dim() && sizes[d] == x.sym_size(d)) {
      out[d] = in[d];
    }
  }
  rule.operands.emplace_back(std::move(in));
  rule.operands[0].free = true;
  rule.results.emplace_back(std::move(out), std::move(sizes));
  rule.results[0].same_over = ~uint64_t{0}; // a new tensor: every rank makes the same
  rule.sizes_arg = 1;
  return rule;
}

// The piece's dims have the order of the requested strides.
void new_empty_strided_kernel(KernelRun& run) {
  const auto sizes = run.arg(1).toSymIntVector();
  const auto strides = run.arg(2).toSymIntVector();
  Sizes order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return strides[a] < strides[b]; });
  SymSizes local(sizes.size(), 1);
  c10::SymInt next = 1;
  for (auto d : order) {
    local[d] = next;
    next = sizes[d] == 0 ? next : next * sizes[d];
  }
  run.arg(2) = c10::SymIntArrayRef(local);
  run.call_op();
}

Rule new_empty_strided(const Call& call) {
  auto rule = new_like(call);
  rule.results[0].strides = call.sym_ints(2);
  rule.always(new_empty_strided_kernel);
  return rule;
}

Rule zero(const Call& call) {
  auto rule = broadcast(call);
  rule.linear.push_back(computes(call, 1, call.tensors[0].dtype)); // zero everywhere sums to zero
  return rule;
}

// Asks this rank's piece and does not communicate, because the answer may differ between ranks.
Rule of_piece(const Call& call) {
  return unread(call, [](KernelRun& run) { run.call_op(); });
}

} // namespace

void register_copies(Registry& r) {
  r.add("copies", {"clone", "clone.out", "lift", "lift_fresh", "lift_fresh_copy"}, copy_of_first);
  r.add("copies", {"_to_copy"}, cast, {.autograd = formulas::to_copy});
  // Module.load_state_dict calls copy_.
  r.add(
      "copies", {"copy_", "copy"}, copy_into,
      {.if_plain =
           " To load a state dict of plain tensors, use torch.distributed.checkpoint.state_dict.set_model_state_dict with "
           "StateDictOptions(full_state_dict=True)."});
  r.add("copies", {"full_like", "ones_like", "zeros_like"}, like_self);
  r.add("copies", {"_new_zeros_with_same_feature_meta"}, zeros_like_second, {.symbols = true});
  r.add("copies", {"empty_like"}, empty_like, {.unwritten = true});
  constexpr auto* kDense = "it holds dense pieces; make this rank's piece sparse (to_local()), or the whole (full_tensor())";
  r.add(
      "copies",
      {"_to_sparse", "_to_sparse.sparse_dim", "_to_sparse_bsc", "_to_sparse_bsr", "_to_sparse_csc", "_to_sparse_csr",
       "to_mkldnn"},
      nullptr, {.way = Way::Refused, .why = kDense});
  r.add("copies", {"is_pinned"}, of_piece);
  r.add(
      "copies",
      {"_nested_from_padded", "_nested_tensor_from_mask", "_nested_tensor_from_tensor_list", "_nested_view_from_buffer"}, nullptr,
      {.way = Way::Refused,
       .why = "a strided nested tensor has its own memory, which cannot hold the pieces of a ShardTensor; use "
              "layout=torch.jagged, which holds a ShardTensor, or nest pieces (to_local()) or whole tensors (full_tensor())",
       .plain = true});
  r.add("copies", {"new_full", "new_ones", "new_zeros"}, new_like, {.symbols = true});
  r.add("copies", {"new_empty"}, new_like, {.symbols = true, .unwritten = true});
  r.add(
      "copies", {"new_empty_strided"}, new_empty_strided,
      {.autograd = formulas::new_empty_strided, .symbols = true, .unwritten = true});
  // Their ends are single numbers.
  r.add(
      "copies",
      {"linspace.Scalar_Tensor", "linspace.Tensor_Scalar", "linspace.Tensor_Tensor", "logspace.Scalar_Tensor",
       "logspace.Tensor_Scalar", "logspace.Tensor_Tensor"},
      replicate);
  // Without a linear group, a Partial self is reduced first and carried back afterwards.
  r.add("copies", {"fill_.Scalar", "fill_.Tensor", "fill.Scalar", "fill.Tensor"}, broadcast, {.repeats = true});
  r.add("copies", {"zero_", "zero"}, zero, {.repeats = true});
}

} // namespace shardtensor::rules
