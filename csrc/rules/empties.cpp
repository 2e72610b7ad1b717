#include "rules/empties.h"

#include "rules/resolve.h"

#include <ATen/ATen.h>

namespace shardtensor::rules {

namespace {

at::Tensor without_empty_dims(const at::Tensor& t) {
  auto sizes = t.sizes().vec();
  for (auto& s : sizes) {
    s = std::max<int64_t>(s, 1);
  }
  return at::zeros(sizes, t.options());
}

at::Tensor cut_to_layout(at::Tensor t, const Solution::Result& result, const Run& run) {
  for (size_t d = 0; d < result.sizes.size() && t.defined(); ++d) {
    const auto& from = result.sizes[d];
    if (from.operand == -1) {
      continue;
    }
    const auto size = from.operand >= 0 ? run.operands[from.operand].sizes[from.dim] : from.value;
    const auto dim = static_cast<int64_t>(d);
    const auto piece = result.layout->local_size(dim, size);
    if (piece < t.size(dim)) {
      t = t.narrow(dim, 0, piece);
    }
  }
  return t;
}

} // namespace

void call_op_nonempty(Run& run) {
  bool empty = false;
  size_t operand = 0;
  for (size_t i = 0; i < run.op.schema().arguments().size(); ++i) {
    auto& value = run.arg(i);
    if (!value.isTensor() || !value.toTensor().defined()) {
      continue;
    }
    const bool whole_is_empty = c10::multiply_integers(run.operands[operand++].sizes) == 0;
    if (value.toTensor().numel() == 0 && !whole_is_empty) {
      value = without_empty_dims(value.toTensor());
      empty = true;
    }
  }
  run.call_op();
  if (!empty) {
    return;
  }
  const auto first = run.stack.size() - run.op.schema().returns().size();
  size_t nth = 0;
  for (size_t i = first; i < run.stack.size(); ++i) {
    if (run.stack[i].isTensor() && nth < run.solution.results.size()) {
      run.stack[i] = cut_to_layout(run.stack[i].toTensor(), run.solution.results[nth++], run);
    }
  }
}

} // namespace shardtensor::rules
