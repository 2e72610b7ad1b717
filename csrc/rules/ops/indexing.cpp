// Reading and writing by index. If an indexed dim is sharded, every rank reads or writes only its own piece: a read gives
// picked summands (one rank has the value, the others zeros), a write changes this rank's piece. The indices are then whole.
#include "redistribute/neutral_value.h"
#include "rules/exact_dtypes.h"
#include "rules/in_place_operand.h"
#include "rules/kernel_utils.h"
#include "rules/ops/views.h"
#include "rules/registry.h"
#include "rules/solution.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace shardtensor::rules {

namespace {

// A dim that is indexed. If it is sharded, the result of a read holds summands, and a write changes only the piece.
Factor indexed(bool reads) {
  return {.kernel = true, .reduce = reads ? std::optional(ReduceOp::Sum) : std::nullopt, .picked = reads};
}

// ---- local indices ----

// Checks the bounds as torch does for a whole tensor; a masked lookup would not.
at::Tensor wrapped(const at::Tensor& index, const c10::SymInt& size, bool negative) {
  const at::Scalar least(negative ? -size : c10::SymInt(0)), end(size);
  at::_assert_async(index.ge(least).logical_and_(index.lt(end)).all(), "index out of bounds");
  return negative ? at::where(index.lt(0), index + end, index) : index;
}

// The value of a read for an index that another rank holds.
at::Scalar elsewhere(const at::Tensor& x) {
  return neutral_summand(ReduceOp::Sum, x.scalar_type());
}

// Indices into a piece with one spare row at its end. Indices outside the piece point to the spare row.
at::Tensor or_spare(const at::Tensor& index, const SymInterval& piece) {
  return inside(index, piece, at::Scalar(piece.length)).index;
}

at::Tensor with_spare_row(const at::Tensor& x, int64_t dim) {
  auto row = x.sym_sizes().vec();
  row[dim] = 1;
  return at::cat({x, at::zeros_symint(row, x.options())}, dim);
}

// A piece with at least one row to look up.
at::Tensor nonempty(const at::Tensor& x, int64_t dim) {
  return x.sym_size(dim) == 0 ? with_spare_row(x, dim) : x;
}

// Cuts the spare rows off the result of a writing op.
void returns_without_spare(KernelRun& run, const at::Tensor& self) {
  auto out = run.stack.back().toTensor();
  for (int64_t d = 0; d < self.dim(); ++d) {
    out = run.operands[0].layout->shards(d) ? out.narrow_symint(d, 0, self.sym_size(d)) : out;
  }
  run.stack.back() = run.op.schema().returns()[0].alias_info() ? self.copy_(out) : out.contiguous();
}

// Runs a writing op (self, dim, index, ...) with that dim sharded: on the piece with a spare row, with local indices.
template <bool negative>
void write_kernel(KernelRun& run) {
  const auto self = run.arg(0).toTensor();
  const auto dim = wrap_dim(run.arg(1).toInt(), self.dim());
  run.arg(0) = with_spare_row(self, dim);
  run.arg(2) = or_spare(wrapped(run.arg(2).toTensor(), run.operands[0].symbols[dim], negative), mine(run, 0, dim));
  run.call_op();
  returns_without_spare(run, self);
}

enum class WriteKind { Values, Sums, Others };

// Which summands pass an op that writes operand 2, if there is one, into operand 0.
template <WriteKind writes>
void let_pass(const Call& call, Rule& rule) {
  if (rule.operands.size() > 2 && writes == WriteKind::Values) {
    rule.passes_partial(0b101);
  } else if (rule.operands.size() > 2 && writes == WriteKind::Sums) {
    rule.linear.push_back(adds(call, 0b101, call.tensors[0].dtype));
  }
}

// ---- gather, scatter ----

// Dims of self, index and (scatter) src other than `dim` share a factor if their sizes agree; else they stay whole.
struct AlignedDims {
  Dims self, index;
};

AlignedDims align(Rule& rule, const TensorArg& self, const TensorArg& index, const TensorArg* src, int64_t dim, bool reads) {
  AlignedDims out;
  const bool none = numel_of(index.sym_sizes()) == 0; // then it may have any size
  for (int64_t d = 0; d < self.dim(); ++d) {
    const auto at = d < index.dim() ? index.sym_size(d) : c10::SymInt(1);
    const auto size = self.sym_size(d);
    TORCH_CHECK(
        none || d == dim || at <= size, "Size does not match at dimension ", d, " expected index ", index.sizes(),
        " to be no larger than self ", self.sizes(), " apart from dimension ", dim);
    TORCH_CHECK(
        none || !src || d >= src->dim() || at <= src->sym_size(d), "Expected index ", index.sizes(), " to be no larger than src ",
        src ? src->sizes() : c10::IntArrayRef());
    if (d == dim) {
      out.self.emplace_back(rule.factor(indexed(reads)));
      out.index.push_back(reads ? Dim(rule.factor()) : Dim(kNone));
    } else if (at == size && (!src || (d < src->dim() && src->sym_size(d) == at))) {
      out.self.emplace_back(rule.factor());
      out.index.push_back(out.self.back());
    } else {
      out.self.emplace_back(kNone);
      out.index.emplace_back(kNone);
    }
  }
  out.index.resize(index.dim(), Dim(kNone));
  return out;
}

// Reads (x, dim, index): torch's op on the piece, and nothing for indices that other ranks hold. One index for each element, or
// (`rows`) for each slice.
template <bool rows>
void lookup_kernel(KernelRun& run) {
  const auto x = run.arg(0).toTensor();
  const auto dim = wrap_dim(run.arg(1).toInt(), x.dim());
  auto at = inside(wrapped(run.arg(2).toTensor(), run.operands[0].symbols[dim], false), mine(run, 0, dim));
  if (rows) {
    SymSizes shape(x.dim(), 1);
    shape[dim] = at.outside.sym_numel();
    at.outside = at.outside.view_symint(shape);
  }
  const auto piece = nonempty(x, dim);
  const auto read = rows ? piece.index_select(dim, at.index) : piece.gather(dim, at.index);
  run.returns({read.masked_fill_(at.outside, elsewhere(x))});
}

Rule gather(const Call& call) {
  const auto& x = call.tensor(0);
  const auto& index = call.tensor(2);
  if (x.dim() == 0 || index.dim() != x.dim()) {
    return replicate(call);
  }
  Rule rule;
  auto dims = align(rule, x, index, nullptr, call.dim(1, x.dim()), true);
  rule.operands.emplace_back(std::move(dims.self));
  rule.operands.emplace_back(dims.index);
  rule.results.emplace_back(std::move(dims.index));
  rule.kernel = lookup_kernel<false>;
  rule.passes_partial();
  return rule;
}

// self, dim, index, then src or a value.
template <WriteKind writes>
Rule scatter(const Call& call) {
  const auto& self = call.tensor(0);
  const auto& index = call.tensor(2);
  const bool has_src = call.tensors.size() > 2;
  if (self.dim() == 0 || index.dim() != self.dim() || (has_src && call.tensors[2].dim() != self.dim())) {
    return replicate(call);
  }
  Rule rule;
  auto dims = align(rule, self, index, has_src ? &call.tensors[2] : nullptr, call.dim(1, self.dim()), false);
  rule.operands.emplace_back(dims.self);
  rule.operands.emplace_back(dims.index);
  if (has_src) {
    rule.operands.emplace_back(std::move(dims.index));
  }
  rule.results.emplace_back(std::move(dims.self));
  rule.kernel = write_kernel<false>;
  let_pass<writes>(call, rule);
  return rule;
}

// ---- index_select and the ops that write rows ----

Rule index_select(const Call& call) {
  const auto& x = call.tensor(0);
  const auto& index = call.tensor(2);
  if (x.dim() == 0) {
    return replicate(call);
  }
  Rule rule;
  const auto dim = call.dim(1, x.dim());
  auto in = dims_along(rule, x.dim(), dim, indexed(true)), out = in;
  out[dim] = index.dim() ? Dim(rule.factor()) : Dim(kNone);
  rule.operands.emplace_back(std::move(in));
  rule.operands.emplace_back(index.dim() ? Dims{out[dim]} : Dims{});
  rule.results.emplace_back(std::move(out));
  rule.kernel = lookup_kernel<true>;
  rule.passes_partial();
  return rule;
}

// self, dim, index, then a source with one row for each index, or a value.
template <WriteKind writes>
Rule write_rows(const Call& call) {
  const auto& self = call.tensor(0);
  const auto& index = call.tensor(2);
  const bool has_source = call.tensors.size() > 2;
  if (self.dim() == 0 || index.dim() != 1 || (has_source && call.tensors[2].dim() != self.dim() && call.tensors[2].dim() != 0)) {
    return replicate(call);
  }
  Rule rule;
  const auto dim = call.dim(1, self.dim());
  auto dims = dims_along(rule, self.dim(), dim, indexed(false));
  rule.operands.emplace_back(dims);
  rule.operands.emplace_back(Dims{Dim(kNone)});
  if (has_source) {
    auto source = call.tensors[2].dim() ? dims : Dims{};
    if (!source.empty()) {
      source[dim] = Dim(kNone);
    }
    rule.operands.emplace_back(std::move(source));
  }
  rule.results.emplace_back(std::move(dims));
  rule.kernel = write_kernel<true>;
  let_pass<writes>(call, rule);
  return rule;
}

// ---- x[i, j], x[i, j] = v ----

bool is_mask(at::ScalarType dtype) {
  return dtype == at::kBool || dtype == at::kByte;
}

// Which dims of self the list of indices covers, and the position of their broadcast shape among the dims of the result.
struct AdvancedIndex {
  c10::SmallVector<int64_t, 4> dims; // per index tensor: the first dim of self that it covers
  uint64_t covered = 0;
  bool masks = false;
  int64_t ndim = 0; // of the broadcast indices
  int64_t at = 0;   // its position: that of the first covered dim if all are neighbours, else 0
};

AdvancedIndex read_indices(const Call& call, int64_t self_ndim) {
  AdvancedIndex out;
  int64_t dim = 0, next = 0;
  size_t i = 1;
  for (; i < call.tensors.size() && call.tensors[i].arg == 1; ++i) {
    const auto& t = call.tensors[i];
    dim += t.index - next; // None: a dim that is not indexed
    next = t.index + 1;
    out.dims.push_back(dim);
    const auto covers = is_mask(t.dtype) ? t.dim() : 1;
    out.masks |= is_mask(t.dtype);
    out.ndim = std::max(out.ndim, is_mask(t.dtype) ? 1 : t.dim());
    for (int64_t k = 0; k < covers; ++k, ++dim) {
      TORCH_CHECK_INDEX(dim < self_ndim, "too many indices for tensor of dimension ", self_ndim);
      out.covered |= uint64_t{1} << dim;
    }
  }
  int64_t first = 0;
  while (first < 64 && !(out.covered >> first & 1)) {
    ++first;
  }
  const auto run = first < 64 ? out.covered >> first : 0;
  out.at = first < 64 && (run & (run + 1)) == 0 ? first : 0;
  return out;
}

// `how` becomes the kernel's data.
Rule indexed_rule(const Call& call, const AdvancedIndex& how, bool reads, Dims& shape) {
  Rule rule;
  const auto& x = call.tensors[0];
  Dims in;
  for (int64_t d = 0; d < x.dim(); ++d) {
    const bool covered = how.covered >> d & 1;
    in.push_back(!covered ? Dim(rule.factor()) : how.masks ? Dim(kNone) : Dim(rule.factor(indexed(reads))));
  }
  rule.operands.emplace_back(in);
  const auto indices = c10::ArrayRef<TensorArg>(call.tensors).slice(1, how.dims.size());
  Broadcast places(reads && !how.masks ? fresh_dims(rule, how.ndim) : Dims(how.ndim, Dim(kNone)));
  for (const auto& t : indices) {
    if (!how.masks) {
      places.widen(t, t.dim());
    }
  }
  for (const auto& t : indices) {
    rule.operands.emplace_back(how.masks ? Dims(t.dim(), Dim(kNone)) : places.of(t, t.dim()));
  }
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (d == how.at) {
      shape.append(places.dims.begin(), places.dims.end());
    }
    if (!(how.covered >> d & 1)) {
      shape.push_back(in[d]);
    }
  }
  rule.kernel_data = how;
  return rule;
}

// The index tensors of argument 1, each turned by `f(index, self dim, position)`.
template <typename F>
c10::List<std::optional<at::Tensor>> turn_indices(KernelRun& run, F f) {
  const auto given = run.arg(1).toListRef();
  c10::List<std::optional<at::Tensor>> out;
  size_t i = 0;
  for (const auto& v : given) {
    if (v.isNone() || !v.toTensor().defined()) {
      out.push_back(std::nullopt);
      continue;
    }
    out.push_back(f(v.toTensor(), kernel_data<AdvancedIndex>(run.solution).dims[i]));
    ++i;
  }
  return out;
}

void index_kernel(KernelRun& run) {
  auto x = run.arg(0).toTensor();
  const auto& base = run.operands[0];
  at::Tensor outside;
  auto indices = turn_indices(run, [&](const at::Tensor& index, int64_t dim) {
    if (!base.layout->shards(dim)) {
      return index;
    }
    auto in = inside(wrapped(index.to(at::kLong), base.symbols[dim], true), mine(run, 0, dim));
    outside = outside.defined() ? outside.logical_or(in.outside) : in.outside;
    x = nonempty(x, dim);
    return in.index;
  });
  auto out = at::index(x, indices);
  const auto& how = kernel_data<AdvancedIndex>(run.solution);
  auto shape = outside.sym_sizes().vec();
  shape.insert(shape.end(), out.dim() - how.at - how.ndim, 1);
  run.returns({out.masked_fill_(outside.view_symint(shape), elsewhere(x))});
}

Rule index(const Call& call) {
  const auto how = read_indices(call, call.tensors[0].dim());
  Dims out;
  auto rule = indexed_rule(call, how, true, out);
  rule.results.emplace_back(std::move(out));
  rule.kernel = index_kernel;
  rule.passes_partial();
  return rule;
}

void index_put_kernel(KernelRun& run) {
  const auto self = run.arg(0).toTensor();
  const auto& base = run.operands[0];
  auto padded = self;
  // An index outside this piece along any dim must write nothing: along that dim it points to the spare row.
  auto indices = turn_indices(run, [&](const at::Tensor& index, int64_t dim) {
    if (!base.layout->shards(dim)) {
      return index;
    }
    padded = with_spare_row(padded, dim);
    return or_spare(wrapped(index.to(at::kLong), base.symbols[dim], true), mine(run, 0, dim));
  });
  run.arg(0) = padded;
  run.arg(1) = std::move(indices);
  run.call_op();
  returns_without_spare(run, self);
}

// x[mask] = number: elementwise.
std::optional<Rule> masked_number(const Call& call, const AdvancedIndex& how) {
  const auto& x = call.tensors[0];
  if (call.tensors.size() != 3 || !is_mask(call.tensors[1].dtype) || call.tensors[1].dim() != x.dim() ||
      numel_of(call.tensors[2].sym_sizes()) != 1 || how.dims.size() != 1) {
    return std::nullopt;
  }
  Rule rule;
  auto dims = fresh_dims(rule, x.dim());
  rule.operands.emplace_back(dims);
  rule.operands.emplace_back(dims);
  rule.operands.emplace_back(Dims(call.tensors[2].dim(), Dim(kNone)));
  rule.results.emplace_back(std::move(dims));
  return rule;
}

// In a graph, compares the values' sizes with the indices'. Torch does so only in the backward, and if that makes a number of a
// symbol, all sizes become numbers.
void guard_values(const Call& call, const AdvancedIndex& how, int64_t ndim) {
  const auto& values = call.tensors.back();
  for (int64_t d = 0; d < values.dim() && values.has_symbols() && !how.masks; ++d) {
    const auto at = d + ndim - values.dim() - how.at;
    for (size_t k = 1; k <= how.dims.size() && at >= 0 && at < how.ndim && !values.is_one(d); ++k) {
      const auto& index = call.tensors[k];
      const auto there = at - (how.ndim - index.dim());
      if (there >= 0 && !index.is_one(there)) {
        (void)(values.sym_size(d) == index.sym_size(there));
      }
    }
  }
}

Rule index_put(const Call& call) {
  const auto how = read_indices(call, call.tensors[0].dim());
  if (auto rule = masked_number(call, how)) {
    return *rule;
  }
  Dims shape;
  auto rule = indexed_rule(call, how, false, shape);
  guard_values(call, how, static_cast<int64_t>(shape.size()));
  const auto& values = call.tensors.back();
  Dims dims;
  for (int64_t d = 0; d < values.dim(); ++d) {
    const auto at = d + static_cast<int64_t>(shape.size()) - values.dim();
    dims.push_back(at < 0 || values.is_one(d) ? Dim(kNone) : shape[at]);
  }
  rule.results.emplace_back(rule.operands[0].dims);
  rule.operands.emplace_back(std::move(dims));
  rule.kernel = index_put_kernel;
  OperandSet both(0b1);
  both.add(call.tensors.size() - 1);
  if (call.flag(3)) {
    rule.linear.push_back(adds(call, both, call.tensors[0].dtype));
  } else {
    rule.passes_partial(both);
  }
  return rule;
}

// ---- flat indices, and results whose size depends on values ----

// take(x, index): the result is cut like index; x, which is indexed as if flat, is whole.
Rule take(const Call& call) {
  Rule rule;
  rule.operands.emplace_back(Dims(call.tensors[0].dim(), Dim(kNone)));
  auto dims = fresh_dims(rule, call.tensors[1].dim());
  rule.operands.emplace_back(dims);
  rule.results.emplace_back(std::move(dims));
  rule.passes_partial();
  return rule;
}

Rule masked_scatter_in_place(const Call& call) {
  auto rule = replicate(call);
  rule.kernel_data = InPlaceOperand{call.operand(2)};
  return rule;
}

// ---- triangles ----

// The whole's diagonal 0 is this one of the piece.
c10::SymInt main_diagonal(const KernelRun& run) {
  const auto n = run.operands[0].dim();
  return plus(mine(run, 0, n - 2).start, -mine(run, 0, n - 1).start);
}

template <bool lower>
void triangle_kernel(KernelRun& run) {
  const auto diagonal = main_diagonal(run) + run.arg(1).toInt();
  if (const auto number = diagonal.maybe_as_int()) {
    run.arg(1) = *number;
    return run.call_op();
  }
  // The op takes only numbers.
  const auto x = run.arg(0).toTensor();
  const auto long_ints = x.options().dtype(at::kLong);
  const auto rows = at::arange(at::Scalar(x.sym_size(-2)), long_ints),
             columns = at::arange(at::Scalar(x.sym_size(-1)), long_ints);
  const auto of = columns - rows.unsqueeze(1);
  const at::Scalar last(diagonal);
  return_results(run, {x.masked_fill(lower ? of.gt(last) : of.lt(last), 0)});
}

template <bool lower>
Rule triangle(const Call& call) {
  Rule rule;
  const auto n = call.tensors[0].dim();
  TORCH_CHECK(n >= 2, call.schema.name(), ": input tensor must have at least 2 dimensions");
  auto dims = fresh_dims(rule, n);
  rule.factors[n - 1].kernel = rule.factors[n - 2].kernel = true;
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    rule.operands.emplace_back(dims);
  }
  rule.results.emplace_back(std::move(dims));
  rule.kernel = triangle_kernel<lower>;
  rule.passes_partial(OperandSet::first(call.tensors.size()));
  return rule;
}

void trace_kernel(KernelRun& run) {
  run.returns({diagonal_at(run.arg(0).toTensor(), main_diagonal(run), 0, 1).sum()});
}

Rule trace(const Call& call) {
  TORCH_CHECK(call.tensors[0].dim() == 2, "trace: expected a matrix, but got tensor with dim ", call.tensors[0].dim());
  Rule rule;
  rule.operands.emplace_back(fresh_dims(rule, 2, {.kernel = true, .reduce = ReduceOp::Sum}));
  rule.results.emplace_back();
  rule.kernel = trace_kernel;
  const auto from = call.tensors[0].dtype;
  rule.linear.push_back(computes(call, 1, c10::isIntegralType(from, true) ? at::kLong : from));
  return rule;
}

// ---- masked indices, by torch's parts: torch's own kernels read sizes, which makes numbers of a graph's symbols ----

// Indices of masked elements may be out of bounds.
c10::List<std::optional<at::Tensor>> clamped(const at::Tensor& x, const c10::IValue& given) {
  const auto indices = given.toListRef();
  TORCH_CHECK_INDEX(static_cast<int64_t>(indices.size()) <= x.dim(), "too many indices for tensor of dimension ", x.dim());
  c10::List<std::optional<at::Tensor>> out;
  for (size_t d = 0; d < indices.size(); ++d) {
    auto index = indices[d].toOptional<at::Tensor>();
    if (index && index->defined()) {
      TORCH_CHECK(
          index->scalar_type() == at::kLong || index->scalar_type() == at::kInt,
          "_unsafe_masked_index found unexpected index type ", index->scalar_type());
      const auto size = x.sym_size(static_cast<int64_t>(d));
      index = at::clamp(*index, at::Scalar(-size), at::Scalar(size - 1));
    }
    out.push_back(std::move(index));
  }
  return out;
}

std::optional<at::Tensor> masked_index(c10::ArrayRef<c10::IValue> arguments) {
  const auto x = arguments[0].toTensor(), mask = arguments[1].toTensor();
  if (x.sym_numel() == 0) {
    return std::nullopt;
  }
  return at::_unsafe_index(x, clamped(x, arguments[2])).masked_fill(mask.logical_not(), arguments[3].toScalar());
}

std::optional<at::Tensor> masked_index_put(c10::ArrayRef<c10::IValue> arguments) {
  const auto x = arguments[0].toTensor(), mask = arguments[1].toTensor(), values = arguments[3].toTensor();
  if (x.sym_numel() == 0) {
    return std::nullopt;
  }
  return at::_unsafe_index_put(x, clamped(x, arguments[2]), values.masked_fill(mask.logical_not(), 0), true);
}

} // namespace

void register_indexing(Registry& r) {
  const Options put{.symbols = true, .one_dtype = 0b101, .repeats = true}; // self, values
  const Options symbols{.symbols = true};
  r.add("indexing", {"_index_put_impl", "_index_put_impl_", "_unsafe_index_put", "index_put", "index_put_"}, index_put, put);
  r.add("indexing", {"_unsafe_masked_index"}, kAsOtherOps, {.calls = masked_index});
  r.add("indexing", {"_unsafe_masked_index_put_accumulate"}, kAsOtherOps, {.calls = masked_index_put});
  r.add("indexing", {"_unsafe_index.Tensor", "index.Tensor"}, index, symbols);
  r.add("indexing", {"combinations"}, kAsOtherOps, {.autograd = formulas::combinations});
  r.add("indexing", {"fill_diagonal_"}, kAsOtherOps, {.autograd = formulas::fill_diagonal_});
  r.add("indexing", {"gather"}, gather, symbols);
  r.add("indexing", {"index_add", "index_add_"}, write_rows<WriteKind::Sums>, symbols);
  r.add("indexing", {"index_copy", "index_copy_"}, write_rows<WriteKind::Values>, symbols);
  r.add(
      "indexing",
      {"index_fill.int_Scalar", "index_fill.int_Tensor", "index_fill_.int_Scalar", "index_fill_.int_Tensor", "index_reduce",
       "index_reduce_"},
      write_rows<WriteKind::Others>, symbols);
  r.add("indexing", {"index_select"}, index_select, symbols);
  // The ranks must agree on the result's size, so all need all values.
  r.add(
      "indexing", {"masked_scatter", "masked_select", "nonzero", "nonzero_static", "put", "put_", "repeat_interleave.Tensor"},
      replicate);
  r.add("indexing", {"masked_scatter_"}, masked_scatter_in_place, {.whole = true});
  r.add("indexing", {"masked_scatter_backward"}, replicate, symbols);
  r.add("indexing", {"scatter.src", "scatter_.src"}, scatter<WriteKind::Values>, symbols);
  r.add("indexing", {"scatter_add", "scatter_add_"}, scatter<WriteKind::Sums>, symbols);
  r.add(
      "indexing",
      {"scatter.reduce", "scatter.value", "scatter.value_reduce", "scatter_.reduce", "scatter_.value", "scatter_.value_reduce",
       "scatter_reduce.two", "scatter_reduce_.two"},
      scatter<WriteKind::Others>, symbols);
  r.add("indexing", {"take"}, take);
  r.add("indexing", {"tensor_split.tensor_indices_or_sections"}, kAsOtherOps, {.autograd = formulas::tensor_split});
  r.add("indexing", {"trace"}, trace, {.symbols = true});
  r.add("indexing", {"trace_backward"}, kAsOtherOps, {.autograd = formulas::trace_backward});
  r.add_forms("indexing", {"tril"}, triangle<true>, symbols);
  r.add_forms("indexing", {"triu"}, triangle<false>, symbols);
}

} // namespace shardtensor::rules
