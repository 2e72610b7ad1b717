// Resampling: interpolation, pixel shuffles.
#include "rules/bands.h"
#include "rules/empties.h"
#include "rules/pieces.h"
#include "rules/registry.h"
#include "rules/solution.h"
#include "rules/windows.h"

#include <ATen/ATen.h>

#include <cmath>
#include <numeric>

namespace shardtensor::rules {

namespace {

// ---- interpolation: space may be cut where a size is an exact multiple of the ratio's terms ----

enum class Interpolation : uint8_t { Nearest, Linear, Cubic };

// Along one dim: `from` elements per `to` results, without a common factor.
struct Ratio {
  int64_t in, out; // sizes
  int64_t from, to;

  // What a result reads; torch clamps what lies beyond the edges.
  Reach reach(Interpolation kind) const {
    if (kind == Interpolation::Nearest) {
      return {from, to, 0, from - 1}; // one of them
    }
    const auto wide = kind == Interpolation::Cubic ? 3 * to : to;
    return {2 * from, 2 * to, from - wide, from + wide};
  }
};

// Noted where space is cut.
struct Resampled {
  int64_t lead; // dims before space
  Interpolation kind;
  std::vector<Ratio> ratios;
};

// The numbers that a call has after its lists of sizes: one scale per dim of space.
int64_t first_scale(const c10::FunctionSchema& schema, int64_t space) {
  return static_cast<int64_t>(schema.arguments().size()) - space;
}

// Nothing if the positions in a piece would not be those in the whole, whatever the piece: aligned corners, or a scale that is
// not the ratio of the sizes.
std::optional<Resampled> resampled(
    const Call& call, c10::IntArrayRef in, c10::IntArrayRef out, int64_t space, Interpolation kind) {
  Resampled made{static_cast<int64_t>(in.size()) - space, kind, {}};
  if (kind != Interpolation::Nearest && call.flag(call.position("align_corners"))) {
    return std::nullopt;
  }
  for (int64_t i = 0; i < space; ++i) {
    const auto a = in[made.lead + i], b = out[i];
    const auto& scale = call.arg(first_scale(call.schema, space) + i);
    if (a < 1 || b < 1 || (scale.isDouble() && scale.toDouble() * static_cast<double>(a) != static_cast<double>(b)) ||
        !(scale.isDouble() || scale.isNone())) {
      return std::nullopt;
    }
    const auto common = std::gcd(a, b);
    made.ratios.push_back({a, b, a / common, b / common});
  }
  return made;
}

// Nearest picks the same element on a piece as on the whole only where each makes so many whole results. By larger numbers
// torch's rounding has not been tried.
bool repeats(const Ratio& r) {
  constexpr int64_t kMost = 16;
  return r.from == 1 && r.to <= kMost;
}

// Also where it picks one of so many.
bool picks(const Ratio& r) {
  constexpr int64_t kMost = 16;
  return r.to == 1 && r.from <= kMost;
}

// Slices begin where the positions are those of the whole moved by a whole number: at a multiple of ratio.from. So a rank may
// read some elements more in front.
Reach from_such_a_place(const Ratio& ratio, Interpolation kind) {
  auto r = ratio.reach(kind);
  const auto more = kind == Interpolation::Nearest                   ? 0
                    : kind == Interpolation::Linear && ratio.to == 1 ? (ratio.from - 1) / 2
                                                                     : ratio.from - 1;
  r.first -= r.den * more;
  return r;
}

void forward_kernel(Run& run);
void backward_kernel(Run& run);

// Whether nearest picks can be made on pieces, along the dims that are cut.
bool fits(const std::optional<Resampled>& made, const Layout& layout) {
  if (!made || made->kind != Interpolation::Nearest) {
    return made.has_value();
  }
  for (size_t i = 0; i < made->ratios.size(); ++i) {
    const auto& ratio = made->ratios[i];
    if (layout.shards(made->lead + static_cast<int64_t>(i)) && !repeats(ratio) && !picks(ratio)) {
      return false;
    }
  }
  return true;
}

// ---- by weights: any ratio ----

// How a result is made along each dim.
struct Sampling {
  double radius; // in elements, around a result's position: of the results' size, if they are fewer and it is antialiased
  bool antialiased;
  enum class Position : uint8_t { Middle, Start } position; // Start: of `nearest`
};

// What a result reads. Positions are computed in floats, so there is a margin.
Reach reach_of(const Sampling& s, int64_t in, int64_t out, bool aligned, const c10::IValue& scale) {
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
  const auto start = s.position == Sampling::Position::Start ? 0 : aligned ? 0 : num - den;
  const auto radius = static_cast<int64_t>(s.radius) * unit;
  return {2 * num, unit, start - radius + unit - margin, start + radius + margin};
}

at::Tensor resample_combs(const Run& run, const at::Tensor& input, c10::IntArrayRef out, int64_t along) {
  const auto op = forward_op(run);
  const auto space = static_cast<int64_t>(out.size());
  std::vector<c10::IValue> stack{input, c10::List<int64_t>(out)};
  const auto aligned = argument(run, "align_corners");
  if (aligned >= 0) {
    stack.push_back(run.arg(aligned));
  }
  for (int64_t i = 0; i < space; ++i) {
    stack.push_back(i == along ? run.arg(first_scale(run.op.schema(), space) + i) : c10::IValue());
  }
  op.callBoxed(&stack);
  return stack[0].toTensor();
}

// The other dims have one element and two results, so that none is taken for a copy.
at::Tensor counts_of_nearest(const Run& run, const Bands& bands, int64_t along, const at::TensorOptions& options) {
  const auto space = static_cast<int64_t>(bands.in.size());
  std::vector<int64_t> in(bands.lead + space, 1), out = in;
  std::fill(out.begin() + bands.lead, out.end(), 2);
  in[bands.lead + along] = bands.in[along];
  out[bands.lead + along] = bands.out[along];
  std::vector<c10::IValue> stack{
      at::ones(out, options), c10::List<int64_t>(c10::IntArrayRef(out).slice(bands.lead)),
      c10::List<int64_t>(c10::IntArrayRef(in))};
  for (int64_t i = 0; i < space; ++i) {
    stack.push_back(i == along ? run.arg(first_scale(run.op.schema(), space) + i) : c10::IValue());
  }
  c10::Dispatcher::singleton().findSchemaOrThrow(run.op.schema().name().c_str(), "").callBoxed(&stack);
  return stack[0].toTensor().flatten().div(static_cast<double>(int64_t{1} << (space - 1)));
}

// Nothing if torch refuses the call, if nothing is resampled, or if numbers are no floats.
std::optional<Bands> bands_of(const Call& call, c10::IntArrayRef in, c10::IntArrayRef out, int64_t space, const Sampling& s) {
  Bands bands{static_cast<int64_t>(in.size()) - space, {}, {}, {}, resample_combs};
  if (static_cast<int64_t>(out.size()) != space || bands.lead < 1 || !c10::isFloatingType(call.tensors[0].dtype)) {
    return std::nullopt;
  }
  const auto aligned = argument(call, "align_corners");
  const bool align = aligned >= 0 && call.flag(aligned);
  bool any = false;
  for (int64_t i = 0; i < space; ++i) {
    const auto a = in[bands.lead + i], b = out[i];
    const auto& scale = call.arg(first_scale(call.schema, space) + i);
    if (a < 1 || b < 1 || !(scale.isDouble() || scale.isNone())) {
      return std::nullopt;
    }
    any = any || a != b;
    bands.in.push_back(a);
    bands.out.push_back(b);
    bands.reaches.push_back(reach_of(s, a, b, align, scale));
  }
  return any ? std::optional(bands) : std::nullopt;
}

Sampling sampling_of(const Call& call, Interpolation kind) {
  using Position = Sampling::Position;
  if (kind == Interpolation::Nearest) { // picks one of the elements around a position
    const bool exact = call.schema.name().find("exact") != std::string::npos;
    return {2, false, exact ? Position::Middle : Position::Start};
  }
  return {kind == Interpolation::Linear ? 1.0 : 2.0, false, Position::Middle};
}

// torch's words: a kernel on a piece would not see that the whole has no channels.
void check_channels(const TensorArg& input, int64_t space) {
  TORCH_CHECK(
      input.dim() != space + 2 || input.size(1), "Non-empty ", input.dim(), "D data tensor expected but got a tensor with sizes ",
      input.sizes());
}

template <int64_t space>
void resample_by_weights(const Call& call, Rule& rule, const Sampling& s) {
  const auto& input = call.tensors[0];
  if (const auto bands = bands_of(call, input.sizes(), call.ints(call.position("output_size")), space, s)) {
    band_forward(rule, input.sym_sizes(), *bands);
  }
}

template <int64_t space>
void resample_backward_by_weights(const Call& call, Rule& rule, const Sampling& s, bool by_counts = false) {
  const auto& grad = call.tensors[0];
  const auto in = call.ints(call.position("input_size"));
  if (static_cast<int64_t>(in.size()) != grad.dim()) {
    return;
  }
  if (auto bands = bands_of(call, in, grad.sizes().slice(grad.dim() - space), space, s)) {
    bands->counts = by_counts ? counts_of_nearest : nullptr;
    band_backward(rule, grad.sym_sizes(), *bands);
  }
}

// Where each element makes so many results, both are cut alike; else what is resampled is read through windows.
void cut_resampled(Rule& rule, const Resampled& made, bool backward) {
  const auto kind = made.kind;
  for (size_t i = 0; i < made.ratios.size(); ++i) {
    const auto d = made.lead + static_cast<int64_t>(i);
    const auto& ratio = made.ratios[i];
    const auto count = backward ? ratio.in : ratio.out;
    rule.results[0].sizes[d] = count;
    const auto at = rule.factor(); // factor d is dim d, used or not
    if (kind == Interpolation::Nearest && repeats(ratio)) {
      auto &from = rule.operands[0].dims[d], &to = rule.results[0].dims[d];
      from = Dim(at, backward ? ratio.to : 1);
      to = Dim(at, backward ? 1 : ratio.to);
    } else if (kind != Interpolation::Nearest || picks(ratio)) {
      read_through(rule, d, count, backward ? mirror(ratio.reach(kind), ratio.in) : from_such_a_place(ratio, kind));
    }
  }
  rule.operands[0].padding = std::nullopt;
  rule.notes = made;
  rule.always(backward ? backward_kernel : forward_kernel);
}

template <int64_t space, Interpolation kind>
Rule resample(const Call& call) {
  auto rule = planes(call, space);
  rule.linear_in({0});
  const auto& input = call.tensors[0];
  if (!cut_in_space(call, space)) {
    return rule;
  }
  check_channels(input, space);
  const auto out = call.ints(call.position("output_size"));
  const auto made = static_cast<int64_t>(out.size()) == space ? resampled(call, input.sizes(), out, space, kind) : std::nullopt;
  if (!fits(made, *input.layout)) {
    resample_by_weights<space>(call, rule, sampling_of(call, kind));
    return rule;
  }
  rule.results[0].sizes = input.sym_sizes();
  cut_resampled(rule, *made, false);
  return rule;
}

template <int64_t space, Interpolation kind>
Rule resample_backward(const Call& call) {
  auto rule = planes(call, space);
  rule.always(backward_kernel);
  rule.linear_in({0});
  const auto& grad = call.tensors[0];
  if (!cut_in_space(call, space)) {
    return rule;
  }
  const auto in = call.ints(call.position("input_size"));
  const auto lead = grad.dim() - space;
  const auto made =
      static_cast<int64_t>(in.size()) == grad.dim() ? resampled(call, in, grad.sizes().slice(lead), space, kind) : std::nullopt;
  if (!fits(made, *grad.layout)) {
    // torch's backward of a position between two elements may name another one than its forward.
    resample_backward_by_weights<space>(call, rule, sampling_of(call, kind), kind == Interpolation::Nearest);
    return rule;
  }
  rule.results[0].sizes = symbols(in);
  cut_resampled(rule, *made, true);
  return rule;
}

// radius: 1 linear, 2 cubic, 3 lanczos
template <int64_t space, int radius>
Rule antialiased(const Call& call) {
  auto rule = planes(call, space);
  rule.linear_in({0});
  if (cut_in_space(call, space)) {
    check_channels(call.tensors[0], space);
    resample_by_weights<space>(call, rule, {radius, true, Sampling::Position::Middle});
  }
  return rule;
}

template <int64_t space, int radius>
Rule antialiased_backward(const Call& call) {
  auto rule = planes(call, space);
  rule.always(backward_kernel);
  rule.linear_in({0});
  if (cut_in_space(call, space)) {
    resample_backward_by_weights<space>(call, rule, {radius, true, Sampling::Position::Middle});
  }
  return rule;
}

// ---- kernels ----

// Replaces argument `name`, sizes, from position `first` on.
void replace_sizes(const Run& run, const char* name, int64_t first, c10::IntArrayRef sizes) {
  auto& arg = run.arg(argument(run, name));
  auto all = arg.toSymIntVector();
  for (size_t i = 0; i < sizes.size(); ++i) {
    all[first + static_cast<int64_t>(i)] = sizes[i];
  }
  arg = c10::SymIntArrayRef(all);
}

// The call must not take the ratio from the sizes of a slice.
void replace_scale(const Run& run, int64_t i, const Ratio& ratio, int64_t space) {
  run.arg(first_scale(run.op.schema(), space) + i) = static_cast<double>(ratio.to) / static_cast<double>(ratio.from);
}

// torch copies instead, whatever the scale, if there are as many results as elements; so one more result is asked for, and
// dropped.
int64_t not_a_copy(int64_t results, int64_t elements, const Ratio& ratio) {
  return results == elements && ratio.in != ratio.out ? results + 1 : results;
}

Sizes some_of_each(Sizes sizes) {
  for (auto& n : sizes) {
    n = std::max<int64_t>(n, 1);
  }
  return sizes;
}

// Runs the op, and keeps of its result a piece of these sizes, which begins at `first` along each dim of space.
void call_op_for(Run& run, int64_t lead, c10::IntArrayRef first, c10::IntArrayRef sizes) {
  run.call_op();
  auto out = run.stack.back().toTensor();
  for (int64_t i = 0; i < static_cast<int64_t>(first.size()); ++i) {
    if (out.sym_size(lead + i) != sizes[lead + i]) {
      out = out.narrow(lead + i, first[i], sizes[lead + i]);
    }
  }
  run.stack.back() = out;
}

void forward_kernel(Run& run) {
  const auto& made = noted<Resampled>(run.solution);
  const auto sizes = guarded(sizes_of_piece(run));
  auto input = run.arg(0).toTensor();
  if (makes_nothing(symbols(sizes))) {
    run.arg(0) = stand_in(run, 0, made.lead, made.lead, [](int64_t) { return 1; });
    replace_sizes(run, "output_size", 0, c10::IntArrayRef(some_of_each(sizes)).slice(made.lead));
    run.call_op();
    run.stack.back() = input.new_zeros(sizes);
    return;
  }
  const auto space = static_cast<int64_t>(made.ratios.size());
  std::vector<int64_t> output(sizes.begin() + made.lead, sizes.end()), drop(space, 0);
  const auto* halo = run.solution.halo(0);
  for (int64_t i = 0; i < space; ++i) {
    const auto& ratio = made.ratios[i];
    const auto* mine = cut_run(run, made.lead + i);
    if (!halo || !mine) {
      continue;
    }
    const auto& read = halo->fetch.mine()[made.lead + i].inside;
    const auto begin = ceil_div(read.start, ratio.from) * ratio.from;
    const auto length = read.length - (begin - read.start);
    const auto result = begin / ratio.from * ratio.to; // that lies there
    input = input.narrow(made.lead + i, begin - read.start, length);
    drop[i] = mine->start - result;
    output[i] = not_a_copy(mine->start + mine->length - result, length, ratio);
    replace_scale(run, i, ratio, space);
  }
  run.arg(0) = input;
  replace_sizes(run, "output_size", 0, output);
  call_op_for(run, made.lead, drop, sizes);
}

// Argument `input_size` lists the global sizes of the gradient; the call gets those of this rank's piece.
void whole_planes_backward(Run& run) {
  const auto at = argument(run, "input_size");
  auto sizes = run.arg(at).toSymIntVector();
  const auto grad = run.arg(0).toTensor();
  for (int64_t d = 0; d < 2; ++d) {
    const auto n = grad.sym_size(d);
    sizes[d] = n == 0 && run.operands[0].symbols[d] != 0 ? c10::SymInt(1) : n; // see call_op_nonempty()
  }
  run.arg(at) = c10::SymIntArrayRef(sizes);
  call_op_nonempty(run);
}

void backward_kernel(Run& run) {
  if (!run.solution.notes.has_value()) {
    return whole_planes_backward(run);
  }
  const auto& made = noted<Resampled>(run.solution);
  const auto sizes = guarded(sizes_of_piece(run));
  auto grad = run.arg(0).toTensor();
  if (is_empty(grad) || makes_nothing(symbols(sizes))) {
    const auto zeros = stand_in(run, 0, made.lead, made.lead, [](int64_t) { return 1; });
    const auto results = guarded(zeros.sym_sizes());
    auto elements = some_of_each(sizes);
    std::copy(results.begin(), results.begin() + made.lead, elements.begin()); // 0 if the whole has none
    run.arg(0) = zeros;
    replace_sizes(run, "output_size", 0, c10::IntArrayRef(results).slice(made.lead));
    replace_sizes(run, "input_size", 0, elements);
    run.call_op();
    run.stack.back() = grad.new_zeros(sizes);
    return;
  }
  const auto space = static_cast<int64_t>(made.ratios.size());
  auto input = sizes; // of the slice that these gradients belong to
  std::vector<int64_t> output, drop(space, 0), pad(2 * space, 0);
  const auto* halo = run.solution.halo(0);
  for (int64_t i = 0; i < space; ++i) {
    const auto d = made.lead + i;
    output.push_back(grad.sym_size(d).guard_int(__FILE__, __LINE__));
    const auto* mine = cut_run(run, d);
    if (!halo || !mine) {
      continue;
    }
    const auto& ratio = made.ratios[i];
    const auto reach = ratio.reach(made.kind);
    const auto& read = halo->fetch.mine()[d].inside;
    const auto end_read = read.start + read.length, end = mine->start + mine->length;
    const auto first = std::min(mine->start, std::max<int64_t>(0, reach.lo(read.start)));
    const auto begin = first / ratio.from * ratio.from;
    const auto result = begin / ratio.from * ratio.to;
    input[d] = std::max(end, std::min(ratio.in, reach.hi(end_read - 1))) - begin;
    output[i] = not_a_copy(end_read - result, input[d], ratio);
    pad[2 * (space - 1 - i)] = read.start - result;
    pad[2 * (space - 1 - i) + 1] = output[i] - (end_read - result);
    drop[i] = mine->start - begin;
    replace_scale(run, i, ratio, space);
  }
  run.arg(0) = at::constant_pad_nd(grad, pad);
  replace_sizes(run, "output_size", 0, output);
  replace_sizes(run, "input_size", 0, input);
  call_op_for(run, made.lead, drop, sizes);
}

// ---- pixels ----

// torch's pixel_unshuffle returns an empty tensor with its old shape, but the whole has elements.
void pixel_unshuffle_kernel(Run& run) {
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
    rule.always([](Run& run) { run.returns({run.arg(0).toTensor().clone()}); });
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
  r.add("resampling", {"_upsample_bicubic2d_aa"}, antialiased<2, 2>, symbols);
  r.add("resampling", {"_upsample_bicubic2d_aa_backward"}, antialiased_backward<2, 2>, symbols);
  r.add("resampling", {"_upsample_bilinear2d_aa"}, antialiased<2, 1>, symbols);
  r.add("resampling", {"_upsample_bilinear2d_aa_backward"}, antialiased_backward<2, 1>, symbols);
  r.add("resampling", {"_upsample_lanczos2d_aa"}, antialiased<2, 3>, symbols);
  r.add("resampling", {"_upsample_lanczos2d_aa_backward"}, antialiased_backward<2, 3>, symbols);
  r.add("resampling", {"_upsample_nearest_exact1d", "upsample_nearest1d"}, resample<1, Interpolation::Nearest>, symbols);
  r.add("resampling", {"_upsample_nearest_exact2d", "upsample_nearest2d"}, resample<2, Interpolation::Nearest>, symbols);
  r.add("resampling", {"_upsample_nearest_exact3d", "upsample_nearest3d"}, resample<3, Interpolation::Nearest>, symbols);
  r.add(
      "resampling", {"_upsample_nearest_exact1d_backward", "upsample_nearest1d_backward"},
      resample_backward<1, Interpolation::Nearest>, symbols);
  r.add(
      "resampling", {"_upsample_nearest_exact2d_backward", "upsample_nearest2d_backward"},
      resample_backward<2, Interpolation::Nearest>, symbols);
  r.add(
      "resampling", {"_upsample_nearest_exact3d_backward", "upsample_nearest3d_backward"},
      resample_backward<3, Interpolation::Nearest>, symbols);
  r.add("resampling", {"upsample_bicubic2d"}, resample<2, Interpolation::Cubic>, symbols);
  r.add("resampling", {"upsample_bicubic2d_backward"}, resample_backward<2, Interpolation::Cubic>, symbols);
  r.add("resampling", {"upsample_bilinear2d"}, resample<2, Interpolation::Linear>, symbols);
  r.add("resampling", {"upsample_bilinear2d_backward"}, resample_backward<2, Interpolation::Linear>, symbols);
  r.add("resampling", {"upsample_linear1d"}, resample<1, Interpolation::Linear>, symbols);
  r.add("resampling", {"upsample_linear1d_backward"}, resample_backward<1, Interpolation::Linear>, symbols);
  r.add("resampling", {"upsample_trilinear3d"}, resample<3, Interpolation::Linear>, symbols);
  r.add("resampling", {"upsample_trilinear3d_backward"}, resample_backward<3, Interpolation::Linear>, symbols);
}

} // namespace shardtensor::rules
