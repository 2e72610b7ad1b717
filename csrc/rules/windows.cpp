#include "rules/windows.h"

#include "comm/values.h"
#include "rules/empties.h"

namespace shardtensor::rules {

bool cut_in_space(const Call& call, int64_t space) {
  const auto ndim = call.tensors[0].dim();
  const uint64_t mask = ((uint64_t{1} << space) - 1) << (ndim - space);
  return std::any_of(call.tensors.begin(), call.tensors.end(), [&](const TensorArg& t) {
    return t.dim() == ndim && (t.layout->sharded_dims() & mask);
  });
}

Rule planes(const Call& call, int64_t space) {
  Rule rule;
  const auto lead = call.tensors[0].dim() - space;
  auto dims = fresh_dims(rule, lead);
  dims.resize(call.tensors[0].dim(), Dim(kNone));
  for (const auto& t : call.tensors) {
    rule.operands.emplace_back(t.dim() == static_cast<int64_t>(dims.size()) ? dims : Dims(t.dim(), Dim(kNone)));
  }
  rule.results.assign(call.schema.returns().size(), Result(dims));
  if (cut_in_space(call, space)) {
    for (int64_t d = 0; d < lead; ++d) {
      rule.spread.push_back(dims[d].factor);
    }
  }
  rule.kernel = call_op_nonempty;
  rule.kernel_if = is_empty;
  return rule;
}

void read_through(Rule& rule, int64_t d, int64_t count, const Reach& reach) {
  while (static_cast<int64_t>(rule.factors.size()) <= d) {
    rule.factor();
  }
  auto& result = rule.results[0];
  rule.factors[d].size = count;
  rule.operands[0].dims[d] = rule.windows(d, reach);
  result.dims[d] = d;
  if (!result.sizes.empty()) {
    result.sizes[d] = count;
  }
}

bool makes_nothing(c10::SymIntArrayRef sizes) {
  return std::any_of(sizes.begin(), sizes.end(), [](const c10::SymInt& n) { return n == 0; });
}

SymSizes sizes_of_piece(const Run& run, size_t nth) {
  SymSizes sizes;
  for (const auto& from : run.solution.results[nth].sizes) {
    sizes.push_back(from.value);
  }
  return sym_local_sizes(*run.solution.results[nth].layout, sizes);
}

std::vector<c10::IValue> results_of_op(const Run& run) {
  std::vector<c10::IValue> stack(run.stack.begin() + static_cast<int64_t>(run.base()), run.stack.end());
  run.op.callBoxed(&stack);
  return stack;
}

bool may_ask_values(const at::Tensor& piece) {
  return !is_traced(piece) && !piece.is_meta();
}

} // namespace shardtensor::rules
