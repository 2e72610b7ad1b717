// Pooling. Space may be cut. Max and average pooling, also adaptive, read halos. So do fractional pools: samples place their
// windows, but never far from evenly spaced windows. max_unpool sends each value to the rank that holds its place.
#include "redistribute/neutral_value.h"
#include "rules/deferred_op.h"
#include "rules/kernel_utils.h"
#include "rules/owner_exchange.h"
#include "rules/pad_empty.h"
#include "rules/registry.h"
#include "rules/separable_filter.h"
#include "rules/windows.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <limits>

namespace shardtensor::rules {

namespace {

// The kernel's data if space is cut.
struct Pool : Windows {
  bool merges = false; // one result along every dim of space that is cut: the ranks compare theirs

  Sizes sizes() const { // of the input
    Sizes out;
    for (const auto& along : space) {
      out.push_back(along.size);
    }
    return out;
  }
};

// Whether windows have several sizes (adaptive, to a size that does not divide). The taps are those of the largest.
bool is_uneven(const Windows::WindowedDim& along) {
  return along.reach.den != 1;
}

enum class PoolKind : uint8_t { Max, Average, AdaptiveMax, AdaptiveAverage, Fractional };
constexpr bool is_adaptive(PoolKind kind) {
  return kind == PoolKind::AdaptiveMax || kind == PoolKind::AdaptiveAverage;
}
constexpr bool is_average(PoolKind kind) {
  return kind == PoolKind::Average || kind == PoolKind::AdaptiveAverage;
}

// What the windows of a fractional pool may hold, whatever the samples. Window o begins near
// o * (size - kernel) / (results - 1): rounding and the sample move it by less than two.
Reach fractional(int64_t size, int64_t kernel, int64_t results) {
  const auto steps = results - 1;
  return steps == 0 ? Reach{1, 1, size - kernel, size - 1}
                    : Reach{size - kernel, steps, -steps, 2 * steps - 1 + (kernel - 1) * steps};
}

// The largest number of indices in an adaptive window.
int64_t widest(const Reach& r, int64_t results) {
  int64_t most = 0;
  for (int64_t o = 0; o < results; ++o) {
    most = std::max(most, r.hi(o) - r.lo(o));
  }
  return most;
}

// The call's windows; nothing if space is not cut, if torch refuses the windows, or if those of an average have several sizes.
// `made`: a tensor with the sizes of the result, in gradients.
template <PoolKind kind>
std::optional<Pool> pool_of(const Call& call, int64_t space, const TensorArg& input, const TensorArg* made = nullptr) {
  if (!cut_in_space(call, space)) {
    return std::nullopt;
  }
  Pool pool;
  pool.lead = input.dim() - space;
  pool.merges = kind == PoolKind::AdaptiveMax;
  const auto given = [&](const char* name) { return argument(call, name) >= 0 ? call.ints(argument(call, name)) : Sizes(); };
  const auto kernel = given("kernel_size"), stride = given("stride"), padding = given("padding"), dilation = given("dilation");
  const auto output = given("output_size");
  const bool up = argument(call, "ceil_mode") >= 0 && call.flag(argument(call, "ceil_mode"));
  const auto divisor = argument(call, "divisor_override");
  TORCH_CHECK(divisor < 0 || !call.has(divisor) || call.integer(divisor) != 0, "divisor must be not zero");
  bool cut = false;
  for (int64_t i = 0; i < space; ++i) {
    const auto size = input.size(pool.lead + i);
    if (size < 1) {
      return std::nullopt;
    }
    Windows::WindowedDim along{size, 0, {}};
    auto& count = along.count;
    auto& reach = along.reach;
    auto& taps = along.taps;
    if constexpr (is_adaptive(kind)) {
      count = made ? made->size(pool.lead + i) : integer_at(output, i);
      if (count < 1 || (kind == PoolKind::AdaptiveAverage && size % count)) {
        return std::nullopt;
      }
      reach = {size, count, 0, size - 1};
      const auto k = widest(reach, count);
      taps = {k, k, 0, 1};
      reach = size % count ? reach : taps.reach();
    } else if constexpr (kind == PoolKind::Fractional) {
      constexpr int64_t kMost = 1 << 20; // beyond, a float's rounding could move a window by more
      const auto k = integer_at(kernel, i);
      count = integer_at(output, i);
      if (k < 1 || count < 1 || count + k - (space == 2) > size || size > kMost) { // as torch refuses
        return std::nullopt;
      }
      taps = {k, k, 0, 1};
      reach = fractional(size, k, count);
    } else {
      const auto k = integer_at(kernel, i), s = stride.empty() ? k : integer_at(stride, i);
      taps = {k, s, integer_at(padding, i), dilation.empty() ? 1 : integer_at(dilation, i)};
      constexpr auto kMost = std::numeric_limits<int32_t>::max();
      if (k < 1 || k > kMost || s < 1 || s > kMost || taps.dilation < 1 || taps.dilation > kMost || taps.padding < 0 ||
          taps.padding > taps.span() / 2) {
        return std::nullopt;
      }
      count = taps.results(size + (up ? s - 1 : 0));
      count -= up && (count - 1) * s >= size + taps.padding; // the last window must begin inside
      if (count < 1) {
        return std::nullopt;
      }
      reach = taps.reach();
    }
    const bool here = input.layout->shards(pool.lead + i);
    cut = cut || here;
    pool.merges = pool.merges && (!here || count == 1);
    pool.space.push_back(along);
  }
  pool.merges = pool.merges && cut;
  return pool;
}

// ---- kernels ----

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

// The indices that windows of different sizes hold, one window after the other. Narrower windows repeat their last index, so that
// torch's kernel for windows of one size finds the same values and the same places.
at::Tensor one_by_one(const Windows::WindowedDim& along, const Interval& windows, const at::Device& device) {
  const auto& reach = along.reach;
  const auto numbers = at::TensorOptions(at::kLong).device(device);
  const auto at = at::arange(windows.start, windows.end(), numbers).unsqueeze(1).mul(reach.num);
  const auto first = at::div(at.add(reach.first), reach.den, "floor"), last = at::div(at.add(reach.last), reach.den, "floor");
  return at::minimum(first.add(at::arange(along.taps.count, numbers)), last).flatten();
}

Sizes plane_of(const at::Tensor& t, int64_t lead) {
  return guarded(t.sym_sizes().slice(lead));
}

// For indices in the whole's planes: their flat indices in a box of the planes (0 if they are outside), and whether they are
// inside.
struct IndicesInBox {
  at::Tensor places, inside;
};

IndicesInBox in_box(const at::Tensor& index, const Pool& pool, c10::ArrayRef<Interval> box) {
  const auto sizes = pool.sizes();
  auto at = unraveled(index, sizes);
  auto inside = at::Tensor();
  Sizes held;
  for (size_t i = 0; i < at.size(); ++i) {
    held.push_back(box[i].length);
    if (i && box[i] == Interval{0, sizes[i]}) {
      continue;
    }
    at[i] = at::sub(at[i], box[i].start);
    const auto here = at::logical_and(at::ge(at[i], 0), at::lt(at[i], held[i])); // torch's index of an empty window is outside
    inside = i ? at::logical_and(inside, here) : here;
  }
  return {at::where(inside, raveled(at, held), 0), inside};
}

// This rank's indices of a tensor's space: a piece of it.
std::vector<Interval> space_of_piece(const KernelRun& run, const Layout& layout, int64_t lead, c10::IntArrayRef sizes) {
  std::vector<Interval> out;
  for (size_t i = 0; i < sizes.size(); ++i) {
    out.push_back(layout.intervals(lead + static_cast<int64_t>(i), sizes[i], run.mesh().coordinate())[0]);
  }
  return out;
}

// One result from each rank's piece, with its index in the whole; then the ranks compare. Among equal values the first wins,
// among NaN the last.
void max_of_all(KernelRun& run, const Pool& pool) {
  const auto& layout = *run.operands[0].layout;
  const auto input = run.arg(0).toTensor();
  const auto sizes = sizes_of_piece(run);
  at::Tensor values, index;
  if (is_empty(input)) {
    values = at::full_symint(sizes, neutral_value(ReduceOp::Max, input.scalar_type()), input.options());
    index = at::full_symint(sizes, std::numeric_limits<int64_t>::max(), input.options().dtype(at::kLong));
  } else {
    const auto results = results_of_op(run);
    values = results[0].toTensor();
    auto at = unraveled(results[1].toTensor(), plane_of(input, pool.lead));
    const auto held = space_of_piece(run, layout, pool.lead, pool.sizes());
    for (size_t i = 0; i < at.size(); ++i) {
      at[i] = at[i].add(held[i].start);
    }
    index = raveled(at, pool.sizes());
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
void max_kernel(KernelRun& run) {
  const auto& pool = kernel_data<Pool>(run.solution);
  const bool indexed = run.op.schema().returns().size() == 2;
  if (pool.merges && run.operands[0].layout->sharded_dims() >> pool.lead && indexed) {
    return max_of_all(run, pool);
  }
  if (!run.solution.halo(0)) {
    return call_op_nonempty(run);
  }
  auto plane = pool.sizes(); // the plane that torch's op gets, which its indices refer to
  std::vector<std::pair<WindowShare, at::Tensor>> cut(plane.size());
  run_windowed(run, pool, [&](int64_t i, const WindowShare& share) {
    auto& [kept, held] = cut[i];
    kept = share;
    plane[i] = share.reads.length();
    if (is_uneven(pool.space[i])) {
      const auto input = run.arg(0).toTensor();
      held = one_by_one(pool.space[i], share.makes, input.device());
      plane[i] = held.numel();
      run.arg(0) = input.index_select(pool.lead + i, held.sub(share.reads.start()));
    }
    return whole_windows(run, pool, i, share);
  });
  if (!indexed) {
    return;
  }
  auto at = unraveled(run.stack.back().toTensor(), plane);
  for (size_t i = 0; i < at.size(); ++i) {
    const auto& [share, held] = cut[i];
    if (held.defined()) {
      at[i] = at::take(held, at[i]);
    } else if (share.cut) {
      at[i] = at::add(at[i], share.reads.start());
      if (share.reads.before) { // if all of a window has the least value, torch returns its first tap; take the first that is not
                                // padding
        at[i] = at::where(at::lt(at[i], 0), at::remainder(at[i], pool.space[i].taps.dilation), at[i]);
      }
    }
  }
  run.stack.back() = raveled(at, pool.sizes());
}

at::Tensor added_at(const at::Tensor& values, const at::Tensor& index, c10::SymIntArrayRef sizes) {
  const auto lead = values.dim() - static_cast<int64_t>(sizes.size());
  auto all = values.sym_sizes().slice(0, lead).vec();
  all.insert(all.end(), sizes.begin(), sizes.end());
  return values.new_zeros_symint(all).flatten(lead).scatter_add(lead, index.flatten(lead), values.flatten(lead)).view_symint(all);
}

// The values at the indices. Only the rule reads the pool's arguments.
template <typename... Arguments>
at::Tensor picked(const at::Tensor& planes, const at::Tensor& index, int64_t space, Arguments...) {
  const auto lead = planes.dim() - space;
  return planes.flatten(lead).gather(lead, index.flatten(lead)).view_symint(index.sym_sizes());
}

// Adds up the gradients at their indices if these are in this rank's piece. torch's kernel would write outside of the piece.
void max_backward_kernel(KernelRun& run) {
  const auto& pool = kernel_data<Pool>(run.solution);
  const auto& layout = *run.solution.results[0].layout;
  if (!(layout.sharded_dims() >> pool.lead)) {
    return call_op_nonempty(run);
  }
  const auto grad = run.arg(0).toTensor(), input = run.arg(1).toTensor();
  if (is_empty(input) || is_empty(grad)) {
    return run.returns({at::zeros_like(input)});
  }
  const auto [places, inside] =
      in_box(run.arg(argument(run, "indices")).toTensor(), pool, space_of_piece(run, layout, pool.lead, pool.sizes()));
  const auto values = at::where(inside, grad, at::zeros({}, grad.options()));
  run.returns({added_at(values, places, input.sym_sizes().slice(pool.lead))});
}

// By how many elements these windows are divided along one dim.
at::Tensor divisors(
    const Windows::WindowedDim& along, const Interval& windows, bool with_padding, const at::TensorOptions& options) {
  const auto& taps = along.taps;
  const auto margin = with_padding ? taps.padding : 0;
  const auto whole_numbers = at::TensorOptions(at::kLong).device(options.device());
  const auto lo = at::arange(windows.start, windows.end(), whole_numbers).mul(taps.stride).sub(taps.padding);
  const auto hi = lo.add(taps.count).clamp_max(along.size + margin);
  // At least one, also for a result that the whole does not have: any number will do there.
  return hi.sub(lo.clamp_min(-margin)).clamp_min(1).to(options.dtype());
}

// Whether each of these windows has all its elements.
bool are_full(const Windows::WindowedDim& along, const Interval& windows, bool with_padding) {
  const auto margin = with_padding ? along.taps.padding : 0;
  const auto cells = along.taps.cells({windows.start, std::max<int64_t>(windows.length, 1)});
  return cells.start >= -margin && cells.end() <= along.size + margin;
}

// The whole's divisors for the windows that this rank makes or reads, as a product of one tensor per dim. Undefined if the op
// itself divides correctly: if every window of the cut dims has all its elements, or if the call gives the divisor.
at::Tensor own_divisor(const KernelRun& run, const Pool& pool, const at::TensorOptions& options) {
  const auto at = argument(run, "divisor_override");
  if (at < 0 || !run.arg(at).isNone()) {
    return {};
  }
  const bool with_padding = run.arg(argument(run, "count_include_pad")).toBool();
  bool full = true;
  at::Tensor out;
  for (int64_t i = 0; i < pool.ndim(); ++i) {
    const auto share = share_of(run, pool, i);
    const auto windows = pool.reversed ? share.read() : share.makes;
    full = full && (!share.cut || are_full(pool.space[i], windows, with_padding));
    std::vector<int64_t> along(pool.ndim(), 1);
    along[i] = windows.length;
    const auto factor = divisors(pool.space[i], windows, with_padding, options).view(along);
    out = out.defined() ? at::mul(out, factor) : factor;
  }
  return full ? at::Tensor() : out;
}

// Average pooling, and its backward: the cells of padding are zeros in the buffer, so the sums are right; the divisors are the
// whole's.
void average_kernel(KernelRun& run) {
  if (!run.solution.halo(0)) {
    return call_op_nonempty(run);
  }
  const auto& pool = kernel_data<Pool>(run.solution);
  const auto divisor = own_divisor(run, pool, run.arg(0).toTensor().options());
  if (divisor.defined()) {
    run.arg(argument(run, "divisor_override")) = 1;
  }
  if (divisor.defined() && pool.reversed) {
    run.arg(0) = at::div(run.arg(0).toTensor(), divisor);
  }
  run_windowed(run, pool, [&](int64_t i, const WindowShare& share) {
    auto native = whole_windows(run, pool, i, share);
    if (pool.reversed) { // the input that these results alone would read; torch's kernel looks at its sizes only
      native.made = pool.space[i].taps.cells(share.read());
      auto sizes = run.arg(1).toTensor().sym_sizes().vec();
      sizes[pool.lead + i] = native.made.length;
      run.arg(1) = run.arg(1).toTensor().new_empty_symint(sizes);
    }
    return native;
  });
  if (divisor.defined() && !pool.reversed) {
    const auto sums = run.stack.back().toTensor();
    run.stack.back() = at::isFloatingType(sums.scalar_type()) ? at::div(sums, divisor) : at::div(sums, divisor, "trunc");
  }
}

// ---- fractional pooling ----

// The first element of each of these windows along a dim, as torch finds them: [planes, windows]. `sample`: one per plane.
at::Tensor fractional_starts(const Windows::WindowedDim& along, const Interval& windows, const at::Tensor& sample) {
  const auto range = along.size - along.taps.count, steps = along.count - 1;
  const auto number = at::arange(windows.start, windows.end(), sample.options());
  const auto scalar = [&](int64_t n) { return at::full({}, n, sample.options()); };
  const auto step = steps ? scalar(range).div(scalar(steps)) : scalar(range);
  const auto at = sample.unsqueeze(1);
  const auto starts = number.add(at).mul(step).to(at::kLong).sub(at.mul(step).to(at::kLong));
  return at::where(number.eq(steps), range, starts);
}

// Copies the windows one after the other, so that torch's kernel for evenly spaced windows finds the values and their places.
void fractional_kernel(KernelRun& run) {
  if (!run.solution.halo(0)) {
    return call_op_nonempty(run);
  }
  const auto& pool = kernel_data<Pool>(run.solution);
  const auto sizes = sizes_of_piece(run);
  const auto input = run.arg(0).toTensor();
  if (has_no_elements(sizes)) {
    return run.returns({input.new_zeros_symint(sizes), at::zeros_symint(sizes, input.options().dtype(at::kLong))});
  }
  const auto space = pool.ndim();
  const auto samples = run.arg(argument(run, "random_samples")).toTensor().reshape({-1, space});
  auto x = input.dim() == space ? input.unsqueeze(0) : input.flatten(0, pool.lead - 1);
  std::vector<at::Tensor> held(space);
  std::vector<int64_t> windows;
  for (int64_t i = 0; i < space; ++i) {
    const auto share = share_of(run, pool, i);
    const auto starts = fractional_starts(pool.space[i], share.makes, samples.select(1, space == 2 ? 1 - i : i));
    windows.push_back(pool.space[i].taps.count);
    held[i] = starts.unsqueeze(2).add(at::arange(windows[i], starts.options())).flatten(1);
    auto shape = guarded(x.sym_sizes());
    shape[1 + i] = held[i].size(1);
    std::vector<int64_t> along(x.dim(), 1);
    along[0] = held[i].size(0);
    along[1 + i] = held[i].size(1);
    x = x.gather(1 + i, held[i].sub(share.reads.inside.start).view(along).expand(shape));
  }
  const auto plane = x.sizes().slice(1).vec();
  auto [values, index] = space == 2 ? at::max_pool2d_with_indices(x, windows) : at::max_pool3d_with_indices(x, windows);
  auto at = unraveled(index, plane);
  for (int64_t i = 0; i < space; ++i) {
    at[i] = held[i].gather(1, at[i].flatten(1)).view(index.sizes());
  }
  run.returns({values.reshape_symint(sizes), raveled(at, pool.sizes()).reshape_symint(sizes)});
}

// ---- rules ----

at::Tensor average_combs(const KernelRun& run, const at::Tensor& input, c10::IntArrayRef out, int64_t) {
  std::vector<c10::IValue> stack{input, c10::List<int64_t>(out)};
  forward_op(run).callBoxed(&stack);
  return stack[0].toTensor();
}

// Adaptive average pooling to sizes that do not divide. Not if torch refuses the call.
void average_by_weights(Rule& rule, const TensorArg& input, c10::IntArrayRef out, int64_t space, bool backward) {
  SeparableFilter filter;
  filter.lead = input.dim() - space;
  filter.reversed = filter.backward = backward;
  filter.op = average_combs;
  if (filter.lead < 1 || !c10::isFloatingType(input.dtype)) {
    return;
  }
  for (int64_t i = 0; i < space; ++i) {
    const auto size = input.size(filter.lead + i), count = integer_at(out, i);
    if (size < 1 || count < 1) {
      return;
    }
    filter.space.push_back({size, count, {size, count, 0, size - 1}});
  }
  add_separable_filter(rule, input.sym_sizes(), std::move(filter));
  if (backward) {
    rule.operands[1].free = true; // only its sizes are read
  }
}

// Where an adaptive maximum has one result along all cut dims of space: each rank has its piece of the input and all results.
void merge_pieces(Rule& rule, const TensorArg& input, const Pool& pool) {
  auto& result = rule.results[0];
  result.sizes = pool.backward ? SymSizes() : input.sym_sizes();
  for (int64_t i = 0; i < pool.ndim(); ++i) {
    const auto d = pool.lead + i;
    const auto& along = pool.space[i];
    const auto piece = input.layout->shards(d) ? Dim(rule.factor({.size = along.size})) : Dim(kNone);
    (pool.backward ? result.dims : rule.operands[0].dims)[d] = piece;
    if (!pool.backward) {
      result.sizes[d] = along.count;
    }
  }
  if (pool.backward) {
    rule.operands[1].dims = result.dims;
  }
}

// (input, ...), or of a backward (gradient, input, ..., indices perhaps).
template <PoolKind kind, bool backward>
Rule pool(const Call& call) {
  const auto space = space_of(call.schema);
  auto rule = planes(call, space);
  if (is_average(kind) || backward) {
    rule.linear_in({0});
  }
  const auto &first = call.tensors[0], &input = call.tensors[backward];
  auto pool = pool_of<kind>(call, space, input, backward ? &first : nullptr);
  if (!pool) {
    if (kind == PoolKind::AdaptiveAverage && cut_in_space(call, space)) {
      const auto out = backward ? Sizes(first.sizes().slice(first.dim() - space)) : call.ints(call.position("output_size"));
      average_by_weights(rule, input, out, space, backward);
    }
    return rule;
  }
  pool->reversed = pool->backward = backward;
  pool->merges ? merge_pieces(rule, input, *pool) : read_through(rule, *pool, input.sym_sizes());
  for (auto& operand : rule.operands) {
    const auto beyond = is_average(kind) || backward ? ReduceOp::Sum : ReduceOp::Max;
    operand.padding = kind == PoolKind::Fractional ? std::nullopt : std::optional(beyond);
  }
  if (!backward) {
    rule.results.back() = rule.results[0]; // indices
  }
  rule.kernel_data = *pool;
  rule.always(
      is_average(kind)               ? average_kernel
      : backward                     ? max_backward_kernel
      : kind == PoolKind::Fractional ? fractional_kernel
                                     : max_kernel);
  return rule;
}

// (self, ..., random samples [n, c, space]): n is 1 where self has no batch.
Rule fractional_pool(const Call& call) {
  const auto space = space_of(call.schema);
  const auto &input = call.tensors[0], &samples = call.tensors[1];
  if (samples.dim() != 3) {
    return replicate(call); // the op says what is wrong
  }
  const bool batched = input.dim() == space + 2;
  const bool windows = cut_in_space(call, space) && (input.dtype == at::kFloat || input.dtype == at::kDouble) &&
                       samples.dtype == input.dtype && samples.size(0) == (batched ? input.size(0) : 1) &&
                       samples.size(1) == input.size(batched) && samples.size(2) == space;
  auto rule = windows ? pool<PoolKind::Fractional, false>(call) : planes(call, space);
  const auto& dims = rule.operands[0].dims;
  rule.operands[1].dims = batched ? Dims{dims[0], dims[1], Dim(kNone)} : Dims{Dim(kNone), dims[0], Dim(kNone)};
  return rule;
}

Rule fractional_pool_backward(const Call& call) {
  const bool exact = call.tensors[0].dtype == at::kFloat || call.tensors[0].dtype == at::kDouble;
  return exact ? pool<PoolKind::Fractional, true>(call) : linear(planes(call, space_of(call.schema)), {0});
}

// ---- max_unpool: each value goes to the place in the whole's plane that its index names ----

// The kernel's data if space is cut.
struct PlaneSizes {
  int64_t lead; // dims before space
  Sizes sizes;  // of a plane
};

bool cuts_space(const Layout& layout, const PlaneSizes& plane) {
  return layout.sharded_dims() >> plane.lead;
}

// Index of the plane that each item of a piece belongs to, among all planes of the piece.
at::Tensor plane_numbers(const at::Tensor& index, int64_t lead) {
  const auto planes = c10::multiply_integers(index.sizes().slice(0, lead)),
             each = c10::multiply_integers(index.sizes().slice(lead));
  return at::arange(planes, index.options()).unsqueeze(1).expand({planes, each}).flatten();
}

// Items at indices of the whole's planes, and the ranks that own those places.
struct OwnedItems {
  OwnerExchange routed;
  at::Tensor here; // for the items that this rank owns, in the order of arrival: their flat index in its piece
};

// `piece`: the sizes of this rank's planes.
OwnedItems at_owners(const KernelRun& run, const Layout& layout, const at::Tensor& index, c10::IntArrayRef piece) {
  const auto& plane = kernel_data<PlaneSizes>(run.solution);
  const auto at = index.flatten();
  OwnerExchange routed(layout, plane.lead, plane.sizes, unraveled(at, plane.sizes));
  const auto count = c10::multiply_integers(plane.sizes);
  const auto places = routed.there(plane_numbers(index, plane.lead).mul(count).add(at));
  auto split = unraveled(at::remainder(places, count), plane.sizes);
  const auto held = space_of_piece(run, layout, plane.lead, plane.sizes);
  for (size_t i = 0; i < split.size(); ++i) {
    split[i] = split[i].sub(held[i].start);
  }
  piece = piece.slice(plane.lead);
  return {std::move(routed), at::div(places, count, "floor").mul(c10::multiply_integers(piece)).add(raveled(split, piece))};
}

// For max_unpool, and for the gradient of picked(), which adds up values with one index.
void unpool_kernel(KernelRun& run) {
  const auto& plane = kernel_data<PlaneSizes>(run.solution);
  const bool adds = run.op.schema().name() == "shardtensor::added_at";
  const auto values = run.arg(0).toTensor(), index = run.arg(1).toTensor();
  const auto& layout = *run.solution.results[0].layout;
  if (!cuts_space(layout, plane)) {
    return call_op_nonempty(run);
  }
  if (!may_ask_values(values)) {
    return defer_call(run, {sizes_of_piece(run)});
  }
  auto out = values.new_zeros(guarded(sizes_of_piece(run)));
  const auto owned = at_owners(run, layout, index, out.sizes());
  const auto arrived = owned.routed.there(values.flatten());
  auto flat = out.view(-1);
  adds ? flat.scatter_add_(0, owned.here, arrived) : flat.scatter_(0, owned.here, arrived);
  run.returns({out});
}

// The values at the indices; in the backward of max_unpool, the gradients.
void pick_kernel(KernelRun& run) {
  const auto& plane = kernel_data<PlaneSizes>(run.solution);
  const auto planes = run.arg(0).toTensor(), index = run.arg(1).toTensor();
  const auto& held = *run.operands[0].layout;
  if (!cuts_space(held, plane)) {
    return call_op_nonempty(run);
  }
  if (!may_ask_values(planes)) {
    return defer_call(run, {SymSizes(index.sym_sizes().begin(), index.sym_sizes().end())});
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
Rule unpool(const Call& call) {
  const auto named = space_of(call.schema); // of our own op the sizes say it
  const auto space = named ? named : static_cast<int64_t>(call.ints(2).size());
  auto rule = planes(call, space);
  rule.linear_in({0});
  const auto &values = call.tensors[0], &index = call.tensors[1];
  const auto lead = values.dim() - space;
  if (!cut_in_space(call, space) || values.layout != index.layout || index.dtype != at::kLong || lead < 1 ||
      values.dim() != index.dim() || values.sizes() != index.sizes()) {
    return rule;
  }
  const auto sizes = call.ints(2), strides = call.schema.arguments().size() > 3 ? call.ints(3) : Sizes();
  if (static_cast<int64_t>(sizes.size()) != space || any_below_one(sizes) || any_below_one(strides) ||
      any_below_one(values.sizes().slice(lead - 1))) {
    return rule;
  }
  auto& result = rule.results[0];
  in_proportion(rule, {0, 1}, result.dims, values, lead, sizes);
  result.sizes = values.sym_sizes();
  std::copy(sizes.begin(), sizes.end(), result.sizes.begin() + lead);
  rule.kernel_data = PlaneSizes{lead, sizes};
  rule.always(unpool_kernel);
  return rule;
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
  rule.kernel_data = PlaneSizes{lead, sizes};
  rule.always(pick_kernel);
  return rule;
}

// ---- the values at the indices that a max pool gave, each within the window of its result: gradients of its gradient ----

// The values at indices in this rank's part of the planes, halo included. An index outside of it belongs to another rank's
// summand, or to a window without elements.
void pick_near_kernel(KernelRun& run) {
  if (!run.solution.kernel_data.has_value()) {
    return call_op_nonempty(run);
  }
  const auto& pool = kernel_data<Pool>(run.solution);
  const auto planes = run.arg(0).toTensor(), index = run.arg(1).toTensor();
  if (is_empty(planes) || is_empty(index)) {
    return run.returns({planes.new_zeros_symint(index.sym_sizes())});
  }
  auto box = space_of_piece(run, *run.operands[0].layout, pool.lead, pool.sizes());
  for (int64_t i = 0; i < pool.ndim() && run.solution.halo(0); ++i) {
    const auto& read = run.solution.halo(0)->fetch.mine()[pool.lead + i];
    box[i] = {read.start(), read.length()};
  }
  const auto [places, inside] = in_box(index, pool, box);
  const auto values = picked(planes, places, pool.ndim());
  run.returns({at::where(inside, values, at::zeros({}, values.options()))});
}

// (planes, indices, dims of space, the pool's arguments)
template <PoolKind kind>
Rule pick_near(const Call& call) {
  const auto space = call.integer(2);
  auto rule = planes(call, space);
  rule.linear_in({0});
  rule.always(pick_near_kernel);
  const auto &read = call.tensors[0], &index = call.tensors[1];
  const auto pool = pool_of<kind>(call, space, read, &index);
  if (!pool) {
    return rule;
  }
  for (int64_t i = 0; i < space; ++i) {
    const auto d = pool->lead + i;
    auto &from = rule.operands[0].dims[d], &at = rule.operands[1].dims[d];
    if (pool->merges) { // each rank picks of its piece; one of them has the value
      at = Dim(kNone);
      from = read.layout->shards(d) ? Dim(rule.reduced(ReduceOp::Sum)) : Dim(kNone);
      continue;
    }
    at = rule.factor({.size = pool->space[i].count});
    from = rule.windows(at.factor, pool->space[i].reach);
  }
  rule.operands[0].padding = std::nullopt;
  rule.results = {Result(rule.operands[1].dims, index.sym_sizes())};
  rule.kernel_data = *pool;
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
  const Options backward{.autograd = formulas::through_windows, .symbols = true};
  r.add("pooling", {"_adaptive_avg_pool2d", "_adaptive_avg_pool3d"}, pool<PoolKind::AdaptiveAverage, false>, symbols);
  r.add(
      "pooling", {"_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"}, pool<PoolKind::AdaptiveAverage, true>,
      backward);
  r.add("pooling", {"adaptive_max_pool2d", "adaptive_max_pool3d"}, pool<PoolKind::AdaptiveMax, false>, reals);
  r.add("pooling", {"adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward"}, pool<PoolKind::AdaptiveMax, true>, backward);
  r.add("pooling", {"avg_pool2d", "avg_pool3d"}, pool<PoolKind::Average, false>, symbols);
  r.add("pooling", {"avg_pool2d_backward", "avg_pool3d_backward"}, pool<PoolKind::Average, true>, backward);
  r.add("pooling", {"fractional_max_pool2d", "fractional_max_pool3d"}, fractional_pool, reals);
  r.add("pooling", {"fractional_max_pool2d_backward", "fractional_max_pool3d_backward"}, fractional_pool_backward, backward);
  r.add(
      "pooling", {"max_pool1d"}, pool<PoolKind::Max, false>,
      {.autograd = formulas::max_pool1d, .symbols = true}); // torch reads the data pointer if no gradient is needed
  r.add("pooling", {"max_pool2d_with_indices", "max_pool3d_with_indices"}, pool<PoolKind::Max, false>, symbols);
  r.add("pooling", {"max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward"}, pool<PoolKind::Max, true>, backward);
  r.add("pooling", {"max_unpool2d"}, unpool, {.autograd = formulas::max_unpool2d, .symbols = true, .takes = kReals});
  r.add("pooling", {"max_unpool3d"}, unpool, {.autograd = formulas::max_unpool3d, .symbols = true, .takes = kReals});
  r.add("pooling", {"shardtensor::added_at"}, unpool, symbols);
  r.add("pooling", {"shardtensor::picked"}, pick, symbols);
  r.add("pooling", {"shardtensor::picked_by_adaptive_max"}, pick_near<PoolKind::AdaptiveMax>, symbols);
  r.add("pooling", {"shardtensor::picked_by_fractional_max"}, pick_near<PoolKind::Fractional>, symbols);
  r.add("pooling", {"shardtensor::picked_by_max"}, pick_near<PoolKind::Max>, symbols);
}

} // namespace shardtensor::rules
