// Views: which dim of the result is which of the operand, and how the view lies in the operand's memory.
// A slice of a sharded dim is a slice of every piece, a reshape around it keeps it cut: both stay views, on every rank.
#include "rules/registry.h"
#include "rules/resolve.h"

#include <ATen/ATen.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <numeric>

namespace shardtensor::rules {

namespace {

using Term = Geometry::Term;

// ---- shared by the rules below ----

Geometry strides_of(c10::ArrayRef<int64_t> dims) {
  Geometry g;
  for (auto d : dims) {
    g.strides.push_back({d, 1});
  }
  return g;
}

Sizes identity(int64_t n) {
  Sizes order(n);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

// What this rank holds of `size` indices along `dim`.
Interval mine(const Layout& layout, int64_t dim, int64_t size) {
  return layout.intervals(dim, size, layout.mesh().coordinate())[0];
}

// The *_copy forms share the kernels of the views.
at::Tensor own(const Run& run, at::Tensor view) {
  const auto& name = run.op.schema().name();
  const bool copies = name.size() > 5 && name.compare(name.size() - 5, 5, "_copy") == 0;
  return copies ? view.clone(at::MemoryFormat::Contiguous) : view;
}

// ---- dims in another order ----

Rule permuted(const Call& call, c10::ArrayRef<int64_t> order) {
  Rule rule;
  auto in = fresh_dims(rule, call.tensors[0].dim());
  Dims out;
  for (auto d : order) {
    out.push_back(in[d]);
  }
  rule.operands.emplace_back(std::move(in));
  rule.results.emplace_back(std::move(out));
  rule.results[0].geometry = strides_of(order);
  rule.passes_partial();
  return rule;
}

Rule same(const Call& call) {
  return permuted(call, identity(call.tensors[0].dim()));
}

template <at::Tensor (*f)(const at::Tensor&)>
void unary_kernel(Run& run) {
  run.returns({f(run.arg(0).toTensor())});
}

// In place it must leave the local tensor, which others may hold too, as it is.
Rule t(const Call& call) {
  const auto n = call.tensors[0].dim();
  TORCH_CHECK(n <= 2, "t() expects a tensor with <= 2 dimensions, but self is ", n, "D");
  auto order = identity(n);
  std::reverse(order.begin(), order.end());
  auto rule = permuted(call, order);
  if (call.tensors[0].arg == 0 && call.schema.name() == "aten::t_") {
    rule.kernel = unary_kernel<at::t>;
    rule.always_kernel = true;
  }
  return rule;
}

void transpose_kernel(Run& run) {
  run.returns({run.arg(0).toTensor().transpose(run.arg(1).toInt(), run.arg(2).toInt())});
}

Rule transpose(const Call& call) {
  const auto n = call.tensors[0].dim();
  auto order = identity(n);
  const auto a = call.dim(1, n);
  const auto b = call.dim(2, n);
  if (n > 0) {
    std::swap(order[a], order[b]);
  }
  auto rule = permuted(call, order);
  if (call.schema.name() == "aten::transpose_") {
    rule.kernel = transpose_kernel;
    rule.always_kernel = true;
  }
  return rule;
}

Rule permute(const Call& call) {
  const auto n = call.tensors[0].dim();
  const auto dims = call.ints(1);
  TORCH_CHECK(static_cast<int64_t>(dims.size()) == n, "permute: ", dims.size(), " dims given for a tensor of ", n, " dims");
  Sizes order;
  uint64_t seen = 0;
  for (auto d : dims) {
    order.push_back(wrap_dim(d, n));
    TORCH_CHECK(!(seen >> order.back() & 1), "permute(): duplicate dims are not allowed.");
    seen |= uint64_t{1} << order.back();
  }
  return permuted(call, order);
}

// ---- dims of size 1 come and go ----

void unsqueeze_kernel(Run& run) {
  run.returns({run.arg(0).toTensor().unsqueeze(run.arg(1).toInt())});
}

Rule unsqueeze(const Call& call) {
  Rule rule;
  const auto n = call.tensors[0].dim();
  const auto at = call.dim(1, n + 1);
  auto in = fresh_dims(rule, n);
  auto out = in;
  out.insert(out.begin() + at, Dim(kNone));
  auto from = identity(n);
  from.insert(from.begin() + at, n == 0 ? -1 : std::min(at, n - 1));
  rule.operands.emplace_back(std::move(in));
  rule.results.emplace_back(std::move(out));
  rule.results[0].geometry = strides_of(from);
  rule.passes_partial();
  if (call.schema.name() == "aten::unsqueeze_") {
    rule.kernel = unsqueeze_kernel;
    rule.always_kernel = true;
  }
  return rule;
}

// Pieces may have one row of a dim that has more: the dims to drop are named.
void squeeze_kernel(Run& run) {
  const auto& dims = run.solution.notes;
  run.returns({own(run, run.arg(0).toTensor().squeeze(c10::IntArrayRef(dims.data(), dims.size())))});
}

Rule squeeze(const Call& call) {
  Rule rule;
  const auto& x = call.tensors[0];
  uint64_t named = ~uint64_t{0};
  if (call.schema.arguments().size() > 1) {
    named = 0;
    for (auto d : call.ints(1)) {
      named |= uint64_t{1} << wrap_dim(d, x.dim());
    }
  }
  Dims in, out;
  Sizes kept;
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (x.is_one(d) && (named >> d & 1)) {
      in.emplace_back(kNone);
      rule.notes.push_back(d);
    } else {
      in.emplace_back(rule.factor());
      out.push_back(in.back());
      kept.push_back(d);
    }
  }
  rule.operands.emplace_back(std::move(in));
  rule.results.emplace_back(std::move(out));
  rule.results[0].geometry = strides_of(kept);
  rule.kernel = squeeze_kernel;
  rule.always_kernel = true;
  rule.passes_partial();
  return rule;
}

Rule expand(const Call& call) {
  Rule rule;
  const auto& x = call.tensors[0];
  auto to = call.ints(1);
  const auto lead = static_cast<int64_t>(to.size()) - x.dim();
  TORCH_CHECK(
      lead >= 0, "expand: the number of sizes provided (", to.size(),
      ") must be greater or equal to the number of dimensions in the tensor (", x.dim(), ")");
  Dims in, out(lead, Dim(kNone));
  Geometry g;
  g.strides.resize(lead, Term{-1, 0});
  for (int64_t d = 0; d < x.dim(); ++d) {
    auto& s = to[lead + d];
    s = s == -1 ? x.size(d) : s;
    const bool stretched = s != x.size(d);
    TORCH_CHECK(
        !stretched || x.is_one(d), "The expanded size of the tensor (", s, ") must match the existing size (", x.size(d),
        ") at non-singleton dimension ", lead + d, ".  Target sizes: ", c10::IntArrayRef(to), ".  Tensor sizes: ", x.sizes());
    in.push_back(stretched ? Dim(kNone) : Dim(rule.factor()));
    out.push_back(in.back());
    g.strides.push_back(stretched ? Term{-1, 0} : Term{d, 1});
  }
  rule.operands.emplace_back(std::move(in));
  rule.results.emplace_back(std::move(out), std::move(to));
  rule.results[0].geometry = std::move(g);
  rule.size_args.push_back({1, 0});
  rule.passes_partial();
  return rule;
}

// ---- reshapes ----

// Runs of dims of equal product belong together. The first dims of both sides are one factor: so many elements are an index
// of it that both have whole numbers of them. True: several dims become fewer.
bool match(Rule& rule, c10::IntArrayRef from, c10::IntArrayRef to, Dims& in, Dims& out) {
  bool merges = false;
  size_t i = 0, j = 0;
  while (i < from.size() || j < to.size()) {
    if (i < from.size() && j < to.size() && from[i] == to[j]) {
      in[i++] = out[j++] = Dim(rule.factor());
      continue;
    }
    if (i < from.size() && from[i] == 1) {
      ++i;
      continue;
    }
    if (j < to.size() && to[j] == 1) {
      ++j;
      continue;
    }
    const auto a = i, b = j;
    int64_t left = from[i++], right = to[j++];
    while (left != right) {
      if (left < right) {
        merges = true;
        left *= from[i++];
      } else {
        right *= to[j++];
      }
    }
    const auto in_row = left / from[a], out_row = left / to[b];
    const auto unit = std::lcm(in_row, out_row);
    if (unit < left) {
      const auto f = rule.factor();
      in[a] = Dim(f, unit / in_row);
      out[b] = Dim(f, unit / out_row);
      rule.spread.push_back(f);
    }
  }
  return merges;
}

// Local strides are not the global ones: where the piece cannot be viewed, it is copied.
void view_kernel(Run& run) {
  run.returns({own(run, run.arg(0).toTensor().reshape(run.arg(1).toIntVector()))});
}

// Whether the op is told the whole's strides too, which are not a piece's.
bool takes_strides(const std::string& op) {
  return op == "aten::_reshape_alias" || op == "aten::as_strided" || op == "aten::as_strided_copy";
}

Rule reshaped(const Call& call, const Sizes& to) {
  Rule rule;
  const auto& x = call.tensors[0];
  bool merges = false;
  Dims in(x.dim(), Dim(kNone)), out(to.size(), Dim(kNone));
  if (c10::multiply_integers(x.sizes()) > 0) {
    merges = match(rule, x.sizes(), to, in, out);
  } else {
    for (size_t d = 0; d < std::min(in.size(), out.size()) && x.size(d) == to[d]; ++d) {
      in[d] = out[d] = Dim(rule.factor());
    }
  }
  rule.operands.emplace_back(std::move(in));
  rule.results.emplace_back(std::move(out), to);
  rule.results[0].geometry.emplace();
  rule.results[0].geometry->reshaped = true;
  rule.size_args.push_back({1, 0});
  rule.kernel = view_kernel;
  const auto& name = call.schema.name();
  rule.always_kernel = takes_strides(name);
  // A dim can always be split, whatever its stride.
  rule.kernel_if = merges || name != "aten::view" ? is_strided : nullptr;
  rule.passes_partial();
  return rule;
}

Rule view(const Call& call) {
  const auto& x = call.tensors[0];
  const auto to = at::infer_size(call.ints(1), c10::multiply_integers(x.sizes()));
  return reshaped(call, Sizes(to.begin(), to.end()));
}

// torch wants strides that are whole elements of the new dtype. Those of a piece without elements are any.
void view_empty_as_dtype(Run& run) {
  const auto x = run.arg(0).toTensor();
  auto strides = x.strides().vec();
  for (size_t d = 0; d + 1 < strides.size(); ++d) {
    strides[d] *= 16; // bytes of the largest dtype
  }
  run.arg(0) = x.as_strided(x.sizes(), strides);
  run.call_op();
}

// The bits as another dtype: the last dim's indices become more or fewer. Summands do not pass.
Rule view_dtype(const Call& call) {
  Rule rule;
  const auto& x = call.tensors[0];
  const auto had = static_cast<int64_t>(c10::elementSize(x.dtype));
  const auto has = static_cast<int64_t>(c10::elementSize(call.arg(1).toScalarType()));
  auto in = fresh_dims(rule, x.dim());
  auto out = in;
  Sizes to(x.sizes().begin(), x.sizes().end());
  if (had != has && x.dim() > 0) {
    const auto d = x.dim() - 1;
    TORCH_CHECK(
        had > has || to[d] % (has / had) == 0, "self.size(-1) must be divisible by ", has / std::max<int64_t>(had, 1),
        " to view ", x.dtype, " as ", call.arg(1).toScalarType(), " (different element sizes), but got ", to[d]);
    in[d].inner = had < has ? has / had : 1;
    out[d].inner = had > has ? had / has : 1;
    to[d] = to[d] * had / has;
  }
  rule.operands.emplace_back(std::move(in));
  rule.results.emplace_back(std::move(out), std::move(to));
  rule.kernel = view_empty_as_dtype;
  rule.kernel_if = is_empty;
  return rule;
}

// A piece may be lazily conjugated without its ShardTensor saying so: then what is viewed is a copy.
void view_as_real_kernel(Run& run) {
  run.arg(0) = run.arg(0).toTensor().resolve_conj();
  run.call_op();
}

Rule view_as_real(const Call& call) {
  Rule rule;
  rule.kernel = view_as_real_kernel;
  rule.always_kernel = true;
  auto dims = fresh_dims(rule, call.tensors[0].dim());
  rule.operands.emplace_back(dims);
  dims.emplace_back(kNone);
  rule.results.emplace_back(std::move(dims));
  rule.linear_in({0});
  return rule;
}

Rule view_as_complex(const Call& call) {
  Rule rule;
  const auto n = call.tensors[0].dim();
  TORCH_CHECK(n > 0, "view_as_complex: input tensor must have one or more dimensions");
  auto dims = fresh_dims(rule, n - 1);
  rule.results.emplace_back(dims);
  dims.emplace_back(kNone);
  rule.operands.emplace_back(std::move(dims));
  rule.linear_in({0});
  return rule;
}

// ---- parts of a dim ----

// The indices of `window` that lie in `piece`, as a slice of the piece.
at::Tensor slice_of_piece(const at::Tensor& x, int64_t dim, const Dim::Window& window, const Interval& piece) {
  const auto first_from = [&](int64_t at) { // the first index of the window at or after `at`
    const auto k = at <= window.start ? 0 : (at - window.start + window.step - 1) / window.step;
    return std::min(k, window.length);
  };
  const auto first = first_from(piece.start);
  const auto end = first_from(piece.start + piece.length);
  if (first == end) {
    return x.narrow(dim, 0, 0);
  }
  const auto start = window.start + first * window.step - piece.start;
  return x.slice(dim, start, start + (end - first - 1) * window.step + 1, window.step);
}

// Start, length and step as at::slice takes them: bounds wrapped and clamped.
Dim::Window window_of(const Call& call, int64_t start_arg, int64_t size) {
  const auto bound = [&](int64_t arg, int64_t otherwise) {
    auto at = call.integer(arg, otherwise);
    at = at < 0 ? at + size : at;
    return std::clamp<int64_t>(at, 0, size);
  };
  const auto step = call.integer(start_arg + 2, 1);
  TORCH_CHECK_VALUE(step > 0, "slice step must be positive");
  const auto start = bound(start_arg, 0);
  const auto end = std::max(start, bound(start_arg + 1, size));
  return {start, step, (end - start + step - 1) / step};
}

// Results that are each a window of dim `dim`. Notes for the kernel: dim, then start, step and length of each.
Rule windows(const Call& call, int64_t dim, c10::ArrayRef<Dim::Window> parts) {
  Rule rule;
  const auto& x = call.tensors[0];
  auto in = fresh_dims(rule, x.dim());
  rule.factors[dim].kernel = true;
  rule.notes.push_back(dim);
  for (const auto& w : parts) {
    auto out = in;
    Sizes sizes(x.sizes().begin(), x.sizes().end());
    sizes[dim] = w.length;
    if (w.step != 1 || w.length != x.size(dim)) {
      out[dim].window = w;
    }
    auto& result = rule.results.emplace_back(std::move(out), std::move(sizes));
    result.geometry = strides_of(identity(x.dim()));
    result.geometry->strides[dim].times = w.step;
    result.geometry->offset.push_back({dim, w.start});
    rule.notes.append({w.start, w.step, w.length});
  }
  rule.operands.emplace_back(std::move(in));
  rule.passes_partial();
  return rule;
}

std::vector<at::Tensor> local_windows(const Run& run) {
  const auto x = run.arg(0).toTensor();
  const auto& notes = run.solution.notes;
  const auto dim = notes[0];
  const auto piece = mine(*run.operands[0].layout, dim, run.operands[0].sizes[dim]);
  std::vector<at::Tensor> out;
  for (size_t i = 1; i < notes.size(); i += 3) {
    out.push_back(own(run, slice_of_piece(x, dim, {notes[i], notes[i + 1], notes[i + 2]}, piece)));
  }
  return out;
}

void slice_kernel(Run& run) {
  run.returns({local_windows(run)[0]});
}

void split_kernel(Run& run) {
  run.returns({c10::List<at::Tensor>(local_windows(run))});
}

Rule slice(const Call& call) {
  const auto& x = call.tensors[0];
  TORCH_CHECK(x.dim() > 0, "slice() cannot be applied to a 0-dim tensor.");
  const auto dim = call.dim(1, x.dim());
  auto rule = windows(call, dim, {window_of(call, 2, x.size(dim))});
  rule.kernel = slice_kernel;
  return rule;
}

Rule split_into(const Call& call, int64_t dim, const Sizes& lengths) {
  std::vector<Dim::Window> parts;
  int64_t start = 0;
  for (auto length : lengths) {
    parts.push_back({start, 1, length});
    start += length;
  }
  auto rule = windows(call, dim, parts);
  rule.kernel = split_kernel;
  return rule;
}

Rule split(const Call& call) {
  const auto& x = call.tensors[0];
  TORCH_CHECK(x.dim() > 0, "split expects at least a 1-dimensional tensor");
  const auto dim = call.dim(2, x.dim());
  const auto each = call.integer(1), size = x.size(dim);
  TORCH_CHECK(
      each > 0 || (each == 0 && size == 0), "split_size can only be 0 if dimension size is 0, but got dimension size of ", size);
  Sizes lengths;
  for (int64_t at = 0; at < size; at += each) {
    lengths.push_back(std::min(each, size - at));
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
  const auto lengths = call.ints(1);
  TORCH_CHECK(
      std::accumulate(lengths.begin(), lengths.end(), int64_t{0}) == x.size(dim),
      "split_with_sizes expects split_sizes to sum exactly to ", x.size(dim), " (input tensor's size at dimension ", dim,
      "), but got split_sizes=", c10::IntArrayRef(lengths));
  return split_into(call, dim, lengths);
}

// ---- one index of a dim ----

int64_t checked_index(int64_t index, int64_t dim, c10::IntArrayRef sizes) {
  TORCH_CHECK_INDEX(
      index >= -sizes[dim] && index < sizes[dim], "select(): index ", index, " out of range for tensor of size ", sizes,
      " at dimension ", dim);
  return index < 0 ? index + sizes[dim] : index;
}

// The owner contributes the row, the others zeros.
void select_kernel(Run& run) {
  const auto x = run.arg(0).toTensor();
  const auto sizes = run.operands[0].sizes;
  const auto dim = wrap_dim(run.arg(1).toInt(), x.dim());
  const auto index = checked_index(run.arg(2).toInt(), dim, sizes);
  const auto piece = mine(*run.operands[0].layout, dim, sizes[dim]);
  if (index >= piece.start && index < piece.start + piece.length) {
    run.returns({x.select(dim, index - piece.start).clone(at::MemoryFormat::Contiguous)});
    return;
  }
  Sizes shape(x.sizes().begin(), x.sizes().end());
  shape.erase(shape.begin() + dim);
  run.returns({at::zeros(shape, x.options())});
}

// Notes: the dim, the index.
void put_row_back(const Solution& solution, const Run::At& base, const at::Tensor& piece, const at::Tensor& row) {
  const auto dim = solution.notes[0], index = solution.notes[1];
  const auto held = mine(*base.layout, dim, base.sizes[dim]);
  if (index >= held.start && index < held.start + held.length) {
    piece.select(dim, index - held.start).copy_(row);
  }
}

void unbind_kernel(Run& run) {
  const auto x = run.arg(0).toTensor();
  const auto sizes = run.operands[0].sizes;
  const auto dim = wrap_dim(run.arg(1).toInt(), x.dim());
  const auto piece = mine(*run.operands[0].layout, dim, sizes[dim]);
  Sizes shape(x.sizes().begin(), x.sizes().end());
  shape.erase(shape.begin() + dim);
  shape.insert(shape.begin(), sizes[dim]);
  auto rows = at::zeros(shape, x.options());
  rows.narrow(0, piece.start, piece.length).copy_(x.movedim(dim, 0));
  run.returns({c10::List<at::Tensor>(rows.unbind())});
}

// Shards of `dim` leave each row with its owner, as a summand.
Rule rows(const Call& call, int64_t dim) {
  Rule rule;
  const auto& x = call.tensors[0];
  auto in = fresh_dims(rule, x.dim());
  auto& f = rule.factors[dim];
  f.kernel = true;
  f.reduce = x.dtype == at::kBool ? ReduceOp::Bor : ReduceOp::Sum;
  rule.operands.emplace_back(std::move(in));
  rule.passes_partial();
  return rule;
}

void add_row(Rule& rule, int64_t dim, int64_t index) {
  auto out = rule.operands[0].dims;
  auto kept = identity(static_cast<int64_t>(out.size()));
  out.erase(out.begin() + dim);
  kept.erase(kept.begin() + dim);
  auto& result = rule.results.emplace_back(std::move(out));
  result.geometry = strides_of(kept);
  result.geometry->offset.push_back({dim, index});
}

Rule select(const Call& call) {
  const auto& x = call.tensors[0];
  TORCH_CHECK_INDEX(x.dim() > 0, "select() cannot be applied to a 0-dim tensor.");
  const auto dim = call.dim(1, x.dim());
  const auto given = call.integer(2);
  const auto index = given < 0 ? checked_index(given, dim, x.sizes()) : given;
  auto rule = rows(call, dim);
  add_row(rule, dim, index);
  rule.notes.append({dim, index});
  rule.kernel = select_kernel;
  rule.put_back = put_row_back;
  return rule;
}

Rule unbind(const Call& call) {
  const auto& x = call.tensors[0];
  TORCH_CHECK_INDEX(x.dim() > 0, "Dimension specified as 0 but tensor has no dimensions");
  const auto dim = call.dim(1, x.dim());
  auto rule = rows(call, dim);
  for (int64_t i = 0; i < x.size(dim); ++i) {
    add_row(rule, dim, i);
  }
  rule.kernel = unbind_kernel;
  return rule;
}

// ---- two dims become one, or one two ----

// Where a diagonal starts on the two dims, and how long it is.
struct Diagonal {
  int64_t a, b; // the dims
  int64_t offset, row, column, length;
};

Diagonal diagonal_of(const Call& call, int64_t offset_arg, c10::IntArrayRef sizes) {
  const auto n = static_cast<int64_t>(sizes.size());
  Diagonal d{call.dim(offset_arg + 1, n), call.dim(offset_arg + 2, n), call.integer(offset_arg), 0, 0, 0};
  TORCH_CHECK(d.a != d.b, "diagonal dimensions cannot be identical ", d.a, ", ", d.b);
  d.row = std::max<int64_t>(-d.offset, 0);
  d.column = std::max<int64_t>(d.offset, 0);
  d.length = std::max<int64_t>(std::min(sizes[d.a] - d.row, sizes[d.b] - d.column), 0);
  return d;
}

// A piece of some rows has the diagonal from where its rows start, one of some columns likewise. Notes: offset, the two dims,
// which of them is cut.
at::Tensor diagonal_of_piece(const Run& run, const at::Tensor& piece, const Layout& layout, c10::IntArrayRef sizes) {
  const auto& notes = run.solution.notes;
  const auto cut = notes[3];
  const auto start = mine(layout, cut, sizes[cut]).start;
  return piece.diagonal(cut == notes[1] ? notes[0] + start : notes[0] - start, notes[1], notes[2]);
}

void diagonal_kernel(Run& run) {
  const auto& x = run.operands[0];
  run.returns({own(run, diagonal_of_piece(run, run.arg(0).toTensor(), *x.layout, x.sizes))});
}

// One of the two dims may stay cut: the diagonal is a window of it.
Factor along_diagonal(const Diagonal& d, int64_t cut, c10::IntArrayRef sizes, Rule& rule) {
  Factor f;
  f.kernel = true;
  f.size = sizes[cut];
  rule.notes.append({d.offset, d.a, d.b, cut});
  return f;
}

Dim on_diagonal(const Diagonal& d, int64_t cut, int64_t factor) {
  Dim dim(factor);
  dim.window = Dim::Window{cut == d.a ? d.row : d.column, 1, d.length};
  return dim;
}

Rule diagonal(const Call& call) {
  Rule rule;
  const auto& x = call.tensors[0];
  const auto diag = diagonal_of(call, 1, x.sizes());
  const auto cut = x.layout->shards(diag.a) ? diag.a : x.layout->shards(diag.b) ? diag.b : -1;
  Dims in(x.dim(), Dim(kNone)), out;
  Sizes sizes;
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (d != diag.a && d != diag.b) {
      in[d] = Dim(rule.factor());
      out.push_back(in[d]);
      sizes.push_back(x.size(d));
    }
  }
  if (cut >= 0) {
    in[cut] = Dim(rule.factor(along_diagonal(diag, cut, x.sizes(), rule)));
    out.push_back(on_diagonal(diag, cut, in[cut].factor));
    sizes.push_back(diag.length);
    rule.kernel = diagonal_kernel;
  } else {
    out.emplace_back(kNone);
    sizes.clear();
  }
  rule.operands.emplace_back(std::move(in));
  rule.results.emplace_back(std::move(out), std::move(sizes));
  rule.passes_partial();
  return rule;
}

// Not a view: the last dim is laid out along the diagonal of two new ones.
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
  rule.linear_in({0});
  return rule;
}

Rule unfold(const Call& call) {
  Rule rule;
  const auto n = call.tensors[0].dim();
  const auto dim = call.dim(1, n);
  Dims in;
  for (int64_t d = 0; d < n; ++d) {
    in.push_back(d == dim ? Dim(kNone) : Dim(rule.factor()));
  }
  auto out = in;
  out.emplace_back(kNone);
  rule.operands.emplace_back(std::move(in));
  rule.results.emplace_back(std::move(out));
  rule.passes_partial();
  return rule;
}

// ---- backward: the gradient goes into zeros of the input's sizes, argument 1 ----

Rule select_backward(const Call& call) {
  Rule rule;
  auto sizes = call.ints(1);
  const auto dim = call.dim(2, static_cast<int64_t>(sizes.size()));
  auto dims = fresh_dims(rule, call.tensors[0].dim());
  rule.operands.emplace_back(dims);
  dims.insert(dims.begin() + dim, Dim(kNone));
  rule.results.emplace_back(std::move(dims), std::move(sizes));
  rule.size_args.push_back({1, 0});
  rule.passes_partial();
  rule.linear[0].any_reduction = false;
  return rule;
}

// Notes: dim, start, step, length.
void slice_backward_kernel(Run& run) {
  const auto grad = run.arg(0).toTensor();
  const auto& notes = run.solution.notes;
  const auto local = run.arg(1).toIntVector();
  const auto dim = notes[0];
  const auto& layout = *run.solution.results[0].layout;
  auto out = at::zeros(local, grad.options());
  slice_of_piece(out, dim, {notes[1], notes[2], notes[3]}, mine(layout, dim, notes[4])).copy_(grad);
  run.returns({out});
}

Rule slice_backward(const Call& call) {
  Rule rule;
  auto sizes = call.ints(1);
  const auto dim = call.dim(2, static_cast<int64_t>(sizes.size()));
  const auto w = window_of(call, 3, sizes[dim]);
  auto dims = fresh_dims(rule, call.tensors[0].dim());
  rule.factors[dim].kernel = true;
  rule.factors[dim].size = sizes[dim];
  rule.notes.append({dim, w.start, w.step, w.length, sizes[dim]});
  rule.results.emplace_back(dims, std::move(sizes));
  dims[dim].window = w;
  rule.operands.emplace_back(std::move(dims));
  rule.size_args.push_back({1, 0});
  rule.kernel = slice_backward_kernel;
  rule.linear_in({0});
  return rule;
}

void diagonal_backward_kernel(Run& run) {
  const auto grad = run.arg(0).toTensor();
  auto out = at::zeros(run.arg(1).toIntVector(), grad.options());
  const auto& notes = run.solution.notes;
  const c10::IntArrayRef sizes(notes.data() + 4, notes.size() - 4);
  diagonal_of_piece(run, out, *run.solution.results[0].layout, sizes).copy_(grad);
  run.returns({out});
}

Rule diagonal_backward(const Call& call) {
  Rule rule;
  auto sizes = call.ints(1);
  const auto n = static_cast<int64_t>(sizes.size());
  const auto diag = diagonal_of(call, 2, sizes);
  Dims in, out(n, Dim(kNone));
  for (int64_t d = 0; d < n; ++d) {
    if (d != diag.a && d != diag.b) {
      out[d] = Dim(rule.factor());
      in.push_back(out[d]);
    }
  }
  if (call.tensors[0].layout->shards(n - 2)) {
    out[diag.a] = Dim(rule.factor(along_diagonal(diag, diag.a, sizes, rule)));
    in.push_back(on_diagonal(diag, diag.a, out[diag.a].factor));
    rule.notes.append(sizes.begin(), sizes.end());
    rule.kernel = diagonal_backward_kernel;
  } else {
    in.emplace_back(kNone);
  }
  rule.operands.emplace_back(std::move(in));
  rule.results.emplace_back(std::move(out), std::move(sizes));
  rule.size_args.push_back({1, 0});
  rule.linear_in({0});
  return rule;
}

Rule unfold_backward(const Call& call) {
  Rule rule;
  auto sizes = call.ints(1);
  const auto n = static_cast<int64_t>(sizes.size());
  const auto dim = call.dim(2, n);
  Dims out;
  for (int64_t d = 0; d < n; ++d) {
    out.push_back(d == dim ? Dim(kNone) : Dim(rule.factor()));
  }
  auto in = out;
  if (n > 0) {
    in.emplace_back(kNone);
  }
  in.resize(call.tensors[0].dim(), Dim(kNone));
  rule.operands.emplace_back(std::move(in));
  rule.results.emplace_back(std::move(out), std::move(sizes));
  rule.size_args.push_back({1, 0});
  rule.linear_in({0});
  return rule;
}

// ---- a source written into a view of a copy: slice_scatter, select_scatter, diagonal_scatter ----

// Notes: dim, start, step, length.
void slice_scatter_kernel(Run& run) {
  const auto& notes = run.solution.notes;
  const auto dim = notes[0];
  auto out = run.arg(0).toTensor().clone();
  const auto piece = mine(*run.operands[0].layout, dim, run.operands[0].sizes[dim]);
  slice_of_piece(out, dim, {notes[1], notes[2], notes[3]}, piece).copy_(run.arg(1).toTensor());
  run.returns({out});
}

Rule slice_scatter(const Call& call) {
  Rule rule;
  const auto& x = call.tensors[0];
  const auto dim = call.dim(2, x.dim());
  const auto w = window_of(call, 3, x.size(dim));
  auto dims = fresh_dims(rule, x.dim());
  rule.factors[dim].kernel = true;
  rule.factors[dim].size = x.size(dim);
  rule.notes.append({dim, w.start, w.step, w.length});
  rule.operands.emplace_back(dims);
  rule.results.emplace_back(dims, Sizes(x.sizes().begin(), x.sizes().end()));
  dims[dim].window = w;
  rule.operands.emplace_back(std::move(dims));
  rule.kernel = slice_scatter_kernel;
  rule.passes_partial(0b11);
  return rule;
}

void select_scatter_kernel(Run& run) {
  const auto sizes = run.operands[0].sizes;
  auto out = run.arg(0).toTensor().clone();
  const auto dim = wrap_dim(run.arg(2).toInt(), out.dim());
  const auto index = checked_index(run.arg(3).toInt(), dim, sizes);
  const auto piece = mine(*run.operands[0].layout, dim, sizes[dim]);
  if (index >= piece.start && index < piece.start + piece.length) {
    out.select(dim, index - piece.start).copy_(run.arg(1).toTensor());
  }
  run.returns({out});
}

Rule select_scatter(const Call& call) {
  Rule rule;
  const auto& x = call.tensors[0];
  const auto dim = call.dim(2, x.dim());
  auto dims = fresh_dims(rule, x.dim());
  rule.factors[dim].kernel = true;
  rule.operands.emplace_back(dims);
  rule.results.emplace_back(dims);
  dims.erase(dims.begin() + dim);
  rule.operands.emplace_back(std::move(dims));
  rule.kernel = select_scatter_kernel;
  rule.passes_partial(0b11);
  return rule;
}

// ---- as_strided: undone into slices, where it is one of them ----

struct Strided {
  Sizes sizes, strides;
  int64_t offset; // from the base's first element
};

// Which base dim, from where and by what step, each dim of the result is; nothing where it is no such thing.
struct Undone {
  c10::SmallVector<int64_t, 5> dims; // of the base, or -1: size 1 or stride 0
  c10::SmallVector<Dim::Window, 5> windows;
  Sizes starts; // per base dim
};

std::optional<Undone> undo(const TensorArg& x, const Strided& to) {
  Sizes order;
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (x.size(d) > 1) {
      order.push_back(d);
    }
  }
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return x.strides()[a] > x.strides()[b]; });
  Undone out;
  out.starts.assign(x.dim(), 0);
  int64_t rest = to.offset;
  for (auto d : order) {
    if (x.strides()[d] <= 0) {
      return std::nullopt;
    }
    out.starts[d] = rest / x.strides()[d];
    rest %= x.strides()[d];
    if (out.starts[d] >= x.size(d)) {
      return std::nullopt;
    }
  }
  if (rest) {
    return std::nullopt;
  }
  const auto n = to.sizes.size();
  out.dims.assign(n, -1);
  out.windows.assign(n, {0, 1, 1});
  uint64_t used = 0;
  for (const bool single : {false, true}) { // dims of size 1 take what the others leave
    for (size_t j = 0; j < n; ++j) {
      if ((to.sizes[j] == 1) != single || (to.strides[j] == 0 && !single)) {
        continue;
      }
      const auto* d = std::find_if(order.begin(), order.end(), [&](int64_t k) {
        return single ? x.strides()[k] == to.strides[j] && !(used >> k & 1) : x.strides()[k] <= to.strides[j];
      });
      if (d == order.end()) {
        if (single) {
          continue;
        }
        return std::nullopt;
      }
      const auto step = single ? 1 : to.strides[j] / x.strides()[*d];
      if ((!single && to.strides[j] % x.strides()[*d]) || (used >> *d & 1) ||
          out.starts[*d] + (to.sizes[j] - 1) * step >= x.size(*d)) {
        return std::nullopt;
      }
      used |= uint64_t{1} << *d;
      out.dims[j] = *d;
      out.windows[j] = {out.starts[*d], step, to.sizes[j]};
    }
  }
  // The base's own dims of size 1, which may be sharded too: where a result's has their stride.
  for (int64_t d = 0; d < x.dim(); ++d) {
    for (size_t j = 0; j < n && x.is_one(d); ++j) {
      if (to.sizes[j] == 1 && out.dims[j] < 0 && to.strides[j] == x.strides()[d]) {
        out.dims[j] = d;
        break;
      }
    }
  }
  return out;
}

// Notes: the number of result dims; per result dim: base dim, start, step, length; per base dim: where it is selected.
void undone_kernel(Run& run) {
  auto x = run.arg(0).toTensor();
  const auto& notes = run.solution.notes;
  const auto n = notes[0], ndim = x.dim();
  const auto& base = run.operands[0];
  Sizes order, chosen;
  for (int64_t j = 0; j < n; ++j) {
    const auto* w = notes.data() + 1 + j * 4;
    if (w[0] >= 0) {
      x = slice_of_piece(x, w[0], {w[1], w[2], w[3]}, mine(*base.layout, w[0], base.sizes[w[0]]));
      order.push_back(w[0]);
    }
  }
  for (int64_t d = 0; d < ndim; ++d) {
    if (std::find(order.begin(), order.end(), d) == order.end()) {
      x = x.narrow(d, notes[1 + n * 4 + d], 1);
      chosen.push_back(d);
    }
  }
  auto all = order;
  all.append(chosen.begin(), chosen.end());
  x = x.permute(all);
  for (size_t i = 0; i < chosen.size(); ++i) {
    x = x.select(static_cast<int64_t>(order.size()), 0);
  }
  for (int64_t j = 0; j < n; ++j) {
    const auto* w = notes.data() + 1 + j * 4;
    if (w[0] < 0) {
      x = x.unsqueeze(j);
      Sizes sizes(x.dim(), -1);
      sizes[j] = w[3];
      x = x.expand(sizes);
    }
  }
  run.returns({own(run, x)});
}

Rule undone_rule(const TensorArg& x, const Strided& to, const Undone& undone) {
  Rule rule;
  Dims in(x.dim(), Dim(kNone)), out;
  rule.notes.push_back(static_cast<int64_t>(to.sizes.size()));
  for (size_t j = 0; j < to.sizes.size(); ++j) {
    const auto d = undone.dims[j];
    const auto& w = undone.windows[j];
    rule.notes.append({d, w.start, w.step, d < 0 ? to.sizes[j] : w.length});
    if (d < 0) {
      out.emplace_back(kNone);
      continue;
    }
    in[d] = Dim(rule.factor());
    auto& dim = out.emplace_back(in[d]);
    if (w.step != 1 || w.length != x.size(d)) {
      dim.window = w;
    }
  }
  rule.notes.append(undone.starts.begin(), undone.starts.end());
  rule.operands.emplace_back(std::move(in));
  rule.results.emplace_back(std::move(out), to.sizes);
  rule.kernel = undone_kernel;
  rule.always_kernel = true;
  rule.passes_partial();
  return rule;
}

constexpr auto kFrozen = "its pieces cannot be given another memory or shape in place; make a new tensor instead";

// In place: other strides of dims of size 1, for which nothing moves (a pooled image becomes channels_last).
Rule restrided(const Call& call) {
  const auto& x = call.tensors[0];
  const auto sizes = call.ints(1), strides = call.ints(2);
  bool alike =
      call.integer(3, x.offset()) == x.offset() && x.sizes() == c10::IntArrayRef(sizes) && strides.size() == sizes.size();
  for (int64_t d = 0; alike && d < x.dim(); ++d) {
    alike = x.size(d) <= 1 || x.strides()[d] == strides[d];
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      alike, call.schema.name(), ": cannot be done on a ShardTensor: ", kFrozen, ". (self: ", x.sizes(), " ", x.layout->str(),
      "; rank ", call.mesh.rank(), ")");
  auto rule = same(call);
  rule.results[0].geometry.reset();
  rule.kernel = unary_kernel<at::alias>;
  rule.always_kernel = true;
  return rule;
}

bool lies_by(const at::Tensor& x, c10::IntArrayRef strides) {
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (x.size(d) > 1 && x.stride(d) != strides[d]) {
      return false;
    }
  }
  return true;
}

// Notes: offset from the first element, then the base's strides, which the local tensor need not have.
void whole_strided_kernel(Run& run) {
  auto x = run.arg(0).toTensor();
  const auto& notes = run.solution.notes;
  const c10::IntArrayRef strides(notes.data() + 1, notes.size() - 1);
  if (!lies_by(x, strides)) {
    x = at::empty_strided(x.sizes(), strides, x.options()).copy_(x);
  }
  run.returns({own(run, x.as_strided(run.arg(1).toIntVector(), run.arg(2).toIntVector(), x.storage_offset() + notes[0]))});
}

Rule as_strided(const Call& call) {
  const auto& x = call.tensors[0];
  Strided to{call.ints(1), call.ints(2), call.integer(3, x.offset()) - x.offset()};
  TORCH_CHECK(to.sizes.size() == to.strides.size(), "mismatch in length of strides and shape");
  int64_t first = 0, last = to.offset;
  for (int64_t d = 0; d < x.dim(); ++d) {
    first += (x.size(d) - 1) * x.strides()[d];
  }
  for (size_t j = 0; j < to.sizes.size(); ++j) {
    last += (to.sizes[j] - 1) * to.strides[j];
  }
  const bool empty = c10::multiply_integers(to.sizes) == 0;
  TORCH_CHECK(
      empty || (to.offset >= 0 && last <= first), call.schema.name(), ": sizes ", c10::IntArrayRef(to.sizes), ", strides ",
      c10::IntArrayRef(to.strides), " and offset ", to.offset, " reach outside of the ShardTensor (", x.sizes(), ", ",
      x.layout->str(), ", rank ", call.mesh.rank(),
      "), which has no memory beyond its elements. Slice and permute the base tensor instead.");
  if (x.layout->is_sharded() && !empty) {
    if (const auto undone = undo(x, to)) {
      return undone_rule(x, to, *undone);
    }
    if (to.offset == 0 && c10::multiply_integers(to.sizes) == c10::multiply_integers(x.sizes())) {
      const auto strides = at::detail::computeStride(x.sizes(), x.strides(), to.sizes);
      if (strides && c10::IntArrayRef(*strides) == to.strides) {
        return reshaped(call, to.sizes);
      }
    }
  }
  auto rule = replicate(call);
  rule.passes_partial();
  rule.results.emplace_back(Dims(to.sizes.size(), Dim(kNone)));
  rule.notes.push_back(empty ? 0 : to.offset);
  rule.notes.append(x.strides().begin(), x.strides().end());
  rule.kernel = whole_strided_kernel;
  rule.always_kernel = true;
  return rule;
}

} // namespace

void register_views(Registry& r) {
  Options frozen;
  frozen.refuse = kFrozen;
  r.add("views", {"_conj", "_neg_view"}, [](const Call& call) {
    auto rule = same(call);
    rule.linear[0].any_reduction = false;
    return rule;
  });
  r.add("views", {"_reshape_alias", "_reshape_copy", "_unsafe_view", "view", "view_copy"}, view);
  r.add("views", {"alias", "alias_copy", "detach", "detach_", "detach_copy"}, same);
  r.add("views", {"as_strided", "as_strided_copy"}, as_strided);
  r.add("views", {"as_strided_"}, restrided);
  r.add(
      "views",
      {
          "resize_",
          "resize_as_",
          "set_",
          "set_.source_Storage",
          "set_.source_Storage_storage_offset",
          "set_.source_Tensor",
      },
      nullptr, frozen);
  r.add("views", {"diag_embed"}, diag_embed);
  r.add("views", {"diagonal", "diagonal_copy"}, diagonal);
  r.add("views", {"diagonal_backward"}, diagonal_backward);
  r.add("views", {"expand", "expand_copy"}, expand);
  r.add("views", {"permute", "permute_copy"}, permute);
  r.add("views", {"select.int", "select_copy.int"}, select);
  r.add("views", {"select_backward"}, select_backward);
  r.add("views", {"select_scatter"}, select_scatter);
  r.add("views", {"slice.Tensor", "slice_copy.Tensor"}, slice);
  r.add("views", {"slice_backward"}, slice_backward);
  r.add("views", {"slice_scatter"}, slice_scatter);
  r.add("views", {"split.Tensor", "split_copy.Tensor", "unsafe_split.Tensor"}, split);
  r.add("views", {"split_with_sizes", "split_with_sizes_copy", "unsafe_split_with_sizes"}, split_with_sizes);
  r.add(
      "views",
      {
          "squeeze",
          "squeeze.dim",
          "squeeze.dims",
          "squeeze_",
          "squeeze_.dim",
          "squeeze_.dims",
          "squeeze_copy",
          "squeeze_copy.dim",
          "squeeze_copy.dims",
      },
      squeeze);
  r.add("views", {"t", "t_", "t_copy"}, t);
  r.add("views", {"transpose.int", "transpose_", "transpose_copy.int"}, transpose);
  r.add("views", {"unbind.int", "unbind_copy.int"}, unbind);
  r.add("views", {"unfold", "unfold_copy"}, unfold);
  r.add("views", {"unfold_backward"}, unfold_backward);
  r.add("views", {"unsqueeze", "unsqueeze_", "unsqueeze_copy"}, unsqueeze);
  r.add("views", {"view.dtype", "view_copy.dtype"}, view_dtype);
  r.add("views", {"view_as_complex", "view_as_complex_copy"}, view_as_complex);
  r.add("views", {"view_as_real", "view_as_real_copy"}, view_as_real);
}

} // namespace shardtensor::rules
