// Cat, stack and similar ops: several operands become one, or one is repeated.
// Along a sharded dim each operand of cat is a window of the result: pieces stay on their ranks if their order allows it.
#include "rules/exact_dtypes.h"
#include "rules/kernel_utils.h"
#include "rules/pad_empty.h"
#include "rules/registry.h"
#include "rules/solution.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace shardtensor::rules {

namespace {

// ---- cat, stack ----

Rule cat(const Call& call) {
  Rule rule;
  int64_t n = 0;
  for (const auto& t : call.tensors) {
    n = std::max(n, t.dim());
  }
  TORCH_CHECK(n > 0, "zero-dimensional tensor cannot be concatenated");
  const auto dim = call.dim(1, n);
  const auto skipped = [&](const TensorArg& t) { return t.dim() == 1 && n > 1 && t.size(0) == 0; }; // as torch does
  bool sharded = false;
  c10::SymInt total = 0;
  SymSizes sizes;
  for (const auto& t : call.tensors) {
    if (!skipped(t)) {
      TORCH_CHECK(t.dim() == n, "Tensors must have same number of dimensions: got ", n, " and ", t.dim());
      sharded |= t.layout->shards(dim);
    }
  }
  for (const auto& t : call.tensors) {
    if (sharded && !skipped(t)) {
      total = plus(total, t.sym_size(dim));
      sizes = t.sym_sizes();
    }
  }
  auto dims = fresh_dims(rule, n);
  auto out = dims;
  out[dim] = sharded ? dims[dim] : Dim(kNone);
  if (sharded) {
    rule.factors[dim].size = total;
  }
  c10::SymInt start = 0;
  for (const auto& t : call.tensors) {
    if (skipped(t)) {
      rule.operands.emplace_back(Dims(1, Dim(kNone)));
      continue;
    }
    auto& operand = rule.operands.emplace_back(out);
    if (sharded) {
      operand.dims[dim].window = Dim::SymWindow{start, 1, t.sym_size(dim)};
      start = plus(start, t.sym_size(dim));
    }
  }
  auto& result = rule.results.emplace_back(std::move(out));
  if (sharded) {
    sizes[dim] = total;
    result.sizes = std::move(sizes);
  }
  rule.linear.push_back(moves(call, OperandSet::first(call.tensors.size()), promoted(call)));
  return rule;
}

Rule stack(const Call& call) {
  Rule rule;
  auto dims = fresh_dims(rule, call.tensors[0].dim());
  const auto dim = call.dim(1, call.tensors[0].dim() + 1);
  for (const auto& t : call.tensors) {
    TORCH_CHECK(
        t.sym_sizes() == call.tensors[0].sym_sizes(), "stack expects each tensor to be equal size, but got ",
        call.tensors[0].sizes(), " and ", t.sizes());
    rule.operands.emplace_back(dims);
  }
  dims.insert(dims.begin() + dim, Dim(kNone));
  rule.results.emplace_back(std::move(dims));
  rule.linear.push_back(moves(call, OperandSet::first(call.tensors.size()), promoted(call)));
  return rule;
}

Rule block_diag(const Call& call) {
  auto rule = replicate(call);
  rule.results.emplace_back(Dims(2, Dim(kNone)));
  rule.linear.push_back(moves(call, OperandSet::first(call.tensors.size()), promoted(call)));
  return rule;
}

// Each tensor is padded along `dim` and cut into chunks there, its later dims are flattened, and then all are joined.
Rule chunk_cat(const Call& call) {
  Rule rule;
  const auto& first = call.tensors[0];
  const auto dim = call.dim(1, first.dim());
  const auto lead = fresh_dims(rule, dim);
  auto out = lead;
  out.append(2, Dim(kNone));
  for (const auto& t : call.tensors) {
    if (t.output) {
      continue;
    }
    const auto sizes = t.sym_sizes(), sizes_of_first = first.sym_sizes();
    TORCH_CHECK(std::find(sizes.begin(), sizes.end(), 0) == sizes.end(), "_chunk_cat expects non-empty tensor");
    TORCH_CHECK(
        t.dim() > dim && std::equal(sizes.begin(), sizes.begin() + dim, sizes_of_first.begin()),
        "_chunk_cat expects same sizes of 0,...,dim-1 dimensions for all tensors");
    auto dims = lead;
    dims.resize(t.dim(), Dim(kNone));
    rule.operands.emplace_back(std::move(dims));
  }
  rule.results.emplace_back(std::move(out));
  add_outputs(call, rule);
  rule.linear.push_back(computes(call, OperandSet::first(call.tensors.size()), call.tensors[0].dtype));
  rule.kernel = call_op_nonempty;
  rule.kernel_if = is_empty;
  return rule;
}

} // namespace

void register_joins(Registry& r) {
  r.add("joins", {"_chunk_cat", "_chunk_cat.out"}, chunk_cat);
  r.add("joins", {"block_diag"}, block_diag, {.whole = true});
  r.add("joins", {"cat"}, cat, {.autograd = formulas::cat});
  r.add("joins", {"pad_sequence"}, kAsOtherOps, {.autograd = formulas::pad_sequence});
  r.add("joins", {"stack"}, stack);
}

} // namespace shardtensor::rules
