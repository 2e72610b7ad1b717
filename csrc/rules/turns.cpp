// flip, roll, rot90: indices move along some dims, which stay whole. And shifted, our own op, to which rolls and circular padding
// along a cut dim turn (autograd/shifts.cpp): there each rank reads what it lacks.
#include "rules/pieces.h"
#include "rules/registry.h"
#include "rules/windows.h"

#include <torch/library.h>

namespace shardtensor::rules {

namespace {

uint64_t named_dims(const Call& call, int64_t arg) {
  uint64_t mask = 0;
  for (auto d : call.ints(arg)) {
    mask |= uint64_t{1} << wrap_dim(d, call.tensors[0].dim());
  }
  return mask;
}

Rule flip(const Call& call) {
  return whole_along(call, named_dims(call, 1));
}

// Without dims the tensor is rolled as if it were flat.
Rule roll(const Call& call) {
  return whole_along(call, call.ints(2).empty() ? ~uint64_t{0} : named_dims(call, 2));
}

Rule rot90(const Call& call) {
  return whole_along(call, named_dims(call, 2));
}

// ---- shifted(copies of x, dim, shifts, size, like): result o is the sum of x[o + shift] over the shifts; beyond x's edges are
// zeros. Where `like` is given, the result is cut as it is. ----

at::Tensor shifted(
    at::TensorList copies, int64_t dim, at::IntArrayRef shifts, c10::SymInt size, const std::optional<at::Tensor>& /*like*/) {
  auto sizes = copies[0].sym_sizes().vec();
  const auto held = sizes[dim].guard_int(__FILE__, __LINE__), made = size.guard_int(__FILE__, __LINE__);
  sizes[dim] = made;
  auto out = copies[0].new_zeros_symint(sizes);
  for (size_t i = 0; i < shifts.size(); ++i) {
    const auto start = std::max<int64_t>(0, -shifts[i]), end = std::min(made, held - shifts[i]);
    if (start < end) {
      out.narrow(dim, start, end - start).add_(copies[i].narrow(dim, start + shifts[i], end - start));
    }
  }
  return out;
}

void shifted_kernel(Run& run) {
  if (run.solution.halos.empty()) {
    return run.call_op();
  }
  const auto copies = run.arg(0).toTensorVector();
  const auto dim = run.arg(1).toInt();
  const auto shifts = run.arg(2).toIntVector();
  const auto& mine = *cut_run(run, dim);
  auto out = copies[0].new_zeros_symint(sizes_of_piece(run));
  for (size_t i = 0; i < shifts.size(); ++i) {
    const auto& read = run.solution.halo(i)->fetch.mine()[dim].inside;
    if (read.length > 0) {
      out.narrow(dim, read.start - shifts[i] - mine.start, read.length).add_(copies[i]);
    }
  }
  run.returns({out});
}

Rule shifted_rule(const Call& call) {
  Rule rule;
  const auto dim = call.integer(1);
  const auto shifts = call.ints(2);
  const auto dims = fresh_dims(rule, call.tensors[0].dim());
  rule.factors[dim].size = call.integer(3);
  for (const auto shift : shifts) {
    auto& copy = rule.operands.emplace_back(dims);
    copy.dims[dim] = rule.windows(dim, {1, 1, shift, shift});
    copy.padding = std::nullopt;
  }
  if (call.tensors.size() > shifts.size()) {
    rule.operands.emplace_back(dims).free = true;
  }
  rule.results.emplace_back(dims, call.tensors[0].sym_sizes());
  rule.results[0].sizes[dim] = call.integer(3);
  rule.jointly_linear(OperandSet::first(shifts.size()));
  rule.kernel = shifted_kernel;
  rule.always_kernel = true;
  return rule;
}

TORCH_LIBRARY_FRAGMENT(shardtensor, m) {
  m.def("shifted(Tensor[] copies, int dim, int[] shifts, SymInt size, Tensor? like=None) -> Tensor");
  m.impl("shifted", c10::DispatchKey::CompositeExplicitAutograd, shifted);
}

} // namespace

void register_turns(Registry& r) {
  r.add("turns", {"flip"}, flip);
  r.add("turns", {"roll"}, roll);
  r.add("turns", {"rot90"}, rot90, {.asks_order = true});
  r.add("turns", {"shardtensor::shifted"}, shifted_rule, {.symbols = true});
}

} // namespace shardtensor::rules
