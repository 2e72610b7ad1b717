#include "rules/windows.h"

#include "comm/tensor_kind.h"
#include "rules/kernel_utils.h"
#include "rules/pad_empty.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace shardtensor::rules {

int64_t space_of(const c10::FunctionSchema& schema) {
  const auto& name = schema.name();
  for (size_t i = 0; i + 1 < name.size(); ++i) {
    if (name[i] >= '1' && name[i] <= '3' && name[i + 1] == 'd') {
      return name[i] - '0';
    }
  }
  return 0;
}

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

void read_through(Rule& rule, const Windows& windows, SymSizes sizes) {
  auto& result = rule.results[0];
  result.sizes = std::move(sizes);
  for (int64_t i = 0; i < windows.ndim(); ++i) {
    const auto& [size, count, reach, taps] = windows.space[i];
    const bool back = windows.reversed;
    read_through(rule, windows.lead + i, back ? size : count, back ? mirror(reach, size) : reach);
  }
  // The input is cut as the result; indices are cut as the gradient.
  for (size_t o = 1; windows.backward && o < rule.operands.size(); ++o) {
    rule.operands[o].dims = o == 1 ? result.dims : rule.operands[0].dims;
  }
}

bool has_no_elements(c10::SymIntArrayRef sizes) {
  return std::any_of(sizes.begin(), sizes.end(), [](const c10::SymInt& n) { return n == 0; });
}

WindowShare share_of(const KernelRun& run, const Windows& windows, int64_t i) {
  const auto d = windows.lead + i;
  const auto* halo = run.solution.halo(0);
  const auto* mine = halo ? cut_run(run, d + windows.more_factors) : nullptr;
  if (mine) {
    return {true, *mine, halo->fetch.mine()[d]};
  }
  const auto& [size, count, reach, taps] = windows.space[i];
  const Interval cells{0, size}, all{0, count};
  return {false, windows.reversed ? cells : all, {0, windows.reversed ? all : cells, 0}};
}

void CropOrPad::along(int64_t dim, const Interval& has, const Interval& wants) {
  if (!(has == wants)) {
    sides_.push_back({dim, has.start - wants.start, wants.end() - has.end(), wants.length});
  }
}

at::Tensor CropOrPad::operator()(const at::Tensor& t) const {
  if (sides_.empty()) {
    return t;
  }
  std::vector<int64_t> pad(2 * t.dim(), 0); // the last dim first
  auto cropped = t;
  bool grows = false;
  for (const auto& [dim, before, after, length] : sides_) {
    const auto at = 2 * (t.dim() - 1 - dim);
    pad[at] = before;
    pad[at + 1] = after;
    grows = grows || before > 0 || after > 0;
    cropped = grows ? cropped : cropped.narrow(dim, -before, length);
  }
  return grows ? at::constant_pad_nd(t, pad) : cropped;
}

namespace {

// For a rank without a share: the share of the first window.
WindowShare share_of_one(const Windows& windows, int64_t i) {
  const auto held = read(windows.space[i].reach, {0, 1}, windows.space[i].size);
  const Interval first{0, 1};
  if (!windows.reversed) {
    return {true, first, held};
  }
  return {true, held.inside.length ? held.inside : first, {0, first, 0}};
}

// Zeros in place of an operand. `length`: along the dims of space that are cut.
at::Tensor zeros_for_one(
    const KernelRun& run, const Windows& windows, size_t operand, c10::function_ref<int64_t(const WindowShare&)> length) {
  const auto t = run.arg(operand).toTensor(); // the first arguments are the first operands
  const auto whole = run.operands[operand].symbols;
  auto sizes = t.sym_sizes().vec();
  for (int64_t d = 0; d < t.dim(); ++d) {
    const auto i = d - windows.lead;
    if (i >= 0 && i < windows.ndim() && share_of(run, windows, i).cut) {
      sizes[d] = length(share_of_one(windows, i));
    } else if (sizes[d] == 0 && whole[d] != 0) {
      sizes[d] = 1;
    }
  }
  return t.new_zeros_symint(sizes);
}

} // namespace

bool run_windowed(
    KernelRun& run,
    const Windows& windows,
    c10::function_ref<NativeIntervals(int64_t i, const WindowShare& share)> each,
    Kernel call) {
  const bool works = !is_empty(run.arg(0).toTensor()) && !has_no_elements(sizes_of_piece(run));
  if (!works) {
    run.arg(0) = zeros_for_one(run, windows, 0, [](const WindowShare& s) { return s.reads.length(); });
    if (windows.backward && run.arg(1).isTensor()) {
      run.arg(1) = zeros_for_one(run, windows, 1, [](const WindowShare& s) { return s.makes.length; });
    }
  }
  CropOrPad given, made;
  for (int64_t i = 0; i < windows.ndim(); ++i) {
    auto share = share_of(run, windows, i);
    if (share.cut) {
      share = works ? share : share_of_one(windows, i);
      const auto native = each(i, share);
      given.along(windows.lead + i, share.read(), native.given);
      made.along(windows.lead + i, native.made, share.makes);
    }
  }
  run.arg(0) = given(run.arg(0).toTensor());
  call ? call(run) : run.call_op();
  const auto count = run.op.schema().returns().size();
  const auto results = run.stack.end() - static_cast<int64_t>(count);
  if (works) {
    results[0] = made(results[0].toTensor());
    return true;
  }
  for (size_t nth = 0; nth < count; ++nth) {
    if (const auto t = results[nth].toTensor(); t.defined()) {
      results[nth] = t.new_zeros_symint(sizes_of_piece(run, nth));
    }
  }
  return false;
}

void set_along(const KernelRun& run, const Windows& windows, const char* name, int64_t i, int64_t value) {
  const auto at = argument(run, name);
  if (at < 0) {
    return;
  }
  const auto old = guarded(run.arg(at).toSymIntVector());
  std::vector<int64_t> list;
  for (int64_t k = 0; k < windows.ndim(); ++k) {
    list.push_back(k == i ? value : integer_at(old, k));
  }
  run.arg(at) = std::move(list);
}

NativeIntervals whole_windows(const KernelRun& run, const Windows& windows, int64_t i, const WindowShare& share) {
  set_along(run, windows, "padding", i, 0);
  set_along(run, windows, "output_padding", i, 0);
  set_along(run, windows, "output_size", i, share.makes.length);
  return {share.read(), share.makes};
}

SymSizes sizes_of_piece(const KernelRun& run, size_t nth) {
  SymSizes sizes;
  for (const auto& from : run.solution.results[nth].sizes) {
    sizes.push_back(from.value);
  }
  return sym_local_sizes(*run.solution.results[nth].layout, sizes);
}

std::vector<c10::IValue> results_of_op(const KernelRun& run) {
  std::vector<c10::IValue> stack(run.stack.begin() + static_cast<int64_t>(run.base()), run.stack.end());
  run.op.callBoxed(&stack);
  return stack;
}

bool may_ask_values(const at::Tensor& piece) {
  return !is_traced(piece) && !piece.is_meta();
}

} // namespace shardtensor::rules
