// Resampling: interpolation, pixel shuffles.
#include "rules/kernel_utils.h"
#include "rules/pad_empty.h"
#include "rules/registry.h"
#include "rules/separable_filter.h"
#include "rules/solution.h"
#include "rules/windows.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cmath>
#include <numeric>

namespace shardtensor::rules {

namespace {

// ---- interpolation: space may be cut if a size is an exact multiple of the ratio's terms ----

enum class Interpolation : uint8_t { Nearest, Linear, Cubic };

// Along one dim: `from` elements per `to` results, without a common factor.
struct Ratio {
  int64_t from, to;

  // The run that a result reads; torch clamps indices beyond the edges.
  Reach reach(Interpolation kind) const {
    if (kind == Interpolation::Nearest) {
      return {from, to, 0, from - 1}; // one of them
    }
    const auto wide = kind == Interpolation::Cubic ? 3 * to : to;
    return {2 * from, 2 * to, from - wide, from + wide};
  }
};

Ratio ratio_of(const Windows::WindowedDim& along) {
  const auto common = std::gcd(along.size, along.count);
  return {along.size / common, along.count / common};
}

// The kernel's data if space is cut and the ratio of the sizes places the results.
struct ResampledSpace : Windows {
  Interpolation kind = Interpolation::Nearest;
};

// The numbers that a call has after its lists of sizes: one scale per dim of space.
int64_t first_scale(const c10::FunctionSchema& schema, int64_t space) {
  return static_cast<int64_t>(schema.arguments().size()) - space;
}

// Sizes of space, without what is read; nothing if space is not cut, or if torch refuses the call.
std::optional<Windows> windows_of(const Call& call, bool backward) {
  const auto space = space_of(call.schema);
  const auto& t = call.tensors[0];
  if (!cut_in_space(call, space)) {
    return std::nullopt;
  }
  const auto other = call.ints(call.position(backward ? "input_size" : "output_size"));
  const auto sizes = t.sizes();
  Windows windows;
  windows.lead = t.dim() - space;
  windows.reversed = backward;
  const auto first = backward ? windows.lead : 0; // of space, in the list
  if (static_cast<int64_t>(other.size()) != first + space) {
    return std::nullopt;
  }
  for (int64_t i = 0; i < space; ++i) {
    const auto given = sizes[windows.lead + i], made = other[first + i];
    const auto& scale = call.arg(first_scale(call.schema, space) + i);
    if (given < 1 || made < 1 || !(scale.isDouble() || scale.isNone())) {
      return std::nullopt;
    }
    windows.space.push_back({backward ? made : given, backward ? given : made, {}});
  }
  return windows;
}

// Nearest picks the same element on a piece as on the whole only if each element makes a whole number of results. For larger
// numbers torch's rounding has not been tested.
bool repeats(const Ratio& r) {
  constexpr int64_t kMost = 16;
  return r.from == 1 && r.to <= kMost;
}

// The same if it picks one of a whole number of elements.
bool picks(const Ratio& r) {
  constexpr int64_t kMost = 16;
  return r.to == 1 && r.from <= kMost;
}

// Slices begin at a multiple of ratio.from, because positions there are those of the whole minus a whole number. So a rank may
// read a few more elements in front.
Reach from_such_a_place(const Ratio& ratio, Interpolation kind) {
  auto r = ratio.reach(kind);
  const auto more = kind == Interpolation::Nearest                   ? 0
                    : kind == Interpolation::Linear && ratio.to == 1 ? (ratio.from - 1) / 2
                                                                     : ratio.from - 1;
  r.first -= r.den * more;
  return r;
}

void resample_kernel(KernelRun& run);
void backward_of_planes(KernelRun& run);

// Whether the positions in a piece are those in the whole: not with aligned corners, a scale that is not the ratio of the sizes,
// or a nearest element that depends on rounding.
bool fits(const Call& call, const Windows& windows, Interpolation kind) {
  if (kind != Interpolation::Nearest && call.flag(call.position("align_corners"))) {
    return false;
  }
  for (int64_t i = 0; i < windows.ndim(); ++i) {
    const auto& along = windows.space[i];
    const auto ratio = ratio_of(along);
    const auto& scale = call.arg(first_scale(call.schema, windows.ndim()) + i);
    const bool cut = call.tensors[0].layout->shards(windows.lead + i);
    if ((scale.isDouble() && scale.toDouble() * static_cast<double>(along.size) != static_cast<double>(along.count)) ||
        (kind == Interpolation::Nearest && cut && !repeats(ratio) && !picks(ratio))) {
      return false;
    }
  }
  return true;
}

// ---- by weights: any ratio ----

// How a result is made along each dim.
struct ResamplingFilter {
  double radius; // in elements, around a result's position; if antialiased and there are fewer results, in units of a result
  bool antialiased;
  enum class Position : uint8_t { Middle, Start } position; // Start: of `nearest`
};

// The run that a result reads. Positions are computed in floats, so there is a margin.
Reach reach_of(const ResamplingFilter& s, int64_t in, int64_t out, bool aligned, const c10::IValue& scale) {
  if (in == 1 || (aligned && out == 1)) {
    return {1, out + 1, 0, 0}; // the first element
  }
  constexpr int64_t kFine = 1 << 20;
  const bool by_scale = !aligned && scale.isDouble() && scale.toDouble() > 0;
  const auto num = aligned ? in - 1 : by_scale ? std::max<int64_t>(std::llround(kFine / scale.toDouble()), 1) : in;
  const auto den = aligned ? out - 1 : by_scale ? kFine : out;
  const auto unit = 2 * den; // the position is (2 * num * o + start) / unit
  const auto margin = s.antialiased && aligned ? unit : std::max<int64_t>(unit / 16, 1);
  if (s.antialiased) {
    const auto radius = static_cast<int64_t>(2 * s.radius) * std::max(num, den);
    return {2 * num, unit, num - radius + den - margin, num + radius - den + margin};
  }
  const auto start = s.position == ResamplingFilter::Position::Start ? 0 : aligned ? 0 : num - den;
  const auto radius = static_cast<int64_t>(s.radius) * unit;
  return {2 * num, unit, start - radius + unit - margin, start + radius + margin};
}

// The call's scale of one dim only.
void push_scales(const KernelRun& run, std::vector<c10::IValue>& stack, int64_t space, int64_t along) {
  for (int64_t i = 0; i < space; ++i) {
    stack.push_back(i == along ? run.arg(first_scale(run.op.schema(), space) + i) : c10::IValue());
  }
}

at::Tensor resample_combs(const KernelRun& run, const at::Tensor& input, c10::IntArrayRef out, int64_t along) {
  const auto op = forward_op(run);
  const auto space = static_cast<int64_t>(out.size());
  std::vector<c10::IValue> stack{input, c10::List<int64_t>(out)};
  const auto aligned = argument(run, "align_corners");
  if (aligned >= 0) {
    stack.push_back(run.arg(aligned));
  }
  push_scales(run, stack, space, along);
  op.callBoxed(&stack);
  return stack[0].toTensor();
}

// The other dims have one element and two results: with one result torch would copy.
at::Tensor counts_of_nearest(
    const KernelRun& run, const SeparableFilter& filter, int64_t along, const at::TensorOptions& options) {
  const auto space = filter.ndim();
  std::vector<int64_t> in(filter.lead + space, 1), out = in;
  std::fill(out.begin() + filter.lead, out.end(), 2);
  in[filter.lead + along] = filter.space[along].size;
  out[filter.lead + along] = filter.space[along].count;
  std::vector<c10::IValue> stack{
      at::ones(out, options), c10::List<int64_t>(c10::IntArrayRef(out).slice(filter.lead)),
      c10::List<int64_t>(c10::IntArrayRef(in))};
  push_scales(run, stack, space, along);
  c10::Dispatcher::singleton().findSchemaOrThrow(run.op.schema().name().c_str(), "").callBoxed(&stack);
  return stack[0].toTensor().flatten().div(static_cast<double>(int64_t{1} << (space - 1)));
}

ResamplingFilter sampling_of(const Call& call, Interpolation kind) {
  using Position = ResamplingFilter::Position;
  if (kind == Interpolation::Nearest) { // picks one of the elements around a position
    const bool exact = call.schema.name().find("exact") != std::string::npos;
    return {2, false, exact ? Position::Middle : Position::Start};
  }
  return {kind == Interpolation::Linear ? 1.0 : 2.0, false, Position::Middle};
}

// Not if nothing is resampled, or if numbers are no floats.
void cut_by_weights(const Call& call, Rule& rule, const Windows& windows, const ResamplingFilter& s, bool by_counts = false) {
  const auto aligned = argument(call, "align_corners");
  const bool align = aligned >= 0 && call.flag(aligned);
  SeparableFilter filter{windows, resample_combs, by_counts ? counts_of_nearest : nullptr};
  bool any = false;
  for (int64_t i = 0; i < filter.ndim(); ++i) {
    auto& [size, count, reach, taps] = filter.space[i];
    reach = reach_of(s, size, count, align, call.arg(first_scale(call.schema, filter.ndim()) + i));
    any = any || size != count;
  }
  if (any && filter.lead >= 1 && c10::isFloatingType(call.tensors[0].dtype)) {
    add_separable_filter(rule, call.tensors[0].sym_sizes(), std::move(filter));
  }
}

// If each element makes a whole number of results, operand and result are cut alike; otherwise the operand is read through
// windows.
void cut_by_ratio(const Call& call, Rule& rule, const Windows& windows, Interpolation kind) {
  ResampledSpace made{windows, kind};
  const bool back = made.reversed;
  rule.results[0].sizes = call.tensors[0].sym_sizes();
  for (int64_t i = 0; i < made.ndim(); ++i) {
    const auto d = made.lead + i;
    auto& [size, count, reach, taps] = made.space[i];
    const auto ratio = ratio_of(made.space[i]);
    reach = back ? ratio.reach(kind) : from_such_a_place(ratio, kind);
    rule.results[0].sizes[d] = back ? size : count;
    const auto at = rule.factor(); // factor d is dim d, used or not
    if (kind == Interpolation::Nearest && repeats(ratio)) {
      auto &from = rule.operands[0].dims[d], &to = rule.results[0].dims[d];
      from = Dim(at, back ? ratio.to : 1);
      to = Dim(at, back ? 1 : ratio.to);
    } else if (kind != Interpolation::Nearest || picks(ratio)) {
      read_through(rule, d, back ? size : count, back ? mirror(reach, size) : reach);
    }
  }
  rule.operands[0].padding = std::nullopt;
  rule.kernel_data = std::move(made);
  rule.always(resample_kernel);
}

// The rule where space is not cut. torch's words: a kernel on a piece would not see that the whole has no channels.
Rule resampled_planes(const Call& call, bool backward) {
  const auto space = space_of(call.schema);
  const auto& t = call.tensors[0];
  TORCH_CHECK(
      backward || !cut_in_space(call, space) || t.dim() != space + 2 || t.size(1), "Non-empty ", t.dim(),
      "D data tensor expected but got a tensor with sizes ", t.sizes());
  auto rule = linear(planes(call, space), {0});
  if (backward) {
    rule.always(backward_of_planes);
  }
  return rule;
}

template <Interpolation kind, bool backward>
Rule resample(const Call& call) {
  auto rule = resampled_planes(call, backward);
  if (const auto windows = windows_of(call, backward)) {
    if (fits(call, *windows, kind)) {
      cut_by_ratio(call, rule, *windows, kind);
    } else { // torch's backward of a position between two elements may name another one than its forward
      cut_by_weights(call, rule, *windows, sampling_of(call, kind), backward && kind == Interpolation::Nearest);
    }
  }
  return rule;
}

// radius: 1 linear, 2 cubic, 3 lanczos
template <int radius, bool backward>
Rule antialiased(const Call& call) {
  auto rule = resampled_planes(call, backward);
  if (const auto windows = windows_of(call, backward)) {
    cut_by_weights(call, rule, *windows, {radius, true, ResamplingFilter::Position::Middle});
  }
  return rule;
}

// ---- kernels ----

// Replaces element d of argument `name`, a list of sizes.
void replace_size(const KernelRun& run, const char* name, int64_t d, const c10::SymInt& size) {
  auto& arg = run.arg(argument(run, name));
  auto all = arg.toSymIntVector();
  all[d] = size;
  arg = c10::SymIntArrayRef(all);
}

// If the numbers of results and elements are equal, torch copies, whatever the scale. So one more result is requested, and
// dropped.
int64_t not_a_copy(int64_t results, int64_t elements, const Windows::WindowedDim& along) {
  return results == elements && along.size != along.count ? results + 1 : results;
}

// Argument `input_size` lists the global sizes of the gradient; the call gets those of this rank's piece.
void replace_lead_sizes(const KernelRun& run, int64_t lead) {
  const auto grad = run.arg(0).toTensor();
  for (int64_t d = 0; d < lead; ++d) {
    const auto n = grad.sym_size(d);
    replace_size(run, "input_size", d, n == 0 && run.operands[0].symbols[d] != 0 ? c10::SymInt(1) : n); // see call_op_nonempty()
  }
}

void backward_of_planes(KernelRun& run) {
  replace_lead_sizes(run, 2);
  call_op_nonempty(run);
}

// What torch's op gets along a dim. It must not take the ratio from the sizes of a slice.
NativeIntervals resampled_slice(const KernelRun& run, const ResampledSpace& made, int64_t i, const WindowShare& share) {
  const auto& along = made.space[i];
  const auto ratio = ratio_of(along);
  const auto &read = share.reads.inside, &mine = share.makes;
  const auto read_end = read.end(), mine_end = mine.start + mine.length;
  run.arg(first_scale(run.op.schema(), made.ndim()) + i) = static_cast<double>(ratio.to) / static_cast<double>(ratio.from);
  if (!made.reversed) {
    const auto begin = ceil_div(read.start, ratio.from) * ratio.from;
    const auto result = begin / ratio.from * ratio.to; // the result at the slice's first element
    const auto count = not_a_copy(mine_end - result, read_end - begin, along);
    replace_size(run, "output_size", i, count);
    return {{begin, read_end - begin}, {result, count}};
  }
  const auto begin = std::min(mine.start, std::max<int64_t>(0, along.reach.lo(read.start))) / ratio.from * ratio.from;
  const auto result = begin / ratio.from * ratio.to;
  const auto length = std::max(mine_end, std::min(along.size, along.reach.hi(read_end - 1))) - begin;
  const auto count = not_a_copy(read_end - result, length, along);
  replace_size(run, "output_size", i, count);
  replace_size(run, "input_size", made.lead + i, length); // of the slice that these gradients belong to
  return {{result, count}, {begin, length}};
}

void resample_kernel(KernelRun& run) {
  const auto& made = kernel_data<ResampledSpace>(run.solution);
  const auto sizes = guarded(sizes_of_piece(run)), given = guarded(run.arg(0).toTensor().sym_sizes());
  for (int64_t i = 0; i < made.ndim(); ++i) { // also dims without windows, where each element makes a number of results
    const auto d = made.lead + i;
    replace_size(run, "output_size", i, std::max<int64_t>(made.reversed ? given[d] : sizes[d], 1));
    if (made.reversed) {
      replace_size(run, "input_size", d, std::max<int64_t>(sizes[d], 1));
    }
  }
  if (made.reversed) {
    replace_lead_sizes(run, made.lead);
  }
  run_windowed(run, made, [&](int64_t i, const WindowShare& share) { return resampled_slice(run, made, i, share); });
}

// ---- pixels ----

// torch's pixel_unshuffle returns an empty tensor with its old shape, but the whole has elements.
void pixel_unshuffle_kernel(KernelRun& run) {
  const auto x = run.arg(0).toTensor();
  if (x.numel()) {
    return run.call_op();
  }
  const auto r = run.arg(1).toInt();
  auto sizes = x.sizes().vec();
  const auto n = sizes.size();
  sizes[n - 3] *= r * r;
  sizes[n - 2] /= r;
  sizes[n - 1] /= r;
  run.returns({at::empty(sizes, x.options())});
}

// [..., c * r * r, h, w] and [..., c, h * r, w * r], in either direction.
template <bool shuffle>
Rule pixel_shuffle(const Call& call) {
  Rule rule;
  const auto r = call.integer(1);
  const auto& x = call.tensors[0];
  const auto n = x.dim();
  const auto* name = shuffle ? "pixel_shuffle" : "pixel_unshuffle";
  TORCH_CHECK(n >= 3, name, " expects input to have at least 3 dimensions, but got input with ", n, " dimension(s)");
  TORCH_CHECK(r > 0, name, " expects a positive ", shuffle ? "upscale" : "downscale", "_factor, but got ", r);
  Dims packed, spread;
  for (int64_t d = 0; d < n; ++d) {
    const auto f = rule.factor();
    packed.emplace_back(f, d == n - 3 ? r * r : 1);
    spread.emplace_back(f, d >= n - 2 ? r : 1);
  }
  rule.operands.emplace_back(shuffle ? packed : spread);
  rule.results.emplace_back(shuffle ? spread : packed);
  for (int64_t d = 0; d < n; ++d) {
    const auto inner = rule.operands[0].dims[d].inner.guard_int(__FILE__, __LINE__);
    TORCH_CHECK(
        x.size(d) % inner == 0, name, " expects dim ", d - n, " of its input, of size ", x.size(d), ", to be divisible by ",
        inner);
    rule.results[0].sizes.push_back(x.size(d) / inner * rule.results[0].dims[d].inner);
  }
  rule.passes_partial();
  const auto sizes = x.sizes();
  if (!shuffle && std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) {
    rule.operands[0].dims = fresh_dims(rule, n);
    rule.results[0] = {rule.operands[0].dims};
    rule.always([](KernelRun& run) { run.returns({run.arg(0).toTensor().clone()}); });
  } else if (!shuffle) {
    rule.always(pixel_unshuffle_kernel);
  }
  return rule;
}

} // namespace

void register_resampling(Registry& r) {
  const Options symbols{.symbols = true};
  r.add("resampling", {"pixel_shuffle"}, pixel_shuffle<true>);
  r.add("resampling", {"pixel_unshuffle"}, pixel_shuffle<false>);
  r.add("resampling", {"_upsample_bicubic2d_aa"}, antialiased<2, false>, symbols);
  r.add("resampling", {"_upsample_bicubic2d_aa_backward"}, antialiased<2, true>, symbols);
  r.add("resampling", {"_upsample_bilinear2d_aa"}, antialiased<1, false>, symbols);
  r.add("resampling", {"_upsample_bilinear2d_aa_backward"}, antialiased<1, true>, symbols);
  r.add("resampling", {"_upsample_lanczos2d_aa"}, antialiased<3, false>, symbols);
  r.add("resampling", {"_upsample_lanczos2d_aa_backward"}, antialiased<3, true>, symbols);
  r.add(
      "resampling",
      {"_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_nearest1d",
       "upsample_nearest2d", "upsample_nearest3d"},
      resample<Interpolation::Nearest, false>, symbols);
  r.add(
      "resampling",
      {"_upsample_nearest_exact1d_backward", "_upsample_nearest_exact2d_backward", "_upsample_nearest_exact3d_backward",
       "upsample_nearest1d_backward", "upsample_nearest2d_backward", "upsample_nearest3d_backward"},
      resample<Interpolation::Nearest, true>, symbols);
  r.add("resampling", {"upsample_bicubic2d"}, resample<Interpolation::Cubic, false>, symbols);
  r.add("resampling", {"upsample_bicubic2d_backward"}, resample<Interpolation::Cubic, true>, symbols);
  r.add(
      "resampling", {"upsample_bilinear2d", "upsample_linear1d", "upsample_trilinear3d"}, resample<Interpolation::Linear, false>,
      symbols);
  r.add(
      "resampling", {"upsample_bilinear2d_backward", "upsample_linear1d_backward", "upsample_trilinear3d_backward"},
      resample<Interpolation::Linear, true>, symbols);
}

} // namespace shardtensor::rules
