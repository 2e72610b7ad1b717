// Parts of a dim: slices, rows, diagonals, windows; and the ops that write gradients and values into them.
#include "rules/ops/views.h"

#include "redistribute/neutral_value.h"
#include "rules/exact_dtypes.h"
#include "rules/registry.h"
#include "rules/resolve/factor_cuts.h"
#include "rules/windows.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace shardtensor::rules {

at::Tensor slice_of_piece(const at::Tensor& x, int64_t dim, const Dim::SymWindow& window, const SymInterval& piece) {
  const auto first = window_before(window, piece.start), end = window_before(window, piece.end());
  if (first == end) {
    return x.narrow(dim, 0, 0);
  }
  const auto skipped = window.step == 1 ? first : first * window.step;
  const auto start = plus(plus(window.start, skipped), -piece.start);
  const auto length = window.step == 1 ? plus(end, -first) : (end - first - 1) * window.step + 1;
  return x.slice_symint(dim, start, plus(start, length), window.step);
}

at::Tensor diagonal_at(const at::Tensor& x, const c10::SymInt& offset, int64_t a, int64_t b) {
  if (const auto number = offset.maybe_as_int()) {
    return x.diagonal(*number, a, b);
  }
  const bool beside = offset > 0;
  const auto dim = beside ? b : a;
  const auto skipped = beside ? offset : -offset, size = x.sym_size(dim);
  const auto rest = skipped < size ? x.narrow_symint(dim, skipped, size - skipped) : x.narrow(dim, 0, 0);
  return rest.diagonal(0, a, b);
}

c10::SymInt checked_index(const c10::SymInt& index, int64_t dim, c10::SymIntArrayRef sizes) {
  TORCH_CHECK_INDEX(
      index >= -sizes[dim] && index < sizes[dim], "select(): index ", index, " out of range for tensor of size ", sizes,
      " at dimension ", dim);
  return index < 0 ? index + sizes[dim] : index;
}

void guard_place(const TensorArg& x, int64_t dim, const c10::SymInt& given) {
  if (!x.has_symbols() || !x.layout->shards(dim)) {
    return;
  }
  const auto index = checked_index(given, dim, x.sym_sizes());
  const auto size = x.sym_size(dim);
  std::vector<c10::SymInt> starts{0};
  auto each = size;
  for (int64_t m = 0; m < x.layout->ndim() && each.is_symbolic(); ++m) {
    if (!x.layout->placement(m).is_shard(dim)) {
      continue;
    }
    const auto n = x.layout->mesh().size(m);
    const auto chunks = x.layout->cut(m) ? std::nullopt : sym_chunks(each, n, false);
    if (!chunks || (!chunks->equal() && x.layout->innermost(dim) != m)) {
      size.guard_int(__FILE__, __LINE__);
      return;
    }
    std::vector<c10::SymInt> next;
    for (const auto& start : starts) {
      for (int64_t j = 0; j < n; ++j) {
        next.push_back(plus(start, (*chunks)(n, j).start));
      }
    }
    starts = std::move(next);
    each = chunks->full;
  }
  for (size_t j = 1; j < starts.size(); ++j) {
    (void)(index >= starts[j]);
  }
}

int64_t host_among(const TensorArg& x, uint64_t dims) {
  int64_t host = -1;
  for (int64_t d = 0; d < x.dim(); ++d) {
    const bool fits = (dims >> d & 1) && x.sym_size(d).maybe_as_int().value_or(1) > 0;
    if (fits && !x.layout->shards(d)) {
      return d;
    }
    host = fits && host < 0 ? d : host;
  }
  return host;
}

at::Tensor none_along(const at::Tensor& x, int64_t dim, int64_t host) {
  auto sizes = x.sym_sizes().vec();
  sizes[dim] = 1;
  sizes[host] = 0;
  return x.narrow(host, 0, 0).view_symint(sizes);
}

namespace {

// Start, length and step as at::slice computes them: bounds wrapped and clamped.
Dim::SymWindow window_of(const Call& call, int64_t start_arg, const c10::SymInt& size) {
  const auto bound = [&](int64_t arg, const c10::SymInt& otherwise) {
    auto at = call.has(arg) ? call.arg(arg).toSymInt() : otherwise;
    if (at < 0) {
      at = at + size;
    }
    return at < 0 ? c10::SymInt(0) : at > size ? size : at;
  };
  const auto step = call.integer(start_arg + 2, 1);
  TORCH_CHECK_VALUE(step > 0, "slice step must be positive");
  const auto start = bound(start_arg, 0);
  const auto end = bound(start_arg + 1, size);
  return {start, step, end > start ? (end - start + (step - 1)) / step : c10::SymInt(0)};
}

struct SplitWindows {
  int64_t dim;
  std::vector<Dim::SymWindow> each;
};

// Results that are each a window of dim `dim`.
Rule windows(const Call& call, int64_t dim, c10::ArrayRef<Dim::SymWindow> parts) {
  Rule rule;
  const auto& x = call.tensors[0];
  auto in = dims_along(rule, x.dim(), dim, {.kernel = true});
  rule.kernel_data = SplitWindows{dim, {parts.begin(), parts.end()}};
  for (const auto& w : parts) {
    auto out = in;
    auto sizes = x.sym_sizes();
    const bool whole = w.step == 1 && w.length == sizes[dim];
    sizes[dim] = w.length;
    if (!whole) {
      out[dim].window = w;
    }
    auto& result = rule.results.emplace_back(std::move(out), std::move(sizes));
    result.geometry = strides_of(dims_in_order(x.dim()));
    result.geometry->strides[dim].times = w.step;
    result.geometry->offset.push_back({dim, w.start});
  }
  rule.operands.emplace_back(std::move(in));
  rule.passes_partial();
  return rule;
}

std::vector<at::Tensor> local_windows(const KernelRun& run) {
  const auto x = run.arg(0).toTensor();
  const auto& [dim, windows] = kernel_data<SplitWindows>(run.solution);
  const auto piece = mine(run, 0, dim);
  std::vector<at::Tensor> out;
  for (const auto& w : windows) {
    out.push_back(own(run, slice_of_piece(x, dim, w, piece)));
  }
  return out;
}

void slice_kernel(KernelRun& run) {
  run.returns({local_windows(run)[0]});
}

void split_kernel(KernelRun& run) {
  run.returns({c10::List<at::Tensor>(local_windows(run))});
}

Rule slice(const Call& call) {
  const auto& x = call.tensors[0];
  TORCH_CHECK(x.dim() > 0, "slice() cannot be applied to a 0-dim tensor.");
  const auto dim = call.dim(1, x.dim());
  auto rule = windows(call, dim, {window_of(call, 2, x.sym_size(dim))});
  rule.kernel = slice_kernel;
  rule.factors[dim].kernel = rule.results[0].dims[dim].window.has_value(); // a slice of all indices is so on every piece
  return rule;
}

Rule narrow_copy(const Call& call) {
  const auto& x = call.tensors[0];
  TORCH_CHECK(x.dim() > 0, "narrow() cannot be applied to a 0-dim tensor.");
  const auto dim = call.dim(1, x.dim());
  const auto size = x.sym_size(dim), given = call.sym_ints(2)[0], length = call.sym_ints(3)[0];
  TORCH_CHECK_INDEX(
      given >= -size && given <= size, "start out of range (expected to be in range of [", -size, ", ", size, "], but got ",
      given, ")");
  const auto start = given < 0 ? given + size : given;
  TORCH_CHECK(
      length >= 0 && start + length <= size, "start (", start, ") + length (", length, ") exceeds dimension size (", size, ").");
  auto rule = windows(call, dim, Dim::SymWindow(start, 1, length));
  rule.kernel = slice_kernel;
  return rule;
}

Rule split_into(const Call& call, int64_t dim, const SymSizes& lengths) {
  std::vector<Dim::SymWindow> parts;
  c10::SymInt start = 0;
  for (const auto& length : lengths) {
    parts.emplace_back(start, 1, length);
    start = plus(start, length);
  }
  auto rule = windows(call, dim, parts);
  rule.kernel = split_kernel;
  return rule;
}

Rule split(const Call& call) {
  const auto& x = call.tensors[0];
  TORCH_CHECK(x.dim() > 0, "split expects at least a 1-dimensional tensor");
  const auto dim = call.dim(2, x.dim());
  const auto each = call.sym_ints(1)[0], size = x.sym_size(dim);
  TORCH_CHECK(
      each > 0 || (each == 0 && size == 0), "split_size can only be 0 if dimension size is 0, but got dimension size of ", size);
  SymSizes lengths;
  for (c10::SymInt at = 0; at < size; at = plus(at, each)) {
    lengths.push_back(plus(at, each) <= size ? each : plus(size, -at));
  }
  if (lengths.empty()) {
    lengths.push_back(0);
  }
  return split_into(call, dim, lengths);
}

Rule split_with_sizes(const Call& call) {
  const auto& x = call.tensors[0];
  TORCH_CHECK(x.dim() > 0, "split expects at least a 1-dimensional tensor");
  const auto dim = call.dim(2, x.dim());
  const auto lengths = call.sym_ints(1);
  TORCH_CHECK(
      std::accumulate(lengths.begin(), lengths.end(), c10::SymInt(0)) == x.sym_size(dim),
      "split_with_sizes expects split_sizes to sum exactly to ", x.sym_size(dim), " (input tensor's size at dimension ", dim,
      "), but got split_sizes=", c10::SymIntArrayRef(lengths));
  return split_into(call, dim, lengths);
}

// ---- one index of a dim ----

// The row of the whole's index, if the piece has it; else undefined.
at::Tensor row_of_piece(const at::Tensor& x, int64_t dim, const c10::SymInt& index, const SymInterval& piece) {
  const bool here = index >= piece.start && index < piece.end();
  return here ? x.select_symint(dim, index - piece.start) : at::Tensor();
}

// A row of a cut dim stays whole at its owner: the result is cut along another dim, `host`, of which the owner has all indices,
// as a view of its piece. Without such a dim (-1) the row is a summand, and a copy.
struct SelectedRow {
  int64_t dim;
  c10::SymInt index;
  int64_t host; // among the row's dims
  bool copy;    // the op returns a copy: select_copy, or a summand
};

// The part of the row that this rank holds.
at::Tensor held_row(const at::Tensor& x, const SelectedRow& at, const c10::SymInt& index, const SymInterval& piece) {
  const auto row = row_of_piece(x, at.dim, index, piece);
  if (row.defined()) {
    return at.copy ? row.clone(at::MemoryFormat::Contiguous) : row;
  }
  if (at.host >= 0) {
    const auto none = none_along(x, at.dim, at.host < at.dim ? at.host : at.host + 1).select(at.dim, 0);
    return at.copy ? none.clone() : none;
  }
  auto shape = x.sym_sizes().vec();
  shape.erase(shape.begin() + at.dim);
  return at::full_symint(shape, neutral_summand(ReduceOp::Sum, x.scalar_type()), x.options());
}

void select_row_kernel(KernelRun& run) {
  const auto x = run.arg(0).toTensor();
  const auto& row = kernel_data<SelectedRow>(run.solution);
  const auto index = checked_index(run.arg(2).toSymInt(), row.dim, run.operands[0].symbols);
  run.returns({held_row(x, row, index, mine(run, 0, row.dim))});
}

void put_row_back(const Solution& solution, const KernelRun::OperandInfo& base, const at::Tensor& piece, const at::Tensor& row) {
  const auto& at = kernel_data<SelectedRow>(solution);
  const auto own = row_of_piece(piece, at.dim, at.index, mine(*base.layout, at.dim, base.symbols[at.dim]));
  if (own.defined()) {
    own.copy_(row);
  }
}

void unbind_kernel(KernelRun& run) {
  const auto x = run.arg(0).toTensor();
  const auto& row = kernel_data<SelectedRow>(run.solution); // the first
  const auto piece = mine(run, 0, row.dim);
  const auto count = run.operands[0].size(row.dim);
  c10::List<at::Tensor> rows;
  for (int64_t i = 0; i < count; ++i) {
    rows.push_back(held_row(x, row, i, piece));
  }
  run.returns({std::move(rows)});
}

// A row of the call's first tensor. Its host is the first dim that no mesh dim cuts; if all are cut, the first.
SelectedRow row_at(const Call& call, int64_t dim, const c10::SymInt& index) {
  const auto& x = call.tensors[0];
  const auto host = x.layout->shards(dim) ? host_among(x, ~(uint64_t{1} << dim)) : -1;
  return {dim, index, host > dim ? host - 1 : host, host < 0 || !call.schema.arguments()[0].alias_info()};
}

// If `dim` is sharded, each row stays on its owner.
Rule rows(const Call& call, const SelectedRow& row) {
  Rule rule;
  const auto& x = call.tensors[0];
  rule.operands.emplace_back(dims_along(rule, x.dim(), row.dim, {.kernel = true, .reduce = ReduceOp::Sum, .picked = true}));
  rule.passes_partial();
  return rule;
}

void add_row(const Call& call, Rule& rule, const SelectedRow& row) {
  auto out = rule.operands[0].dims;
  auto kept = dims_in_order(static_cast<int64_t>(out.size()));
  const auto along = out[row.dim].factor;
  out.erase(out.begin() + row.dim);
  kept.erase(kept.begin() + row.dim);
  SymSizes sizes;
  if (row.host >= 0) {
    sizes = call.tensors[0].sym_sizes();
    sizes.erase(sizes.begin() + row.dim);
    out[row.host].at.push_back({along, row.index});
  }
  auto& result = rule.results.emplace_back(std::move(out), std::move(sizes));
  result.geometry = strides_of(kept);
  result.geometry->offset.push_back({row.dim, row.index});
}

Rule select_row(const Call& call) {
  const auto& x = call.tensors[0];
  TORCH_CHECK_INDEX(x.dim() > 0, "select() cannot be applied to a 0-dim tensor.");
  const auto dim = call.dim(1, x.dim());
  const auto given = call.sym_ints(2)[0];
  auto row = row_at(call, dim, given);
  if (given < 0 || row.host >= 0) {
    row.index = checked_index(given, dim, x.sym_sizes());
  }
  guard_place(x, dim, row.index);
  auto rule = rows(call, row);
  add_row(call, rule, row);
  rule.kernel_data = row;
  rule.kernel = select_row_kernel;
  rule.put_back = row.host >= 0 ? nullptr : put_row_back;
  return rule;
}

Rule unbind(const Call& call) {
  const auto& x = call.tensors[0];
  TORCH_CHECK_INDEX(x.dim() > 0, "Dimension specified as 0 but tensor has no dimensions");
  const auto dim = call.dim(1, x.dim());
  auto row = row_at(call, dim, 0);
  auto rule = rows(call, row);
  rule.kernel_data = row;
  for (int64_t i = 0; i < x.size(dim); ++i) {
    row.index = i;
    add_row(call, rule, row);
  }
  rule.kernel = unbind_kernel;
  return rule;
}

// ---- two dims become one, or one becomes two ----

// The start of a diagonal on the two dims, and its length.
struct Diagonal {
  int64_t a, b; // the dims
  int64_t offset, row, column;
  c10::SymInt length;
};

Diagonal diagonal_of(const Call& call, int64_t offset_arg, c10::SymIntArrayRef sizes) {
  const auto n = static_cast<int64_t>(sizes.size());
  Diagonal d{call.dim(offset_arg + 1, n), call.dim(offset_arg + 2, n), call.integer(offset_arg), 0, 0, 0};
  TORCH_CHECK(d.a != d.b, "diagonal dimensions cannot be identical ", d.a, ", ", d.b);
  d.row = std::max<int64_t>(-d.offset, 0);
  d.column = std::max<int64_t>(d.offset, 0);
  const auto without = [](const c10::SymInt& n, int64_t k) { return k ? n - k : n; }; // torch cannot trace a symbol minus 0
  const auto below = without(sizes[d.a], d.row), beside = without(sizes[d.b], d.column);
  const auto length = below < beside ? below : beside;
  d.length = length < 0 ? c10::SymInt(0) : length;
  return d;
}

struct CutDiagonal {
  Diagonal diagonal;
  int64_t cut;    // which of the two dims is cut
  SymSizes sizes; // of the matrices' tensor
};

// The part of the diagonal in a piece starts at the piece's first row, or at its first column.
at::Tensor diagonal_of_piece(const KernelRun& run, const at::Tensor& piece, const Layout& layout) {
  const auto& [d, cut, sizes] = kernel_data<CutDiagonal>(run.solution);
  const auto start = mine(layout, cut, sizes[cut]).start;
  return diagonal_at(piece, plus(d.offset, cut == d.a ? start : -start), d.a, d.b);
}

void diagonal_kernel(KernelRun& run) {
  run.returns({own(run, diagonal_of_piece(run, run.arg(0).toTensor(), *run.operands[0].layout))});
}

// The dims of the matrices' tensor and of the diagonals'. `cut`: which of the two dims may stay cut, or -1. The diagonal is a
// window of it.
struct DiagonalDims {
  Dims matrices, diagonals;
};

DiagonalDims diagonal_dims(Rule& rule, const Diagonal& d, int64_t cut, c10::SymIntArrayRef sizes) {
  DiagonalDims dims{Dims(sizes.size(), Dim(kNone)), {}};
  for (int64_t i = 0; i < static_cast<int64_t>(sizes.size()); ++i) {
    if (i != d.a && i != d.b) {
      dims.matrices[i] = Dim(rule.factor());
      dims.diagonals.push_back(dims.matrices[i]);
    }
  }
  dims.diagonals.emplace_back(kNone);
  if (cut >= 0) {
    dims.matrices[cut] = dims.diagonals.back() = Dim(rule.factor({.kernel = true, .size = sizes[cut]}));
    dims.diagonals.back().window = Dim::SymWindow{cut == d.a ? d.row : d.column, 1, d.length};
    rule.kernel_data = CutDiagonal{d, cut, sizes.vec()};
  }
  return dims;
}

SymSizes sizes_of_diagonals(const Diagonal& d, c10::SymIntArrayRef sizes) {
  auto out = sizes.vec();
  out.erase(out.begin() + std::max(d.a, d.b));
  out.erase(out.begin() + std::min(d.a, d.b));
  out.push_back(d.length);
  return out;
}

int64_t cut_dim(const Layout& layout, const Diagonal& d) {
  return layout.shards(d.a) ? d.a : layout.shards(d.b) ? d.b : -1;
}

Rule diagonal(const Call& call) {
  Rule rule;
  const auto& x = call.tensors[0];
  const auto whole = x.sym_sizes();
  const auto diag = diagonal_of(call, 1, whole);
  const auto cut = cut_dim(*x.layout, diag);
  auto dims = diagonal_dims(rule, diag, cut, whole);
  rule.kernel = cut >= 0 ? diagonal_kernel : nullptr;
  auto kept = dims_in_order(x.dim());
  kept.erase(kept.begin() + std::max(diag.a, diag.b));
  kept.erase(kept.begin() + std::min(diag.a, diag.b));
  auto geometry = strides_of(kept);
  geometry.strides.push_back({diag.a, 1, diag.b});
  if (diag.offset && diag.length > 0) {
    const bool under = diag.row > 0;
    geometry.offset.push_back({under ? diag.a : diag.b, under ? diag.row : diag.column});
  }
  auto sizes = cut >= 0 ? sizes_of_diagonals(diag, whole) : SymSizes();
  return as_view(std::move(rule), std::move(dims.matrices), std::move(dims.diagonals), std::move(geometry), std::move(sizes));
}

// Not a view: the last dim becomes the diagonal of two new dims.
Rule diag_embed(const Call& call) {
  Rule rule;
  const auto n = call.tensors[0].dim();
  const auto a = call.dim(2, n + 1), b = call.dim(3, n + 1);
  TORCH_CHECK(a != b, "diagonal dimensions cannot be identical ", a, ", ", b);
  Dims in, out;
  for (int64_t d = 0; d <= n; ++d) {
    out.push_back(d == a || d == b ? Dim(kNone) : Dim(rule.factor()));
    if (d != a && d != b) {
      in.push_back(out.back());
    }
  }
  in.emplace_back(kNone);
  rule.operands.emplace_back(std::move(in));
  rule.results.emplace_back(std::move(out));
  rule.linear.push_back(computes(call, 1, call.tensors[0].dtype));
  return rule;
}

// Along a cut dim each rank makes some of the windows, as views of a copy of the indices that they read.
void unfold_kernel(KernelRun& run) {
  const auto x = run.arg(0).toTensor();
  const auto sizes = guarded(sizes_of_piece(run));
  if (run.solution.halos.empty() || x.numel() != 0) {
    return run.call_op();
  }
  run.returns({x.new_zeros(sizes)});
}

Rule unfold(const Call& call) {
  Rule rule;
  const auto n = call.tensors[0].dim();
  const auto dim = call.dim(1, n);
  if (n > 0 && call.tensors[0].layout->shards(dim)) {
    const auto& x = call.tensors[0];
    const auto size = call.integer(2), step = call.integer(3);
    if (size >= 1 && size <= x.size(dim) && step >= 1) {
      auto dims = fresh_dims(rule, n);
      const auto count = (x.size(dim) - size) / step + 1;
      rule.operands.emplace_back(dims);
      rule.operands[0].padding = std::nullopt;
      dims.emplace_back(kNone);
      auto sizes = x.sym_sizes();
      sizes.emplace_back(size);
      rule.results.emplace_back(std::move(dims), std::move(sizes));
      read_through(rule, dim, count, WindowSpec{size, step, 0, 1}.reach());
      rule.always(unfold_kernel);
      rule.passes_partial();
      return rule;
    }
  }
  auto in = dims_beside(rule, n, dim), out = in;
  out.emplace_back(kNone);
  auto geometry = strides_of(dims_in_order(n));
  if (n > 0) {
    geometry.strides[dim].times = call.sym_ints(3)[0];
  }
  geometry.strides.push_back({n > 0 ? dim : -1, 1});
  return as_view(std::move(rule), std::move(in), std::move(out), std::move(geometry));
}

// ---- backward: the gradient goes into zeros of the input's sizes, argument 1 ----

// Whether one rank of each row of ranks holds all of the cut dim, for any size in a graph.
bool is_at_one(const Cut& cut) {
  if (!cut || !cut->symbols.empty() || !cut->quotients.empty()) {
    return false;
  }
  int64_t holders = 0;
  for (size_t i = 0; i < cut->size(); ++i) {
    holders += (*cut)[i] != 0 || (!cut->shares.empty() && cut->shares[i] != 0);
  }
  return holders == 1;
}

// The dim along which one rank holds the whole tensor, or -1.
int64_t hosting_dim(const TensorArg& t) {
  for (int64_t d = 0; d < t.dim(); ++d) {
    bool at_one = t.layout->shards(d);
    for (int64_t m = 0; m < t.layout->ndim(); ++m) {
      at_one = at_one && (!t.layout->placement(m).is_shard(d) || t.is_one(d) || is_at_one(t.layout->cut(m)));
    }
    if (at_one) {
      return d;
    }
  }
  return -1;
}

void row_backward_kernel(KernelRun& run) {
  const auto& row = kernel_data<SelectedRow>(run.solution);
  const auto grad = run.arg(0).toTensor();
  const auto piece = mine(*run.solution.results[0].layout, row.dim, run.solution.results[0].sizes[row.dim].value);
  auto out = at::zeros_symint(run.arg(1).toSymIntVector(), grad.options());
  if (const auto own = row_of_piece(out, row.dim, row.index, piece); own.defined()) {
    own.copy_(grad);
  }
  run.returns({std::move(out)});
}

// From the gradient of a row that is whole at its owner to the gradient of the cut dim.
Rule select_backward(const Call& call) {
  Rule rule;
  const auto& grad = call.tensors[0];
  auto sizes = call.sym_ints(1);
  const auto dim = call.dim(2, static_cast<int64_t>(sizes.size()));
  auto dims = fresh_dims(rule, grad.dim()), out = dims;
  const auto host = hosting_dim(grad);
  if (host >= 0) {
    const auto index = checked_index(call.sym_ints(3)[0], dim, sizes);
    const auto along = rule.factor({.kernel = true, .size = sizes[dim]});
    dims[host] = Dim(kNone, grad.sym_size(host));
    dims[host].at.push_back({along, index});
    out[host] = Dim(kNone);
    out.insert(out.begin() + dim, Dim(along));
    rule.kernel_data = SelectedRow{dim, index, host, true};
    rule.kernel = row_backward_kernel;
  } else {
    out.insert(out.begin() + dim, Dim(kNone));
  }
  rule.operands.emplace_back(std::move(dims));
  rule.results.emplace_back(std::move(out), std::move(sizes));
  rule.sizes_arg = 1;
  rule.passes_partial();
  rule.linear[0].any_reduction = false;
  return rule;
}

// A window of a dim that has `size` indices.
struct DimSlice {
  int64_t dim;
  Dim::SymWindow window;
  c10::SymInt size;
};

at::Tensor noted_slice(const KernelRun& run, const at::Tensor& piece, const Layout& layout) {
  const auto& [dim, window, size] = kernel_data<DimSlice>(run.solution);
  return slice_of_piece(piece, dim, window, mine(layout, dim, size));
}

using SliceFn = at::Tensor (*)(const KernelRun&, const at::Tensor& piece, const Layout&);

// A gradient in zeros of this rank's sizes.
template <SliceFn part>
void slice_backward_kernel(KernelRun& run) {
  const auto grad = run.arg(0).toTensor();
  auto out = at::zeros_symint(run.arg(1).toSymIntVector(), grad.options());
  part(run, out, *run.solution.results[0].layout).copy_(grad);
  run.returns({out});
}

// A source in a copy of the piece.
template <SliceFn part>
void scatter_kernel(KernelRun& run) {
  auto out = run.arg(0).toTensor().clone();
  part(run, out, *run.operands[0].layout).copy_(run.arg(1).toTensor());
  run.returns({out});
}

Rule slice_backward(const Call& call) {
  Rule rule;
  auto sizes = call.sym_ints(1);
  const auto dim = call.dim(2, static_cast<int64_t>(sizes.size()));
  const auto w = window_of(call, 3, sizes[dim]);
  auto dims = dims_along(rule, call.tensors[0].dim(), dim, {.kernel = true, .size = sizes[dim]});
  rule.kernel_data = DimSlice{dim, w, sizes[dim]};
  rule.results.emplace_back(dims, std::move(sizes));
  dims[dim].window = w;
  rule.operands.emplace_back(std::move(dims));
  rule.sizes_arg = 1;
  rule.kernel = slice_backward_kernel<noted_slice>;
  rule.linear_in({0});
  return rule;
}

Rule diagonal_backward(const Call& call) {
  Rule rule;
  auto sizes = call.sym_ints(1);
  const auto diag = diagonal_of(call, 2, sizes);
  const bool cut = call.tensors[0].layout->shards(static_cast<int64_t>(sizes.size()) - 2);
  auto dims = diagonal_dims(rule, diag, cut ? diag.a : -1, sizes);
  if (cut) {
    rule.kernel = slice_backward_kernel<diagonal_of_piece>;
  }
  rule.operands.emplace_back(std::move(dims.diagonals));
  rule.results.emplace_back(std::move(dims.matrices), std::move(sizes));
  rule.sizes_arg = 1;
  rule.linear_in({0});
  return rule;
}

// Windows along a dim.
struct UnfoldWindows {
  int64_t dim;
  WindowSpec windows;
};

void unfold_backward_kernel(KernelRun& run) {
  const auto* halo = run.solution.halo(0);
  if (!halo) {
    return run.call_op();
  }
  const auto& [dim, windows] = kernel_data<UnfoldWindows>(run.solution);
  const auto grad = run.arg(0).toTensor();
  auto sizes = guarded(sizes_of_piece(run));
  const auto mine = *cut_run(run, dim);
  if (grad.numel() == 0 || mine.length == 0) {
    return run.returns({grad.new_zeros(sizes)});
  }
  const auto held = windows.cells(halo->fetch.mine()[dim].inside);
  sizes[dim] = held.length;
  run.arg(1) = c10::List<int64_t>(c10::IntArrayRef(sizes));
  run.call_op();
  CropOrPad crop;
  crop.along(dim, held, mine);
  run.stack.back() = crop(run.stack.back().toTensor());
}

Rule unfold_backward(const Call& call) {
  Rule rule;
  auto sizes = call.sym_ints(1);
  const auto n = static_cast<int64_t>(sizes.size());
  const auto dim = call.dim(2, n);
  const auto& grad = call.tensors[0];
  if (n > 0 && grad.dim() == n + 1 && grad.layout->shards(dim)) {
    const auto size = call.integer(3), step = call.integer(4), whole = sizes[dim].guard_int(__FILE__, __LINE__);
    if (size >= 1 && step >= 1 && whole >= size && grad.size(dim) == (whole - size) / step + 1) {
      auto dims = fresh_dims(rule, n);
      rule.results.emplace_back(dims, sizes);
      dims.emplace_back(kNone);
      rule.operands.emplace_back(dims);
      rule.operands[0].padding = std::nullopt;
      const WindowSpec windows{size, step, 0, 1};
      read_through(rule, dim, whole, mirror(windows.reach(), -1));
      rule.sizes_arg = 1;
      rule.kernel_data = UnfoldWindows{dim, windows};
      rule.always(unfold_backward_kernel);
      rule.linear_in({0});
      return rule;
    }
  }
  auto out = dims_beside(rule, n, dim), in = out;
  if (n > 0) {
    in.emplace_back(kNone);
  }
  in.resize(call.tensors[0].dim(), Dim(kNone));
  rule.operands.emplace_back(std::move(in));
  rule.results.emplace_back(std::move(out), std::move(sizes));
  rule.sizes_arg = 1;
  rule.linear_in({0});
  return rule;
}

// ---- a source written into a view of a copy: slice_scatter, select_scatter, diagonal_scatter ----

void shared_kernel(KernelRun& run) {
  const auto& strides = kernel_data<SymSizes>(run.solution);
  const auto x = run.arg(0).toTensor();
  if (!has_strides(x, strides)) {
    run.arg(0) = at::empty_strided_symint(x.sym_sizes(), strides, x.options()).copy_(x);
  }
  run.call_op();
}

Rule into_copy(const Call& call, Rule rule) {
  auto form = form_of_copy(call.tensors[0]);
  if (form.shared) { // every rank writes into the whole memory
    rule = replicate(call);
    rule.results.emplace_back(Dims(call.tensors[0].dim(), Dim(kNone)));
    rule.kernel_data = form.strides;
    rule.always(shared_kernel);
  }
  set_copy_form(rule, std::move(form));
  return rule;
}

Rule slice_scatter(const Call& call) {
  Rule rule;
  const auto& x = call.tensors[0];
  const auto dim = call.dim(2, x.dim());
  const auto w = window_of(call, 3, x.sym_size(dim));
  auto dims = dims_along(rule, x.dim(), dim, {.kernel = true, .size = x.sym_size(dim)});
  rule.kernel_data = DimSlice{dim, w, x.sym_size(dim)};
  rule.operands.emplace_back(dims);
  rule.results.emplace_back(dims, x.sym_sizes());
  dims[dim].window = w;
  rule.operands.emplace_back(std::move(dims));
  rule.kernel = scatter_kernel<noted_slice>;
  rule.linear.push_back(moves(call, 0b11, call.tensors[0].dtype));
  return into_copy(call, std::move(rule));
}

void select_scatter_kernel(KernelRun& run) {
  auto out = run.arg(0).toTensor().clone();
  const auto dim = wrap_dim(run.arg(2).toInt(), out.dim());
  const auto index = checked_index(run.arg(3).toSymInt(), dim, run.operands[0].symbols);
  const auto row = row_of_piece(out, dim, index, mine(run, 0, dim));
  if (row.defined()) {
    row.copy_(run.arg(1).toTensor());
  }
  run.returns({out});
}

Rule select_scatter(const Call& call) {
  Rule rule;
  const auto& x = call.tensors[0];
  const auto dim = call.dim(2, x.dim());
  guard_place(x, dim, call.sym_ints(3)[0]);
  auto dims = dims_along(rule, x.dim(), dim, {.kernel = true});
  rule.operands.emplace_back(dims);
  rule.results.emplace_back(dims);
  dims.erase(dims.begin() + dim);
  rule.operands.emplace_back(std::move(dims));
  rule.kernel = select_scatter_kernel;
  rule.linear.push_back(moves(call, 0b11, call.tensors[0].dtype));
  return into_copy(call, std::move(rule));
}

Rule diagonal_scatter(const Call& call) {
  Rule rule;
  const auto& x = call.tensors[0];
  const auto& source = call.tensors[1];
  const auto whole = x.sym_sizes();
  const auto diag = diagonal_of(call, 2, whole);
  const auto slice = sizes_of_diagonals(diag, whole);
  TORCH_CHECK(
      source.sym_sizes() == slice, "expected src to have a size equal to the slice of self. src size = ", source.sym_sizes(),
      ", slice size = ", slice);
  const auto own = cut_dim(*x.layout, diag);
  const auto cut = own < 0 && source.layout->shards(source.dim() - 1) ? diag.a : own;
  auto dims = diagonal_dims(rule, diag, cut, whole);
  if (cut >= 0) {
    rule.kernel = scatter_kernel<diagonal_of_piece>;
  }
  rule.operands.emplace_back(dims.matrices);
  rule.operands.emplace_back(std::move(dims.diagonals));
  rule.results.emplace_back(std::move(dims.matrices), whole);
  rule.linear.push_back(moves(call, 0b11, call.tensors[0].dtype));
  return into_copy(call, std::move(rule));
}

} // namespace

void register_slice_select_split(Registry& r) {
  const Options symbols{.symbols = true};
  r.add("views", {"diag_embed"}, diag_embed);
  r.add("views", {"diagonal", "diagonal_copy"}, diagonal, symbols);
  r.add("views", {"diagonal_backward"}, diagonal_backward, symbols);
  r.add("views", {"diagonal_scatter"}, diagonal_scatter, symbols);
  r.add("views", {"narrow_copy"}, narrow_copy, symbols);
  r.add("views", {"select.int", "select_copy.int"}, select_row, symbols);
  r.add("views", {"select_backward"}, select_backward, symbols);
  r.add("views", {"select_scatter"}, select_scatter, symbols);
  r.add("views", {"slice.Tensor", "slice_copy.Tensor"}, slice, symbols);
  r.add("views", {"slice_backward"}, slice_backward, symbols);
  r.add("views", {"slice_scatter"}, slice_scatter, symbols);
  r.add("views", {"split.Tensor", "split_copy.Tensor", "unsafe_split.Tensor"}, split, symbols);
  r.add("views", {"split_with_sizes", "split_with_sizes_copy", "unsafe_split_with_sizes"}, split_with_sizes, symbols);
  r.add("views", {"unbind.int", "unbind_copy.int"}, unbind);
  r.add("views", {"unfold", "unfold_copy"}, unfold, symbols);
  r.add("views", {"unfold_backward"}, unfold_backward, symbols);
}

} // namespace shardtensor::rules
