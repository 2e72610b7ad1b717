// Pooling. Space may be cut for max and average pooling, also adaptive. Other pools read where values say, so they need whole
// planes.
#include "rules/bands.h"
#include "rules/empties.h"
#include "rules/pieces.h"
#include "rules/registry.h"
#include "rules/windows.h"

#include <ATen/ATen.h>

#include <limits>

namespace shardtensor::rules {

namespace {

// Noted where space is cut.
struct Pool {
  int64_t lead;            // dims before space
  std::vector<Taps> taps;  // one per dim of space, as all of these
  std::vector<int64_t> in; // sizes of the input
  std::vector<int64_t> out;

  std::vector<bool> uneven; // windows have several sizes (adaptive, to a size that does not divide); `taps` has the largest

  Reach reads(int64_t i) const {
    return uneven[i] ? Reach{in[i], out[i], 0, in[i] - 1} : taps[i].reach();
  }
  Reach readers(int64_t i) const {
    return uneven[i] ? mirror(reads(i), in[i]) : taps[i].readers();
  }
};

Sizes listed(const Call& call, const char* name) {
  return call.ints(call.position(name));
}

enum class Kind : uint8_t { Max, Average, AdaptiveMax, AdaptiveAverage };
constexpr bool is_adaptive(Kind kind) {
  return kind == Kind::AdaptiveMax || kind == Kind::AdaptiveAverage;
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
  Pool pool{input.dim() - space, {}, {}, {}, {}};
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
    pool.in.push_back(size);
    if constexpr (is_adaptive(kind)) {
      const auto results = made ? made->size(pool.lead + i) : integer_at(output, i);
      if (results < 1 || (kind == Kind::AdaptiveAverage && size % results)) {
        return std::nullopt;
      }
      const auto count = widest(size, results);
      pool.taps.push_back({count, count, 0, 1});
      pool.out.push_back(results);
      pool.uneven.push_back(size % results != 0);
      continue;
    }
    const auto k = integer_at(kernel, i), s = stride.empty() ? k : integer_at(stride, i);
    const Taps taps{k, s, integer_at(padding, i), dilation.empty() ? 1 : integer_at(dilation, i)};
    constexpr auto kMost = std::numeric_limits<int32_t>::max();
    if (k < 1 || k > kMost || s < 1 || s > kMost || taps.dilation < 1 || taps.dilation > kMost || taps.padding < 0 ||
        taps.padding > taps.span() / 2) {
      return std::nullopt;
    }
    auto results = taps.results(size + (up ? s - 1 : 0));
    results -= up && (results - 1) * s >= size + taps.padding; // the last window must begin inside
    if (results < 1) {
      return std::nullopt;
    }
    pool.taps.push_back(taps);
    pool.out.push_back(results);
    pool.uneven.push_back(false);
  }
  return pool;
}

// The input is read through windows.
template <Kind kind>
void cut_forward(const Call& call, Rule& rule, int64_t space, ReduceOp padding, Kernel kernel) {
  const auto& input = call.tensors[0];
  const auto pool = cut_in_space(call, space) ? pool_of<kind>(call, input, nullptr, space) : std::nullopt;
  if (!pool) {
    return;
  }
  auto sizes = input.sym_sizes();
  auto dims = rule.results[0].dims;
  for (int64_t i = 0; i < space; ++i) {
    const auto d = pool->lead + i;
    Factor f;
    f.size = sizes[d] = pool->out[i];
    dims[d] = rule.factor(f);
    rule.operands[0].dims[d] = rule.windows(dims[d].factor, pool->reads(i));
  }
  rule.operands[0].padding = padding;
  for (auto& r : rule.results) {
    r = Result(dims, sizes);
  }
  rule.notes = *pool;
  rule.kernel = kernel;
  rule.always_kernel = true;
}

// (gradient, input, ..., indices perhaps): gradient and indices are read by the reversed windows.
template <Kind kind>
void cut_backward(const Call& call, Rule& rule, int64_t space, Kernel kernel) {
  const auto &grad = call.tensors[0], &input = call.tensors[1];
  const auto pool = cut_in_space(call, space) ? pool_of<kind>(call, input, &grad, space) : std::nullopt;
  if (!pool) {
    return;
  }
  for (int64_t i = 0; i < space; ++i) {
    const auto d = pool->lead + i;
    Factor f;
    f.size = pool->in[i];
    const auto at = rule.factor(f);
    for (auto& o : rule.operands) {
      o.dims[d] = rule.windows(at, pool->readers(i));
    }
    rule.operands[1].dims[d] = at;
    rule.results[0].dims[d] = at;
  }
  rule.notes = *pool;
  rule.kernel = kernel;
  rule.always_kernel = true;
}

// ---- kernels ----

// This rank's results along a dim of space, or its indices of the input in a backward; null if the dim is not cut.
const Interval* run_along(const Run& run, const Pool& pool, int64_t i) {
  return cut_run(run, pool.lead + i);
}

bool makes_nothing(const SymSizes& sizes) {
  return std::any_of(sizes.begin(), sizes.end(), [](const c10::SymInt& n) { return n == 0; });
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

// Max pooling; its results are values, and perhaps indices.
void max_kernel(Run& run) {
  if (!run.solution.halo(0)) {
    return call_op_nonempty(run);
  }
  const auto& pool = noted<Pool>(run.solution);
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
  const auto* halo = run.solution.halo(0);
  if (!halo) {
    return call_op_nonempty(run);
  }
  const auto& pool = noted<Pool>(run.solution);
  const auto grad = run.arg(0).toTensor(), input = run.arg(1).toTensor();
  const auto index = run.arg(argument(run, "indices")).toTensor();
  if (is_empty(input) || is_empty(grad)) {
    return run.returns({at::zeros_like(input)});
  }
  auto at = unraveled(index, pool.in);
  auto inside = at::lt(at[0], pool.in[0]); // torch gives other indices to windows that have no element
  for (size_t i = 0; i < at.size(); ++i) {
    if (const auto* mine = run_along(run, pool, static_cast<int64_t>(i))) {
      at[i] = at::sub(at[i], mine->start);
      const auto here = at::logical_and(at::ge(at[i], 0), at::lt(at[i], mine->length));
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
    run.stack.back() = at::div(run.stack.back().toTensor(), divisor);
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

template <int64_t space>
Rule unpool(const Call& call) {
  auto rule = planes(call, space);
  rule.linear_in({0});
  return rule;
}

// (self, ..., random samples [n, c, space]): n is 1 where self has no batch.
template <int64_t space>
Rule fractional_pool(const Call& call) {
  auto rule = planes(call, space);
  if (call.tensors[1].dim() != 3) {
    return replicate(call); // the op says what is wrong
  }
  const auto& dims = rule.operands[0].dims;
  const bool batched = static_cast<int64_t>(dims.size()) == space + 2;
  rule.operands[1].dims = batched ? Dims{dims[0], dims[1], Dim(kNone)} : Dims{Dim(kNone), dims[0], Dim(kNone)};
  return rule;
}

} // namespace

void register_pooling(Registry& r) {
  const Options symbols{.symbols = true};
  r.add("pooling", {"_adaptive_avg_pool2d"}, average_pool<2, Kind::AdaptiveAverage>, symbols);
  r.add("pooling", {"_adaptive_avg_pool2d_backward"}, average_pool_backward<2, Kind::AdaptiveAverage>, symbols);
  r.add("pooling", {"_adaptive_avg_pool3d"}, average_pool<3, Kind::AdaptiveAverage>, symbols);
  r.add("pooling", {"_adaptive_avg_pool3d_backward"}, average_pool_backward<3, Kind::AdaptiveAverage>, symbols);
  r.add("pooling", {"adaptive_max_pool2d"}, max_pool<2, Kind::AdaptiveMax>, symbols);
  r.add("pooling", {"adaptive_max_pool2d_backward"}, max_pool_backward<2, Kind::AdaptiveMax>, symbols);
  r.add("pooling", {"adaptive_max_pool3d"}, max_pool<3, Kind::AdaptiveMax>, symbols);
  r.add("pooling", {"adaptive_max_pool3d_backward"}, max_pool_backward<3, Kind::AdaptiveMax>, symbols);
  r.add("pooling", {"avg_pool2d"}, average_pool<2>, symbols);
  r.add("pooling", {"avg_pool2d_backward"}, average_pool_backward<2>, symbols);
  r.add("pooling", {"avg_pool3d"}, average_pool<3>, symbols);
  r.add("pooling", {"avg_pool3d_backward"}, average_pool_backward<3>, symbols);
  r.add("pooling", {"fractional_max_pool2d"}, fractional_pool<2>, symbols);
  r.add("pooling", {"fractional_max_pool2d_backward"}, unpool<2>, symbols);
  r.add("pooling", {"fractional_max_pool3d"}, fractional_pool<3>, symbols);
  r.add("pooling", {"fractional_max_pool3d_backward"}, unpool<3>, symbols);
  r.add(
      "pooling", {"max_pool1d"}, max_pool<1>,
      {.way = Way::Whole, .symbols = true}); // torch reads the data pointer if no gradient is needed
  r.add("pooling", {"max_pool2d_with_indices"}, max_pool<2>, symbols);
  r.add("pooling", {"max_pool2d_with_indices_backward"}, max_pool_backward<2>, symbols);
  r.add("pooling", {"max_pool3d_with_indices"}, max_pool<3>, symbols);
  r.add("pooling", {"max_pool3d_with_indices_backward"}, max_pool_backward<3>, symbols);
  r.add("pooling", {"max_unpool2d"}, unpool<2>, symbols);
  r.add("pooling", {"max_unpool3d"}, unpool<3>, symbols);
}

} // namespace shardtensor::rules
