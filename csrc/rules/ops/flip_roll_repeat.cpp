// flip, roll, rot90, repeat: indices move along some dims. If such a dim is cut, each rank reads the elements of its results.
// Also our own ops (autograd/circular_pad_roll.cpp): shifted, for circular padding, and repeats_added, the gradient of repeat.
#include "rules/kernel_utils.h"
#include "rules/registry.h"
#include "rules/windows.h"
#include "tensor/shard_tensor.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>

namespace shardtensor::rules {

namespace {

uint64_t named_dims(const Call& call, int64_t arg) {
  uint64_t mask = 0;
  for (auto d : call.ints(arg)) {
    mask |= uint64_t{1} << wrap_dim(d, call.tensors[0].dim());
  }
  return mask;
}

// The dims of an operand whose values move only along the dims in `mask`. `reach` gives the run that is read of such a dim if
// it is cut.
template <typename F>
Rule moving(const Call& call, uint64_t mask, F reach) {
  auto rule = whole_along(call, mask);
  const auto& x = call.tensors[0];
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (!(mask >> d & 1) || !x.layout->shards(d)) {
      continue;
    }
    const auto at = rule.factor({.size = x.size(d)});
    rule.operands[0].dims[d] = rule.windows(at, reach(d));
    rule.operands[0].padding = std::nullopt;
    rule.results[0].dims[d] = at;
    rule.results[0].sizes = x.sym_sizes();
  }
  return rule;
}

Rule reversed(const Call& call, uint64_t mask) {
  return moving(call, mask, [&](int64_t d) {
    const auto last = call.tensors[0].size(d) - 1;
    return Reach{-1, 1, last, last};
  });
}

Rule flip(const Call& call) {
  return reversed(call, named_dims(call, 1));
}

// Along a cut dim, the box that a rank reads is already the result. Along the other dims torch's op rolls.
struct RollShifts {
  std::vector<int64_t> shifts, dims; // of the others
  bool moves;                        // along some cut dim
};

void roll_kernel(KernelRun& run) {
  if (run.solution.halos.empty()) {
    return run.call_op();
  }
  const auto& rest = kernel_data<RollShifts>(run.solution);
  const auto x = run.arg(0).toTensor(); // new memory, if it moved
  const bool own = rest.moves && !is_empty(x);
  run.returns({!rest.dims.empty() ? at::roll(x, rest.shifts, rest.dims) : own ? x : x.clone()});
}

// On the CPU torch joins two slices, so channels_last stays if neither is empty. Elsewhere, and in graphs, the result is
// contiguous.
std::optional<DimOrder> rolled_order(const Call& call, c10::IntArrayRef named) {
  const auto& x = call.tensors[0];
  if (call.mesh.description().device_type != "cpu" || x.has_symbols()) {
    return std::nullopt;
  }
  const auto format = channels_last_order(x);
  const auto by = call.ints(1);
  for (size_t i = 0; format && i < std::min(by.size(), named.size()); ++i) {
    const auto size = x.size(wrap_dim(named[i], x.dim()));
    if (size == 0 || by[i] % size == 0) {
      return std::nullopt;
    }
  }
  return format;
}

Rule roll_by_dims(const Call& call, c10::IntArrayRef named) {
  const auto& x = call.tensors[0];
  const auto mask = named_dims(call, 2);
  const auto cut = [&](int64_t d) { return x.layout->shards(d); };
  const bool any = std::any_of(named.begin(), named.end(), [&](int64_t d) { return cut(wrap_dim(d, x.dim())); });
  const auto by = any ? call.ints(1) : Sizes();
  if (by.size() != named.size() || (any && numel_of(x.sym_sizes()) == 0)) {
    return whole_along(call, mask); // torch raises, or returns a copy
  }
  RollShifts rest{{}, {}, false};
  Sizes shifts(x.dim(), 0);
  for (size_t i = 0; i < named.size(); ++i) {
    const auto d = wrap_dim(named[i], x.dim());
    shifts[d] += by[i];
    if (!cut(d)) {
      rest.shifts.push_back(by[i]);
      rest.dims.push_back(d);
    }
  }
  auto rule = moving(call, mask, [&](int64_t d) {
    const auto size = x.size(d), shift = ((shifts[d] % size) + size) % size;
    rest.moves = rest.moves || shift;
    return Reach{1, 1, -shift, -shift, PaddingMode::Circular};
  });
  rule.kernel_data = std::move(rest);
  rule.always(roll_kernel);
  return rule;
}

Rule roll(const Call& call) {
  const auto named = call.ints(2);
  if (named.empty()) {
    return whole_along(call, ~uint64_t{0}); // rolled as if it were flat
  }
  auto rule = roll_by_dims(call, named);
  rule.results[0].order = rolled_order(call, named);
  return rule;
}

// Without dims: rolled as if it were flat, along one dim.
std::optional<at::Tensor> roll_as_calls(c10::ArrayRef<c10::IValue> arguments) {
  const auto x = arguments[0].toTensor();
  const auto* impl = as_shard_tensor(x);
  const auto shifts = arguments[1].toSymIntVector();
  if (!impl || !impl->layout().is_sharded() || !arguments[2].toIntVector().empty() || shifts.size() != 1 || x.dim() < 1) {
    return std::nullopt;
  }
  return at::roll_symint(x.reshape({-1}), shifts, {0}).reshape_symint(x.sym_sizes());
}

// Turns of 90 degrees from the first dim to the second: dims are swapped, and one is read backwards, or both are.
Rule rot90(const Call& call) {
  const auto& x = call.tensors[0];
  const auto dims = call.ints(2);
  const auto mask = named_dims(call, 2);
  if (dims.size() != 2) {
    return whole_along(call, mask); // torch refuses it
  }
  const auto from = wrap_dim(dims[0], x.dim()), to = wrap_dim(dims[1], x.dim());
  const auto turns = ((call.integer(1) % 4) + 4) % 4;
  uint64_t backwards = 0;
  backwards |= uint64_t{turns == 2 || turns == 3} << from;
  backwards |= uint64_t{turns == 1 || turns == 2} << to;
  auto rule = reversed(call, backwards);
  auto& result = rule.results[0];
  if (turns % 2) {
    std::swap(result.dims[from], result.dims[to]);
    if (!result.sizes.empty()) {
      std::swap(result.sizes[from], result.sizes[to]);
    }
  }
  return rule;
}

// ---- shifted(copies of x, dim, shifts, size, multiple): result o is the sum of x[o + shift] over the shifts; beyond x's edges
// are zeros. multiple: `size` divides x's size, and the result is cut in proportion. ----

at::Tensor shifted(at::TensorList copies, int64_t dim, at::IntArrayRef shifts, c10::SymInt size, bool) {
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

void shifted_kernel(KernelRun& run) {
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
  const auto beyond = call.flag(4) ? PaddingMode::Circular : PaddingMode::Constant;
  for (const auto shift : shifts) {
    auto& copy = rule.operands.emplace_back(dims);
    copy.dims[dim] = rule.windows(dim, {1, 1, shift, shift, beyond});
    copy.padding = std::nullopt;
  }
  rule.results.emplace_back(dims, call.tensors[0].sym_sizes());
  rule.results[0].sizes[dim] = call.integer(3);
  rule.jointly_linear(OperandSet::first(shifts.size()));
  rule.always(shifted_kernel);
  return rule;
}

// ---- repeat: along a dim, result o is x[o mod size] ----

// The dims of x that are cut and repeated, and their factors.
struct RepeatedDims {
  std::vector<std::pair<int64_t, int64_t>> dims;
};

// The elements of x that a rank reads, each once: in x's order if its results need all of x, otherwise in the order of the
// results.
void repeat_kernel(KernelRun& run) {
  if (!run.solution.halo(0)) {
    return run.call_op();
  }
  auto x = run.arg(0).toTensor();
  auto times = run.arg(1).toIntVector();
  const auto lead = static_cast<int64_t>(times.size()) - x.dim();
  for (const auto& [d, factor] : kernel_data<RepeatedDims>(run.solution).dims) {
    const auto* mine = cut_run(run, factor);
    if (!mine) {
      continue;
    }
    times[lead + d] = 1;
    const auto size = run.operands[0].size(d);
    if (mine->length > size) {
      const auto at = at::arange(mine->start, mine->start + mine->length, x.options().dtype(at::kLong)).remainder(size);
      x = x.index_select(d, at);
    }
  }
  const bool more = lead > 0 || std::any_of(times.begin(), times.end(), [](int64_t n) { return n != 1; });
  // Otherwise x is already new memory, because a rank needs more than its piece.
  run.returns({more ? x.repeat(times) : is_empty(x) ? x.clone() : x});
}

Rule repeat(const Call& call) {
  Rule rule;
  const auto& x = call.tensors[0];
  const auto times = call.ints(1);
  const auto lead = static_cast<int64_t>(times.size()) - x.dim();
  TORCH_CHECK(lead >= 0, "Number of dimensions of repeat dims can not be smaller than number of dimensions of tensor");
  RepeatedDims repeated;
  Dims in, out(lead, Dim(kNone));
  auto& operand = rule.operands.emplace_back();
  for (int64_t d = 0; d < x.dim(); ++d) {
    const bool once = times[lead + d] == 1;
    if (once || times[lead + d] < 1 || !x.layout->shards(d) || numel_of(x.sym_sizes()) == 0) {
      in.push_back(once ? Dim(rule.factor()) : Dim(kNone));
      out.push_back(in.back());
      continue;
    }
    const auto at = rule.factor({.size = x.size(d) * times[lead + d]});
    in.push_back(rule.windows(at, {1, 1, 0, 0, PaddingMode::Circular}));
    out.emplace_back(at);
    repeated.dims.emplace_back(d, at);
  }
  operand = Operand(std::move(in));
  if (repeated.dims.empty()) {
    rule.results.emplace_back(std::move(out));
  } else {
    SymSizes sizes(times.begin(), times.end());
    for (int64_t d = 0; d < x.dim(); ++d) {
      sizes[lead + d] *= x.sym_size(d);
    }
    rule.results.emplace_back(std::move(out), std::move(sizes));
    rule.operands[0].padding = std::nullopt;
    rule.kernel_data = std::move(repeated);
    rule.always(repeat_kernel);
  }
  rule.passes_partial();
  return rule;
}

// ---- repeats_added(t, dim, size): result o is the sum of all t[o + size * i]. Each rank adds up what it holds, and the results
// are summands. ----

at::Tensor repeats_added(const at::Tensor& t, int64_t dim, int64_t size) {
  return t.unflatten(dim, {-1, size}).sum(dim);
}

void repeats_added_kernel(KernelRun& run) {
  const auto dim = run.arg(1).toInt(), size = run.arg(2).toInt();
  if (!run.mesh_dims(dim)) {
    return run.call_op();
  }
  const auto t = run.arg(0).toTensor();
  const auto piece = mine(run, 0, dim).numbers();
  const auto at = at::arange(piece.start, piece.end(), t.options().dtype(at::kLong)).remainder(size);
  auto sizes = t.sym_sizes().vec();
  sizes[dim] = size;
  run.returns({t.new_zeros_symint(sizes).index_add(dim, at, t)});
}

Rule repeats_added_rule(const Call& call) {
  Rule rule;
  const auto dim = call.integer(1), size = call.integer(2);
  auto dims = fresh_dims(rule, call.tensors[0].dim());
  rule.factors[dim].reduce = ReduceOp::Sum;
  rule.operands.emplace_back(dims);
  dims[dim] = Dim(kNone);
  rule.results.emplace_back(std::move(dims), call.tensors[0].sym_sizes());
  rule.results[0].sizes[dim] = size;
  rule.linear_in({0});
  rule.always(repeats_added_kernel);
  return rule;
}

TORCH_LIBRARY_FRAGMENT(shardtensor, m) {
  m.def("repeats_added(Tensor t, int dim, int size) -> Tensor");
  m.impl("repeats_added", c10::DispatchKey::CompositeExplicitAutograd, repeats_added);
  m.def("shifted(Tensor[] copies, int dim, int[] shifts, SymInt size, bool multiple=False) -> Tensor");
  m.impl("shifted", c10::DispatchKey::CompositeExplicitAutograd, shifted);
}

} // namespace

void register_flip_roll_repeat(Registry& r) {
  r.add("turns", {"flip"}, flip, {.autograd = formulas::flip});
  r.add("turns", {"repeat"}, repeat, {.autograd = formulas::repeat});
  r.add("turns", {"roll"}, roll, {.calls = roll_as_calls, .autograd = formulas::roll});
  r.add("turns", {"rot90"}, rot90, {.asks_order = true});
  r.add("turns", {"shardtensor::repeats_added"}, repeats_added_rule, {.symbols = true});
  r.add("turns", {"shardtensor::shifted"}, shifted_rule, {.symbols = true});
}

} // namespace shardtensor::rules
