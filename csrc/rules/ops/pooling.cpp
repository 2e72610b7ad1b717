// Pooling. Space may be cut. Max and average pooling, also adaptive, read halos. So do fractional pools: their windows lie where
// samples say, but not far from where windows of one step would. max_unpool sends each value to the rank that holds its place.
#include "redistribute/identity.h"
#include "rules/bands.h"
#include "rules/empties.h"
#include "rules/later.h"
#include "rules/pieces.h"
#include "rules/registry.h"
#include "rules/routed.h"
#include "rules/windows.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <limits>

namespace shardtensor::rules {

namespace {

// Noted where space is cut.
struct Pool {
  int64_t lead;            // dims before space
  std::vector<Taps> taps;  // one per dim of space, as all of these
  std::vector<int64_t> in; // sizes of the input
  std::vector<int64_t> out;

  std::vector<bool> uneven;  // windows have several sizes (adaptive, to a size that does not divide); `taps` has the largest
  std::vector<Reach> widest; // of fractional pools: a window lies within it, whatever the samples
  bool merges = false;       // one result along every dim of space that is cut: the ranks compare theirs

  Reach reads(int64_t i) const {
    return !widest.empty() ? widest[i] : uneven[i] ? Reach{in[i], out[i], 0, in[i] - 1} : taps[i].reach();
  }
  Reach readers(int64_t i) const {
    return !widest.empty() || uneven[i] ? mirror(reads(i), in[i]) : taps[i].readers();
  }
};

Sizes listed(const Call& call, const char* name) {
  return call.ints(call.position(name));
}

enum class Kind : uint8_t { Max, Average, AdaptiveMax, AdaptiveAverage, Fractional };
constexpr bool is_adaptive(Kind kind) {
  return kind == Kind::AdaptiveMax || kind == Kind::AdaptiveAverage;
}

// What the windows of a fractional pool may hold. Window o begins near o * (size - kernel) / (results - 1): rounding and the
// sample move it by less than two.
Reach fractional(int64_t size, int64_t kernel, int64_t results) {
  const auto steps = results - 1;
  return steps == 0 ? Reach{1, 1, size - kernel, size - 1}
                    : Reach{size - kernel, steps, -steps, 2 * steps - 1 + (kernel - 1) * steps};
}

// The most that an adaptive window holds.
int64_t widest(int64_t size, int64_t results) {
  const Reach r{size, results, 0, size - 1};
  int64_t most = 0;
  for (int64_t o = 0; o < results; ++o) {
    most = std::max(most, r.hi(o) - r.lo(o));
  }
  return most;
}

// Of the call's windows, for an input of these sizes; nothing if torch refuses them, or if those of an average have several
// sizes.
template <Kind kind>
std::optional<Pool> pool_of(const Call& call, const TensorArg& input, const TensorArg* made, int64_t space) {
  Pool pool{input.dim() - space, {}, {}, {}, {}, {}};
  const auto given = [&](const char* name) { return argument(call, name) >= 0 ? listed(call, name) : Sizes(); };
  const auto kernel = given("kernel_size"), stride = given("stride"), padding = given("padding"), dilation = given("dilation");
  const auto output = given("output_size");
  const bool up = argument(call, "ceil_mode") >= 0 && call.flag(argument(call, "ceil_mode"));
  const auto divisor = argument(call, "divisor_override");
  TORCH_CHECK(divisor < 0 || !call.has(divisor) || call.integer(divisor) != 0, "divisor must be not zero");
  for (int64_t i = 0; i < space; ++i) {
    const auto size = input.size(pool.lead + i);
    if (size < 1) {
      return std::nullopt;
    }
    Taps taps{};
    int64_t results = 0;
    if constexpr (is_adaptive(kind)) {
      results = made ? made->size(pool.lead + i) : integer_at(output, i);
      if (results < 1 || (kind == Kind::AdaptiveAverage && size % results)) {
        return std::nullopt;
      }
      const auto count = widest(size, results);
      taps = {count, count, 0, 1};
    } else if constexpr (kind == Kind::Fractional) {
      constexpr int64_t kMost = 1 << 20; // beyond, a float's rounding could move a window by more
      const auto k = integer_at(kernel, i);
      results = integer_at(output, i);
      if (k < 1 || results < 1 || results + k - (space == 2) > size || size > kMost) { // as torch refuses
        return std::nullopt;
      }
      taps = {k, k, 0, 1};
      pool.widest.push_back(fractional(size, k, results));
    } else {
      const auto k = integer_at(kernel, i), s = stride.empty() ? k : integer_at(stride, i);
      taps = {k, s, integer_at(padding, i), dilation.empty() ? 1 : integer_at(dilation, i)};
      constexpr auto kMost = std::numeric_limits<int32_t>::max();
      if (k < 1 || k > kMost || s < 1 || s > kMost || taps.dilation < 1 || taps.dilation > kMost || taps.padding < 0 ||
          taps.padding > taps.span() / 2) {
        return std::nullopt;
      }
      results = taps.results(size + (up ? s - 1 : 0));
      results -= up && (results - 1) * s >= size + taps.padding; // the last window must begin inside
    }
    if (results < 1) {
      return std::nullopt;
    }
    pool.in.push_back(size);
    pool.out.push_back(results);
    pool.taps.push_back(taps);
    pool.uneven.push_back(is_adaptive(kind) && size % results != 0);
  }
  return pool;
}

// Whether an adaptive maximum has one result along every dim of space that `input` is cut along.
template <Kind kind>
bool is_one_along_cuts(const Pool& pool, const TensorArg& input) {
  bool cut = false, one = kind == Kind::AdaptiveMax;
  for (int64_t i = 0; i < static_cast<int64_t>(pool.out.size()); ++i) {
    const bool here = input.layout->shards(pool.lead + i);
    cut = cut || here;
    one = one && (!here || pool.out[i] == 1);
  }
  return cut && one;
}

// The input is read through windows.
template <Kind kind>
void cut_forward(const Call& call, Rule& rule, int64_t space, ReduceOp padding, Kernel kernel) {
  const auto& input = call.tensors[0];
  auto pool = cut_in_space(call, space) ? pool_of<kind>(call, input, nullptr, space) : std::nullopt;
  if (!pool) {
    return;
  }
  pool->merges = is_one_along_cuts<kind>(*pool, input);
  auto& result = rule.results[0];
  result.sizes = input.sym_sizes();
  for (int64_t i = 0; i < space; ++i) {
    const auto d = pool->lead + i;
    if (pool->merges) {
      rule.operands[0].dims[d] = input.layout->shards(d) ? Dim(rule.factor()) : Dim(kNone);
      result.sizes[d] = pool->out[i];
    } else {
      read_through(rule, d, pool->out[i], pool->reads(i));
    }
  }
  rule.operands[0].padding = pool->widest.empty() ? std::optional(padding) : std::nullopt;
  rule.results.back() = result;
  rule.notes = *pool;
  rule.always(kernel);
}

// (gradient, input, ..., indices perhaps): gradient and indices are read by the reversed windows.
template <Kind kind>
void cut_backward(const Call& call, Rule& rule, int64_t space, Kernel kernel) {
  const auto &grad = call.tensors[0], &input = call.tensors[1];
  const auto pool = cut_in_space(call, space) ? pool_of<kind>(call, input, &grad, space) : std::nullopt;
  if (!pool) {
    return;
  }
  const bool one = is_one_along_cuts<kind>(*pool, input);
  for (int64_t i = 0; i < space; ++i) {
    const auto d = pool->lead + i;
    if (one) { // every rank has the gradients, and indices that say whose they are
      rule.results[0].dims[d] = input.layout->shards(d) ? Dim(rule.factor({.size = pool->in[i]})) : Dim(kNone);
    } else {
      read_through(rule, d, pool->in[i], pool->readers(i));
    }
  }
  const auto dims = rule.operands[0].dims; // a copy: a SmallVector that is assigned to itself may lose its elements
  for (auto& o : rule.operands) {
    o.dims = dims;
    o.padding = pool->widest.empty() ? o.padding : std::nullopt;
  }
  rule.operands[1].dims = rule.results[0].dims;
  rule.notes = *pool;
  rule.always(kernel);
}

// ---- kernels ----

// This rank's results along a dim of space, or its indices of the input in a backward; null if the dim is not cut.
const Interval* run_along(const Run& run, const Pool& pool, int64_t i) {
  return cut_run(run, pool.lead + i);
}

// Replaces an argument that lists integers of space.
template <typename F>
void replace_ints(const Run& run, const char* name, F each) {
  const auto at = argument(run, name);
  if (at < 0) {
    return;
  }
  const auto& pool = noted<Pool>(run.solution);
  std::vector<int64_t> list;
  for (int64_t i = 0; i < static_cast<int64_t>(pool.taps.size()); ++i) {
    list.push_back(each(i));
  }
  run.arg(at) = list;
}

void replace_padding(const Run& run, const Pool& pool) {
  replace_ints(run, "padding", [&](int64_t i) { return run_along(run, pool, i) ? 0 : pool.taps[i].padding; });
}

// Indices in planes of `sizes`, split into one per dim.
std::vector<at::Tensor> unraveled(at::Tensor index, c10::IntArrayRef sizes) {
  std::vector<at::Tensor> out(sizes.size());
  for (auto i = static_cast<int64_t>(sizes.size()) - 1; i > 0; --i) {
    out[i] = at::remainder(index, sizes[i]);
    index = at::div(index, sizes[i], "floor");
  }
  out[0] = index;
  return out;
}

at::Tensor raveled(const std::vector<at::Tensor>& indices, c10::IntArrayRef sizes) {
  auto out = indices[0];
  for (size_t i = 1; i < sizes.size(); ++i) {
    out = at::add(at::mul(out, sizes[i]), indices[i]);
  }
  return out;
}

// The indices that a dim's windows hold, one window after the other, if they have several sizes: the last index again at the end
// of those that are not the widest. So torch's kernel for windows of one size finds the same values, and the same places.
at::Tensor one_by_one(const Run& run, const Pool& pool, int64_t i, const at::Tensor& like) {
  const auto* mine = run_along(run, pool, i);
  const auto reach = pool.reads(i);
  const auto numbers = at::TensorOptions(at::kLong).device(like.device());
  const auto start = mine ? mine->start : 0, count = mine ? mine->length : pool.out[i];
  const auto at = at::arange(start, start + count, numbers).unsqueeze(1).mul(reach.num);
  const auto first = at::div(at.add(reach.first), reach.den, "floor"), last = at::div(at.add(reach.last), reach.den, "floor");
  return at::minimum(first.add(at::arange(pool.taps[i].count, numbers)), last).flatten();
}

// torch's indices are those in the plane that it was given: `held` of the whole's along dims that one_by_one() has laid out. A
// window of nothing but the least value keeps its first tap: the first that is no padding.
at::Tensor whole_indices(
    const Run& run, const Pool& pool, const at::Tensor& index, c10::IntArrayRef plane, const std::vector<at::Tensor>& held) {
  auto at = unraveled(index, plane);
  for (size_t i = 0; i < at.size(); ++i) {
    if (held[i].defined()) {
      at[i] = at::take(held[i], at[i]);
      continue;
    }
    if (!run_along(run, pool, static_cast<int64_t>(i))) {
      continue;
    }
    const auto& read = run.solution.halo(0)->fetch.mine()[pool.lead + i];
    at[i] = at::add(at[i], read.start());
    if (read.before) {
      at[i] = at::where(at::lt(at[i], 0), at::remainder(at[i], pool.taps[i].dilation), at[i]);
    }
  }
  return raveled(at, pool.in);
}

std::vector<int64_t> plane_of(const at::Tensor& t, const Pool& pool) {
  const auto sizes = guarded(t.sym_sizes());
  return {sizes.begin() + pool.lead, sizes.end()};
}

void replace_output_size(const Run& run, const Pool& pool) {
  replace_ints(run, "output_size", [&](int64_t i) {
    const auto* mine = run_along(run, pool, i);
    return mine ? mine->length : pool.out[i];
  });
}

// On a rank that makes nothing: runs the op on zeros that give one result.
void stand_in_for_input(Run& run, const Pool& pool, const SymSizes& sizes) {
  const auto window = [&](int64_t i) { return pool.taps[i].span(); };
  run.arg(0) = stand_in(run, 0, pool.lead, pool.lead, window);
  replace_padding(run, pool);
  replace_ints(run, "output_size", [&](int64_t i) { return run_along(run, pool, i) ? 1 : pool.out[i]; });
  run.call_op();
  for (size_t i = 0; i < run.op.schema().returns().size(); ++i) {
    auto& value = run.stack[run.stack.size() - 1 - i];
    value = value.toTensor().new_zeros_symint(sizes);
  }
}

// One result of each rank's piece, its index among the whole's; then the ranks compare. Of equal values the first counts, of NaN
// the last.
void max_of_all(Run& run, const Pool& pool) {
  const auto& layout = *run.operands[0].layout;
  const auto input = run.arg(0).toTensor();
  const auto sizes = sizes_of_piece(run);
  at::Tensor values, index;
  if (is_empty(input)) {
    values = at::full_symint(sizes, identity(ReduceOp::Max, input.scalar_type()), input.options());
    index = at::full_symint(sizes, std::numeric_limits<int64_t>::max(), input.options().dtype(at::kLong));
  } else {
    const auto results = results_of_op(run);
    values = results[0].toTensor();
    auto at = unraveled(results[1].toTensor(), plane_of(input, pool));
    for (size_t i = 0; i < at.size(); ++i) {
      const auto d = pool.lead + static_cast<int64_t>(i);
      at[i] = at[i].add(layout.intervals(d, pool.in[i], run.mesh().coordinate())[0].start);
    }
    index = raveled(at, pool.in);
  }
  values = values.unsqueeze(0);
  index = index.unsqueeze(0);
  for (int64_t m = 0; m < layout.ndim(); ++m) {
    if (layout.placement(m).is_shard() && layout.placement(m).dim >= pool.lead) {
      values = gather_slices(values, 0, run.mesh(), m);
      index = gather_slices(index, 0, run.mesh(), m);
    }
  }
  const auto nan = values.isnan();
  const auto last = index.masked_fill(nan.logical_not(), -1).amax(0);
  const auto most = values.amax(0);
  const auto first = index.masked_fill(values.ne(most), std::numeric_limits<int64_t>::max()).amin(0);
  run.returns({most, at::where(last.ge(0), last, first)});
}

// Max pooling; its results are values, and perhaps indices.
void max_kernel(Run& run) {
  const auto& pool = noted<Pool>(run.solution);
  if (pool.merges && run.operands[0].layout->sharded_dims() >> pool.lead && run.op.schema().returns().size() == 2) {
    return max_of_all(run, pool);
  }
  if (!run.solution.halo(0)) {
    return call_op_nonempty(run);
  }
  auto input = run.arg(0).toTensor();
  const auto sizes = sizes_of_piece(run);
  const bool indexed = run.op.schema().returns().size() == 2;
  if (makes_nothing(sizes)) {
    return stand_in_for_input(run, pool, sizes);
  }
  std::vector<at::Tensor> held(pool.taps.size());
  for (size_t i = 0; i < held.size(); ++i) {
    if (pool.uneven[i]) {
      const auto dim = pool.lead + static_cast<int64_t>(i);
      held[i] = one_by_one(run, pool, static_cast<int64_t>(i), input);
      const auto first = cut_run(run, dim) ? run.solution.halo(0)->fetch.mine()[dim].start() : 0;
      input = input.index_select(dim, held[i].sub(first));
    }
  }
  run.arg(0) = input;
  replace_padding(run, pool);
  replace_output_size(run, pool);
  run.call_op();
  if (indexed) {
    run.stack.back() = whole_indices(run, pool, run.stack.back().toTensor(), plane_of(input, pool), held);
  }
}

// Adds the gradients up where their indices say, those in this rank's piece. torch's kernel would write outside of it.
void max_backward_kernel(Run& run) {
  const auto& pool = noted<Pool>(run.solution);
  const auto& layout = *run.solution.results[0].layout;
  if (!(layout.sharded_dims() >> pool.lead)) {
    return call_op_nonempty(run);
  }
  const auto grad = run.arg(0).toTensor(), input = run.arg(1).toTensor();
  const auto index = run.arg(argument(run, "indices")).toTensor();
  if (is_empty(input) || is_empty(grad)) {
    return run.returns({at::zeros_like(input)});
  }
  auto at = unraveled(index, pool.in);
  auto inside = at::lt(at[0], pool.in[0]); // torch gives other indices to windows that have no element
  for (size_t i = 0; i < at.size(); ++i) {
    const auto d = pool.lead + static_cast<int64_t>(i);
    if (layout.shards(d)) {
      const auto mine = layout.intervals(d, pool.in[i], run.mesh().coordinate())[0];
      at[i] = at::sub(at[i], mine.start);
      const auto here = at::logical_and(at::ge(at[i], 0), at::lt(at[i], mine.length));
      inside = at::logical_and(inside, here);
    }
  }
  const auto places = at::where(inside, raveled(at, plane_of(input, pool)), 0);
  const auto values = at::where(inside, grad, at::zeros({}, grad.options()));
  const auto flat = [&](const at::Tensor& t) { return t.flatten(pool.lead); };
  const auto out =
      at::scatter_add(flat(at::zeros_symint(input.sym_sizes(), input.options())), pool.lead, flat(places), flat(values));
  run.returns({out.view_symint(input.sym_sizes())});
}

// By how many elements the windows of `count` results from `start` on are divided along one dim.
at::Tensor divisors(
    const Taps& taps, int64_t size, int64_t start, int64_t count, bool with_padding, const at::TensorOptions& options) {
  const auto margin = with_padding ? taps.padding : 0;
  const auto whole_numbers = at::TensorOptions(at::kLong).device(options.device());
  const auto lo = at::arange(start, start + count, whole_numbers).mul(taps.stride).sub(taps.padding);
  const auto hi = lo.add(taps.count).clamp_max(size + margin);
  return hi.sub(lo.clamp_min(-margin)).clamp_min(1).to(options.dtype()); // a result that the whole lacks: any
}

// Whether each of these windows has all its elements.
bool are_full(const Taps& taps, int64_t size, int64_t start, int64_t count, bool with_padding) {
  const auto margin = with_padding ? taps.padding : 0;
  return start * taps.stride - taps.padding >= -margin &&
         (start + count - 1) * taps.stride - taps.padding + taps.count <= size + margin;
}

// The whole's divisors of the windows that this rank makes or reads, a product of one factor per dim; undefined if the op itself
// divides as the whole does: where every window of the cut dims has all its elements, or where the call gives the divisor.
at::Tensor own_divisor(const Run& run, const Pool& pool, const at::TensorOptions& options, bool backward) {
  const auto at = argument(run, "divisor_override");
  if (at < 0 || !run.arg(at).isNone()) {
    return {};
  }
  const bool with_padding = run.arg(argument(run, "count_include_pad")).toBool();
  const auto space = static_cast<int64_t>(pool.taps.size());
  bool full = true;
  at::Tensor out;
  for (int64_t i = 0; i < space; ++i) {
    const auto* mine = run_along(run, pool, i);
    const auto& read = run.solution.halo(0)->fetch.mine()[pool.lead + i];
    const auto start = !mine ? 0 : backward ? read.start() : mine->start;
    const auto count = !mine ? pool.out[i] : backward ? read.length() : mine->length;
    full = full && (!mine || are_full(pool.taps[i], pool.in[i], start, count, with_padding));
    std::vector<int64_t> along(space, 1);
    along[i] = count;
    const auto factor = divisors(pool.taps[i], pool.in[i], start, count, with_padding, options).view(along);
    out = out.defined() ? at::mul(out, factor) : factor;
  }
  return full ? at::Tensor() : out;
}

// Average pooling: the cells of padding are zeros in the buffer, so the sums are right; the divisors are the whole's.
void average_kernel(Run& run) {
  if (!run.solution.halo(0)) {
    return call_op_nonempty(run);
  }
  const auto& pool = noted<Pool>(run.solution);
  const auto input = run.arg(0).toTensor();
  const auto sizes = sizes_of_piece(run);
  if (makes_nothing(sizes)) {
    return stand_in_for_input(run, pool, sizes);
  }
  const auto divisor = own_divisor(run, pool, input.options(), false);
  replace_padding(run, pool);
  replace_output_size(run, pool);
  if (divisor.defined()) {
    run.arg(argument(run, "divisor_override")) = 1;
  }
  run.call_op();
  if (divisor.defined()) {
    const auto sums = run.stack.back().toTensor();
    run.stack.back() = at::isFloatingType(sums.scalar_type()) ? at::div(sums, divisor) : at::div(sums, divisor, "trunc");
  }
}

void average_backward_kernel(Run& run) {
  const auto* halo = run.solution.halo(0);
  if (!halo) {
    return call_op_nonempty(run);
  }
  const auto& pool = noted<Pool>(run.solution);
  const auto grad = run.arg(0).toTensor(), input = run.arg(1).toTensor();
  if (is_empty(input) || is_empty(grad)) {
    run.arg(0) = stand_in(run, 0, pool.lead, pool.lead, [](int64_t) { return 1; });
    run.arg(1) = stand_in(run, 1, pool.lead, pool.lead, [&](int64_t i) { return pool.taps[i].span(); });
    replace_padding(run, pool);
    run.call_op();
    run.stack.back() = at::zeros_like(input);
    return;
  }
  const auto divisor = own_divisor(run, pool, grad.options(), true);
  if (divisor.defined()) {
    run.arg(0) = at::div(grad, divisor);
    run.arg(argument(run, "divisor_override")) = 1;
  }
  // The input that these results alone would read; torch's kernel looks at its sizes only.
  auto sizes = guarded(input.sym_sizes());
  const auto space = static_cast<int64_t>(pool.taps.size());
  std::vector<int64_t> crop(2 * space, 0);
  for (int64_t i = 0; i < space; ++i) {
    if (const auto* mine = run_along(run, pool, i)) {
      const auto& taps = pool.taps[i];
      const auto& read = halo->fetch.mine()[pool.lead + i];
      const auto begin = read.start() * taps.stride - taps.padding;
      const auto length = (read.length() - 1) * taps.stride + taps.span();
      sizes[pool.lead + i] = length;
      crop[2 * (space - 1 - i)] = begin - mine->start;
      crop[2 * (space - 1 - i) + 1] = mine->start + mine->length - begin - length;
    }
  }
  run.arg(1) = at::empty(sizes, input.options());
  replace_padding(run, pool);
  run.call_op();
  run.stack.back() = at::constant_pad_nd(run.stack.back().toTensor(), crop);
}

// ---- rules ----

template <int64_t space, Kind kind = Kind::Max>
Rule max_pool(const Call& call) {
  auto rule = planes(call, space);
  cut_forward<kind>(call, rule, space, ReduceOp::Max, max_kernel);
  return rule;
}

template <int64_t space, Kind kind = Kind::Max>
Rule max_pool_backward(const Call& call) {
  auto rule = planes(call, space);
  rule.linear_in({0});
  cut_backward<kind>(call, rule, space, max_backward_kernel);
  return rule;
}

// ---- adaptive average pooling to sizes that do not divide ----

at::Tensor average_combs(const Run& run, const at::Tensor& input, c10::IntArrayRef out, int64_t) {
  std::vector<c10::IValue> stack{input, c10::List<int64_t>(out)};
  forward_op(run).callBoxed(&stack);
  return stack[0].toTensor();
}

// Nothing if torch refuses the call.
std::optional<Bands> averages(const TensorArg& input, c10::IntArrayRef out, int64_t space) {
  Bands bands{input.dim() - space, {}, {}, {}, average_combs};
  if (bands.lead < 1 || !c10::isFloatingType(input.dtype)) {
    return std::nullopt;
  }
  for (int64_t i = 0; i < space; ++i) {
    const auto size = input.size(bands.lead + i), count = integer_at(out, i);
    if (size < 1 || count < 1) {
      return std::nullopt;
    }
    bands.in.push_back(size);
    bands.out.push_back(count);
    bands.reaches.push_back({size, count, 0, size - 1});
  }
  return bands;
}

template <int64_t space, Kind kind = Kind::Average>
Rule average_pool(const Call& call) {
  auto rule = planes(call, space);
  rule.linear_in({0});
  cut_forward<kind>(call, rule, space, ReduceOp::Sum, average_kernel);
  if (is_adaptive(kind) && !rule.notes.has_value() && cut_in_space(call, space)) {
    if (const auto bands = averages(call.tensors[0], listed(call, "output_size"), space)) {
      band_forward(rule, call.tensors[0].sym_sizes(), *bands);
    }
  }
  return rule;
}

template <int64_t space, Kind kind = Kind::Average>
Rule average_pool_backward(const Call& call) {
  auto rule = planes(call, space);
  rule.linear_in({0});
  cut_backward<kind>(call, rule, space, average_backward_kernel);
  if (is_adaptive(kind) && !rule.notes.has_value() && cut_in_space(call, space)) {
    const auto &grad = call.tensors[0], &input = call.tensors[1];
    if (const auto bands = averages(input, grad.sizes().slice(grad.dim() - space), space)) {
      band_backward(rule, input.sym_sizes(), *bands);
      rule.operands[1] = Operand(rule.results[0].dims); // only its sizes are read
      rule.operands[1].free = true;
    }
  }
  return rule;
}

// ---- fractional pooling ----

// The first element of each of the windows `of` along dim i, as torch finds them: [planes, windows]. `sample`: one per plane.
at::Tensor fractional_starts(const Pool& pool, int64_t i, const Interval& of, const at::Tensor& sample) {
  const auto range = pool.in[i] - pool.taps[i].count, steps = pool.out[i] - 1;
  const auto number = at::arange(of.start, of.start + of.length, sample.options());
  const auto scalar = [&](int64_t n) { return at::full({}, n, sample.options()); };
  const auto step = steps ? scalar(range).div(scalar(steps)) : scalar(range);
  const auto at = sample.unsqueeze(1);
  const auto starts = number.add(at).mul(step).to(at::kLong).sub(at.mul(step).to(at::kLong));
  return at::where(number.eq(steps), range, starts);
}

// The windows are laid out one after the other, so that torch's kernel for windows of one step finds the values, and the places.
void fractional_kernel(Run& run) {
  const auto* halo = run.solution.halo(0);
  if (!halo) {
    return call_op_nonempty(run);
  }
  const auto& pool = noted<Pool>(run.solution);
  const auto sizes = sizes_of_piece(run);
  const auto input = run.arg(0).toTensor();
  if (makes_nothing(sizes)) {
    return run.returns({input.new_zeros_symint(sizes), at::zeros_symint(sizes, input.options().dtype(at::kLong))});
  }
  const auto space = static_cast<int64_t>(pool.taps.size());
  const auto samples = run.arg(argument(run, "random_samples")).toTensor().reshape({-1, space});
  auto x = input.dim() == space ? input.unsqueeze(0) : input.flatten(0, pool.lead - 1);
  std::vector<at::Tensor> held(space);
  std::vector<int64_t> windows;
  for (int64_t i = 0; i < space; ++i) {
    const auto d = pool.lead + i;
    const auto* mine = cut_run(run, d);
    const auto of = mine ? *mine : Interval{0, pool.out[i]};
    const auto first = mine ? halo->fetch.mine()[d].inside.start : 0;
    const auto starts = fractional_starts(pool, i, of, samples.select(1, space == 2 ? 1 - i : i));
    windows.push_back(pool.taps[i].count);
    held[i] = starts.unsqueeze(2).add(at::arange(windows[i], starts.options())).flatten(1);
    auto shape = guarded(x.sym_sizes());
    shape[1 + i] = held[i].size(1);
    std::vector<int64_t> along(x.dim(), 1);
    along[0] = held[i].size(0);
    along[1 + i] = held[i].size(1);
    x = x.gather(1 + i, held[i].sub(first).view(along).expand(shape));
  }
  const auto plane = x.sizes().slice(1).vec();
  auto [values, index] = space == 2 ? at::max_pool2d_with_indices(x, windows) : at::max_pool3d_with_indices(x, windows);
  auto at = unraveled(index, plane);
  for (int64_t i = 0; i < space; ++i) {
    at[i] = held[i].gather(1, at[i].flatten(1)).view(index.sizes());
  }
  run.returns({values.reshape_symint(sizes), raveled(at, pool.in).reshape_symint(sizes)});
}

// (self, ..., random samples [n, c, space]): n is 1 where self has no batch.
template <int64_t space>
Rule fractional_pool(const Call& call) {
  auto rule = planes(call, space);
  const auto &input = call.tensors[0], &samples = call.tensors[1];
  if (samples.dim() != 3) {
    return replicate(call); // the op says what is wrong
  }
  const auto dims = rule.operands[0].dims;
  const bool batched = static_cast<int64_t>(dims.size()) == space + 2;
  rule.operands[1].dims = batched ? Dims{dims[0], dims[1], Dim(kNone)} : Dims{Dim(kNone), dims[0], Dim(kNone)};
  if (cut_in_space(call, space) && (input.dtype == at::kFloat || input.dtype == at::kDouble) && samples.dtype == input.dtype &&
      samples.size(0) == (batched ? input.size(0) : 1) && samples.size(1) == input.size(batched) && samples.size(2) == space) {
    cut_forward<Kind::Fractional>(call, rule, space, ReduceOp::Max, fractional_kernel);
  }
  return rule;
}

template <int64_t space>
Rule fractional_pool_backward(const Call& call) {
  auto rule = planes(call, space);
  rule.linear_in({0});
  if (call.tensors[0].dtype == at::kFloat || call.tensors[0].dtype == at::kDouble) {
    cut_backward<Kind::Fractional>(call, rule, space, max_backward_kernel);
  }
  return rule;
}

// ---- max_unpool: each value goes to the place in the whole's plane that its index names ----

// Noted where space is cut.
struct Places {
  int64_t lead; // dims before space
  Sizes sizes;  // of a plane
};

bool cuts_space(const Layout& layout, const Places& plane) {
  return layout.sharded_dims() >> plane.lead;
}

// Index of the plane that each item of a piece belongs to, among all planes of the piece.
at::Tensor plane_numbers(const at::Tensor& index, int64_t lead) {
  const auto planes = c10::multiply_integers(index.sizes().slice(0, lead)),
             each = c10::multiply_integers(index.sizes().slice(lead));
  return at::arange(planes, index.options()).unsqueeze(1).expand({planes, each}).flatten();
}

at::Tensor added_at(const at::Tensor& values, const at::Tensor& index, c10::SymIntArrayRef sizes) {
  const auto lead = values.dim() - static_cast<int64_t>(sizes.size());
  auto all = values.sym_sizes().slice(0, lead).vec();
  all.insert(all.end(), sizes.begin(), sizes.end());
  return values.new_zeros_symint(all).flatten(lead).scatter_add(lead, index.flatten(lead), values.flatten(lead)).view_symint(all);
}

// The values at the indices. What a pool was called with, the rule alone reads.
template <typename... Arguments>
at::Tensor picked(const at::Tensor& planes, const at::Tensor& index, int64_t space, Arguments...) {
  const auto lead = planes.dim() - space;
  return planes.flatten(lead).gather(lead, index.flatten(lead)).view_symint(index.sym_sizes());
}

// Items at indices of the whole's planes, and the ranks that own those places.
struct AtOwners {
  Routed routed;
  at::Tensor here; // of the items that this rank owns, ordered as they arrive: the place in its own piece, as if flat
};

// `piece`: the sizes of this rank's planes.
AtOwners at_owners(const Run& run, const Layout& layout, const at::Tensor& index, c10::IntArrayRef piece) {
  const auto& plane = noted<Places>(run.solution);
  const auto at = index.flatten();
  Routed routed(layout, plane.lead, plane.sizes, unraveled(at, plane.sizes));
  const auto count = c10::multiply_integers(plane.sizes);
  const auto places = routed.there(plane_numbers(index, plane.lead).mul(count).add(at));
  auto split = unraveled(at::remainder(places, count), plane.sizes);
  for (size_t i = 0; i < split.size(); ++i) {
    const auto d = plane.lead + static_cast<int64_t>(i);
    split[i] = split[i].sub(layout.intervals(d, plane.sizes[i], run.mesh().coordinate())[0].start);
  }
  piece = piece.slice(plane.lead);
  return {std::move(routed), at::div(places, count, "floor").mul(c10::multiply_integers(piece)).add(raveled(split, piece))};
}

// For max_unpool, and for the gradient of picked(), which adds up.
void unpool_kernel(Run& run) {
  const auto& plane = noted<Places>(run.solution);
  const bool adds = run.op.schema().name() == "shardtensor::added_at";
  const auto values = run.arg(0).toTensor(), index = run.arg(1).toTensor();
  const auto& layout = *run.solution.results[0].layout;
  if (!cuts_space(layout, plane)) {
    return call_op_nonempty(run);
  }
  if (!may_ask_values(values)) {
    return put_off(run, {sizes_of_piece(run)});
  }
  auto out = values.new_zeros(guarded(sizes_of_piece(run)));
  const auto owned = at_owners(run, layout, index, out.sizes());
  const auto arrived = owned.routed.there(values.flatten());
  auto flat = out.view(-1);
  adds ? flat.scatter_add_(0, owned.here, arrived) : flat.scatter_(0, owned.here, arrived);
  run.returns({out});
}

// The values at the indices: of gradients, in the backward of max_unpool.
void pick_kernel(Run& run) {
  const auto& plane = noted<Places>(run.solution);
  const auto planes = run.arg(0).toTensor(), index = run.arg(1).toTensor();
  const auto& held = *run.operands[0].layout;
  if (!cuts_space(held, plane)) {
    return call_op_nonempty(run);
  }
  if (!may_ask_values(planes)) {
    return put_off(run, {SymSizes(index.sym_sizes().begin(), index.sym_sizes().end())});
  }
  const auto owned = at_owners(run, held, index, planes.sizes());
  run.returns({owned.routed.back(planes.reshape({-1}).index_select(0, owned.here)).view(index.sizes())});
}

// Along the dims of space, `windows` stays cut as it is, and `plain` dims of `results` indices are cut in the same proportions.
void in_proportion(
    Rule& rule, c10::ArrayRef<size_t> windows, Dims& plain, const TensorArg& held, int64_t lead, c10::IntArrayRef results) {
  for (int64_t i = 0; i < static_cast<int64_t>(results.size()); ++i) {
    plain[lead + i] = rule.factor({.size = results[i]});
    const auto dim = rule.windows(plain[lead + i].factor, {held.size(lead + i), results[i], 0, 0});
    for (const auto o : windows) {
      rule.operands[o].dims[lead + i] = dim;
      rule.operands[o].kept_cut = true;
    }
  }
}

Sizes planes_of(const TensorArg& t, int64_t space) {
  const auto sizes = t.sizes().slice(t.dim() - space);
  return {sizes.begin(), sizes.end()};
}

bool any_below_one(c10::IntArrayRef sizes) {
  return std::any_of(sizes.begin(), sizes.end(), [](int64_t n) { return n < 1; });
}

// (values, indices, sizes of a plane, ...). Nothing is exchanged if torch refuses the call.
template <int64_t space>
Rule unpool(const Call& call) {
  auto rule = planes(call, space);
  rule.linear_in({0});
  const auto &values = call.tensors[0], &index = call.tensors[1];
  const auto lead = values.dim() - space;
  if (!cut_in_space(call, space) || values.layout != index.layout || index.dtype != at::kLong || lead < 1 ||
      values.dim() != index.dim() || values.sizes() != index.sizes()) {
    return rule;
  }
  const auto sizes = call.ints(2), strides = call.schema.arguments().size() > 3 ? call.ints(3) : Sizes();
  if (sizes.size() != space || any_below_one(sizes) || any_below_one(strides) || any_below_one(values.sizes().slice(lead - 1))) {
    return rule;
  }
  auto& result = rule.results[0];
  in_proportion(rule, {0, 1}, result.dims, values, lead, sizes);
  result.sizes = values.sym_sizes();
  std::copy(sizes.begin(), sizes.end(), result.sizes.begin() + lead);
  rule.notes = Places{lead, sizes};
  rule.always(unpool_kernel);
  return rule;
}

// Of our own ops: the dims of space are as many as the call says.
template <RuleFn two, RuleFn three>
Rule by_space(const Call& call) {
  return call.ints(2).size() == 2 ? two(call) : three(call);
}

// (planes, indices, dims of space)
Rule pick(const Call& call) {
  const auto space = call.integer(2);
  auto rule = planes(call, space);
  rule.linear_in({0});
  const auto &read = call.tensors[0], &index = call.tensors[1];
  const auto sizes = planes_of(read, space), results = planes_of(index, space);
  if (!cut_in_space(call, space) || any_below_one(sizes) || any_below_one(results)) {
    return rule;
  }
  const auto lead = read.dim() - space;
  in_proportion(rule, {0}, rule.operands[1].dims, read, lead, results);
  rule.results[0] = Result(rule.operands[1].dims, index.sym_sizes());
  rule.notes = Places{lead, sizes};
  rule.always(pick_kernel);
  return rule;
}

// ---- the values at the indices that a max pool gave, each within the window of its result: gradients of its gradient ----

// What a rank holds of the planes, with its halo. An index that lies outside belongs to another rank's summand, or to a window
// that has no element.
void pick_near_kernel(Run& run) {
  if (!run.solution.notes.has_value()) {
    return call_op_nonempty(run);
  }
  const auto& pool = noted<Pool>(run.solution);
  const auto planes = run.arg(0).toTensor(), index = run.arg(1).toTensor();
  const auto& layout = *run.operands[0].layout;
  if (is_empty(planes) || is_empty(index)) {
    return run.returns({planes.new_zeros_symint(index.sym_sizes())});
  }
  const auto* halo = run.solution.halo(0);
  const auto held = plane_of(planes, pool);
  auto at = unraveled(index, pool.in);
  auto inside = at::Tensor();
  for (size_t i = 0; i < at.size(); ++i) {
    const auto d = pool.lead + static_cast<int64_t>(i);
    const auto first = halo               ? halo->fetch.mine()[d].start()
                       : layout.shards(d) ? layout.intervals(d, pool.in[i], run.mesh().coordinate())[0].start
                                          : 0;
    at[i] = at::sub(at[i], first);
    const auto here = at::logical_and(at::ge(at[i], 0), at::lt(at[i], held[i]));
    inside = inside.defined() ? at::logical_and(inside, here) : here;
  }
  const auto places = at::where(inside, raveled(at, held), 0);
  const auto values = planes.flatten(pool.lead).gather(pool.lead, places.flatten(pool.lead)).view_symint(index.sym_sizes());
  run.returns({at::where(inside, values, at::zeros({}, values.options()))});
}

// (planes, indices, dims of space, the pool's arguments)
template <Kind kind>
Rule pick_near(const Call& call) {
  const auto space = call.integer(2);
  auto rule = planes(call, space);
  rule.linear_in({0});
  rule.always(pick_near_kernel);
  const auto &read = call.tensors[0], &index = call.tensors[1];
  const auto pool = cut_in_space(call, space) ? pool_of<kind>(call, read, &index, space) : std::nullopt;
  if (!pool) {
    return rule;
  }
  const bool one = is_one_along_cuts<kind>(*pool, read);
  for (int64_t i = 0; i < space; ++i) {
    const auto d = pool->lead + i;
    auto &from = rule.operands[0].dims[d], &at = rule.operands[1].dims[d];
    if (one) { // each rank picks of its piece; one of them has the value
      at = Dim(kNone);
      from = read.layout->shards(d) ? Dim(rule.reduced(ReduceOp::Sum)) : Dim(kNone);
      continue;
    }
    at = rule.factor({.size = pool->out[i]});
    from = rule.windows(at.factor, pool->reads(i));
  }
  rule.operands[0].padding = std::nullopt;
  rule.results = {Result(rule.operands[1].dims, index.sym_sizes())};
  rule.notes = *pool;
  return rule;
}

using Ints = at::IntArrayRef;

TORCH_LIBRARY_FRAGMENT(shardtensor, m) {
  m.def("picked_by_adaptive_max(Tensor planes, Tensor indices, int space) -> Tensor");
  m.impl("picked_by_adaptive_max", c10::DispatchKey::CompositeExplicitAutograd, picked<>);
  m.def("picked_by_fractional_max(Tensor planes, Tensor indices, int space, int[] kernel_size, int[] output_size) -> Tensor");
  m.impl("picked_by_fractional_max", c10::DispatchKey::CompositeExplicitAutograd, picked<Ints, Ints>);
  m.def(
      "picked_by_max(Tensor planes, Tensor indices, int space, int[] kernel_size, int[] stride, int[] padding, int[] dilation, "
      "bool ceil_mode) -> Tensor");
  m.impl("picked_by_max", c10::DispatchKey::CompositeExplicitAutograd, picked<Ints, Ints, Ints, Ints, bool>);
  m.def("added_at(Tensor values, Tensor indices, SymInt[] output_size) -> Tensor");
  m.impl("added_at", c10::DispatchKey::CompositeExplicitAutograd, added_at);
  m.def("picked(Tensor planes, Tensor indices, int space) -> Tensor");
  m.impl("picked", c10::DispatchKey::CompositeExplicitAutograd, picked<>);
}

} // namespace

void register_pooling(Registry& r) {
  const Options symbols{.symbols = true}, reals{.symbols = true, .takes = kReals};
  r.add("pooling", {"_adaptive_avg_pool2d"}, average_pool<2, Kind::AdaptiveAverage>, symbols);
  r.add("pooling", {"_adaptive_avg_pool2d_backward"}, average_pool_backward<2, Kind::AdaptiveAverage>, symbols);
  r.add("pooling", {"_adaptive_avg_pool3d"}, average_pool<3, Kind::AdaptiveAverage>, symbols);
  r.add("pooling", {"_adaptive_avg_pool3d_backward"}, average_pool_backward<3, Kind::AdaptiveAverage>, symbols);
  r.add("pooling", {"adaptive_max_pool2d"}, max_pool<2, Kind::AdaptiveMax>, reals);
  r.add("pooling", {"adaptive_max_pool2d_backward"}, max_pool_backward<2, Kind::AdaptiveMax>, symbols);
  r.add("pooling", {"adaptive_max_pool3d"}, max_pool<3, Kind::AdaptiveMax>, reals);
  r.add("pooling", {"adaptive_max_pool3d_backward"}, max_pool_backward<3, Kind::AdaptiveMax>, symbols);
  r.add("pooling", {"avg_pool2d"}, average_pool<2>, symbols);
  r.add("pooling", {"avg_pool2d_backward"}, average_pool_backward<2>, symbols);
  r.add("pooling", {"avg_pool3d"}, average_pool<3>, symbols);
  r.add("pooling", {"avg_pool3d_backward"}, average_pool_backward<3>, symbols);
  r.add("pooling", {"fractional_max_pool2d"}, fractional_pool<2>, reals);
  r.add("pooling", {"fractional_max_pool2d_backward"}, fractional_pool_backward<2>, symbols);
  r.add("pooling", {"fractional_max_pool3d"}, fractional_pool<3>, reals);
  r.add("pooling", {"fractional_max_pool3d_backward"}, fractional_pool_backward<3>, symbols);
  r.add(
      "pooling", {"max_pool1d"}, max_pool<1>,
      {.way = Way::Whole, .symbols = true}); // torch reads the data pointer if no gradient is needed
  r.add("pooling", {"max_pool2d_with_indices"}, max_pool<2>, symbols);
  r.add("pooling", {"max_pool2d_with_indices_backward"}, max_pool_backward<2>, symbols);
  r.add("pooling", {"max_pool3d_with_indices"}, max_pool<3>, symbols);
  r.add("pooling", {"max_pool3d_with_indices_backward"}, max_pool_backward<3>, symbols);
  r.add("pooling", {"max_unpool2d"}, unpool<2>, reals);
  r.add("pooling", {"max_unpool3d"}, unpool<3>, reals);
  r.add("pooling", {"shardtensor::added_at"}, by_space<unpool<2>, unpool<3>>, symbols);
  r.add("pooling", {"shardtensor::picked"}, pick, symbols);
  r.add("pooling", {"shardtensor::picked_by_adaptive_max"}, pick_near<Kind::AdaptiveMax>, symbols);
  r.add("pooling", {"shardtensor::picked_by_fractional_max"}, pick_near<Kind::Fractional>, symbols);
  r.add("pooling", {"shardtensor::picked_by_max"}, pick_near<Kind::Max>, symbols);
}

} // namespace shardtensor::rules
