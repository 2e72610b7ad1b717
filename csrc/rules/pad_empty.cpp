#include "rules/pad_empty.h"

#include "rules/solution.h"

#include <ATen/ATen.h>

namespace shardtensor::rules {

namespace {

bool only_this_piece_is_empty(const at::Tensor& t, c10::SymIntArrayRef sizes) {
  for (int64_t d = 0; d < t.dim(); ++d) {
    if (t.sym_size(d) == 0 && sizes[d] != 0) {
      return true;
    }
  }
  return false;
}

at::Tensor without_empty_dims(const at::Tensor& t, c10::SymIntArrayRef whole) {
  auto sizes = t.sym_sizes().vec();
  for (size_t d = 0; d < sizes.size(); ++d) {
    sizes[d] = sizes[d] == 0 && whole[d] != 0 ? c10::SymInt(1) : sizes[d];
  }
  return t.new_zeros_symint(sizes); // keep t's dtype: torch < 2.13 traces attention's statistics of doubles as floats
}

at::Tensor cut_to_layout(at::Tensor t, const Solution::ResultSpec& result, const KernelRun& run) {
  for (size_t d = 0; d < result.sizes.size() && t.defined(); ++d) {
    const auto& from = result.sizes[d];
    if (from.operand == -1) {
      continue;
    }
    const auto& size = from.operand >= 0 ? run.operands[from.operand].symbols[from.dim] : from.value;
    const auto dim = static_cast<int64_t>(d);
    const auto piece = sym_extent_before(*result.layout, result.layout->ndim(), dim, size, run.mesh().coordinate());
    if (piece < t.sym_size(dim)) {
      t = t.narrow_symint(dim, 0, piece);
    }
  }
  return t;
}

} // namespace

void call_op_nonempty(KernelRun& run) {
  bool empty = false;
  size_t operand = 0;
  const auto filled = [&](const at::Tensor& t) {
    const auto whole = run.operands[operand++].symbols;
    if (!only_this_piece_is_empty(t, whole)) {
      return t;
    }
    empty = true;
    return without_empty_dims(t, whole);
  };
  for (size_t i = 0; i < run.op.schema().arguments().size(); ++i) {
    auto& value = run.arg(i);
    if (value.isTensor() && value.toTensor().defined()) {
      value = filled(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorList()) {
        list.push_back(filled(t));
      }
      value = std::move(list);
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
