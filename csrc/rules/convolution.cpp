// Convolutions. Any dim may be cut: batch, channels, space.
#include "rules/empties.h"
#include "rules/pieces.h"
#include "rules/registry.h"
#include "rules/resolve.h"
#include "rules/windows.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

namespace shardtensor::rules {

namespace {

// ---- convolution: input [n, in, ...], weight [out, in / groups, ...] (transposed: [in, out / groups, ...]), bias [out] ----

struct Factors {
  int64_t n, in, out;
};

// Grouped channels belong together, so they stay whole.
Factors convolution_factors(Rule& rule, bool grouped) {
  Factor channels;
  channels.whole = grouped;
  channels.reduce = ReduceOp::Sum;
  Factors f{};
  f.n = rule.reduced(ReduceOp::Sum);
  f.in = rule.factor(channels);
  f.out = rule.factor(channels);
  return f;
}

Dims with_space(int64_t ndim, int64_t first, int64_t second) {
  Dims dims(ndim, Dim(kNone));
  dims[0] = first;
  dims[1] = second;
  return dims;
}

Dims with_space(const TensorArg& t, int64_t first, int64_t second) {
  return with_space(t.dim(), first, second);
}

Dims weight_dims(const TensorArg& t, const Factors& f, bool transposed) {
  return transposed ? with_space(t, f.in, f.out) : with_space(t, f.out, f.in);
}

// ---- space: where it is cut, the op needs no padding of its own (windows.h) ----

constexpr int64_t kFirstSpace = 3; // the factors n, in, out come before those of space

// From a call (rules) or a run (kernels), with the weight's sizes.
template <typename Ints>
Taps taps_along(const Ints& ints, int64_t i, int64_t count) {
  return {
      count, integer_at(ints("stride"), i), integer_at(ints("padding"), i), integer_at(ints("dilation"), i),
      integer_at(ints("output_padding"), i)};
}

Taps taps_of(const Call& call, const TensorArg& weight, int64_t i) {
  const auto ints = [&](const char* name) {
    const auto list = call.ints(call.position(name));
    return std::vector<int64_t>(list.begin(), list.end());
  };
  return taps_along(ints, i, weight.size(i + 2));
}

Taps taps_of(const Run& run, const at::Tensor& weight, int64_t i) {
  return taps_along(
      [&](const char* name) { return run.arg(argument(run, name)).toIntVector(); }, i,
      weight.sym_size(i + 2).guard_int(__FILE__, __LINE__));
}

bool has_space(const TensorArg& input) {
  for (int64_t d = 2; d < input.dim(); ++d) {
    if (input.size(d) < 1) {
      return false;
    }
  }
  return true;
}

// torch's words, on all ranks: a kernel would see only its piece.
void check_fits(const TensorArg& input, const TensorArg& weight, const Call& call) {
  const bool transposed = call.flag(call.position("transposed"));
  std::vector<int64_t> padded, kernel;
  bool fits = true;
  for (int64_t i = 0; i < input.dim() - 2; ++i) {
    const auto taps = taps_of(call, weight, i);
    TORCH_CHECK(taps.stride > 0, "non-positive stride is not supported");
    TORCH_CHECK(taps.padding >= 0, "negative padding is not supported");
    TORCH_CHECK(taps.dilation > 0, "dilation should be greater than zero");
    TORCH_CHECK(taps.output_padding >= 0, "negative output_padding is not supported");
    if (transposed) {
      TORCH_CHECK(
          taps.output_padding < std::max(taps.stride, taps.dilation),
          "output padding must be smaller than either stride or dilation, but got ", taps.output_padding, " along dim ", i + 2);
      const auto results = taps.results(input.size(i + 2), true);
      TORCH_CHECK(
          results > 0, "Given input size per channel: ", input.size(i + 2), ", calculated output size per channel: ", results,
          " along dim ", i + 2, ". Output size is too small");
    }
    padded.push_back(input.size(i + 2) + 2 * taps.padding);
    kernel.push_back(taps.span());
    fits = fits && (transposed || padded.back() >= kernel.back());
  }
  TORCH_CHECK(
      fits, "Calculated padded input size per channel: (", c10::Join(" x ", padded), "). Kernel size: (",
      c10::Join(" x ", kernel), "). Kernel size can't be greater than actual input size");
}

const Interval* run_along(const Run& run, int64_t i) {
  return cut_run(run, i + kFirstSpace);
}

// Replaces an argument that lists one integer per dim of space.
template <typename F>
void replace_ints(const Run& run, const char* name, int64_t space, F each) {
  auto& arg = run.arg(argument(run, name));
  const auto old = arg.toIntVector();
  std::vector<int64_t> list;
  for (int64_t i = 0; i < space; ++i) {
    list.push_back(each(i, integer_at(old, i)));
  }
  arg = list;
}

at::Tensor along_channels(const at::Tensor& bias, int64_t space) {
  std::vector<int64_t> sizes(space + 1, 1);
  sizes[0] = -1;
  return bias.view(sizes);
}

// Without padding along the dims that are cut.
void replace_padding(const Run& run, int64_t space) {
  for (const char* name : {"padding", "output_padding"}) {
    replace_ints(run, name, space, [&](int64_t i, int64_t p) { return run_along(run, i) ? 0 : p; });
  }
}

// On a rank that makes nothing: runs the op on zeros that give one result.
void stand_in_for_input(Run& run) {
  const auto weight = run.arg(1).toTensor();
  const bool transposed = run.arg(argument(run, "transposed")).toBool();
  run.arg(0) = stand_in(run, 0, 2, kFirstSpace, [&](int64_t i) { return transposed ? 1 : taps_of(run, weight, i).span(); });
  replace_padding(run, weight.dim() - 2);
  call_op_nonempty(run);
}

// Without padding the op's first result is the one that the first index of the operand reaches first: results before and behind
// this rank's are dropped. torch drops `padding` on both sides, `output_padding` less behind; otherwise we drop.
void transposed_with_halo(Run& run, const Solution::Halo& halo) {
  const auto weight = run.arg(1).toTensor();
  const auto space = weight.dim() - 2;
  std::vector<int64_t> padding, output_padding, crop(2 * space, 0);
  bool native = true;
  for (int64_t i = 0; i < space; ++i) {
    const auto taps = taps_of(run, weight, i);
    padding.push_back(taps.padding);
    output_padding.push_back(taps.output_padding);
    if (!run_along(run, i)) {
      continue;
    }
    const auto& mine = *run_along(run, i);
    const auto& read = halo.fetch.mine()[i + 2];
    const auto begin = read.start() * taps.stride - taps.padding;
    const auto full = read.length() ? (read.length() - 1) * taps.stride + taps.span() : 0;
    const auto drop = mine.start - begin, surplus = begin + full - mine.start - mine.length;
    const bool by_torch = read.length() && drop >= 0 && drop >= surplus && drop - surplus < std::max(taps.stride, taps.dilation);
    padding.back() = by_torch ? drop : 0;
    output_padding.back() = by_torch ? drop - surplus : 0;
    crop[2 * (space - 1 - i)] = by_torch ? 0 : -drop;
    crop[2 * (space - 1 - i) + 1] = by_torch ? 0 : -surplus;
    native = native && by_torch;
  }
  const auto& input = run.arg(0).toTensor();
  const auto bias = run.arg(2).isTensor() ? run.arg(2).toTensor() : at::Tensor(); // torch may also give an undefined one
  const auto biased = [&](const at::Tensor& out) { return bias.defined() ? out.add(along_channels(bias, space)) : out; };
  if (is_empty(input) || is_empty(weight)) { // also where no index reaches this rank's results
    stand_in_for_input(run);
    run.stack.back() = biased(run.stack.back().toTensor().new_zeros_symint(sizes_of_piece(run)));
    return;
  }
  replace_ints(run, "padding", space, [&](int64_t i, int64_t) { return padding[i]; });
  replace_ints(run, "output_padding", space, [&](int64_t i, int64_t) { return output_padding[i]; });
  if (native) {
    return call_op_nonempty(run);
  }
  run.arg(2) = c10::IValue();
  call_op_nonempty(run);
  run.stack.back() = biased(at::constant_pad_nd(run.stack.back().toTensor(), crop));
}

// If the input's channels are sharded, one rank along them adds the bias.
void convolution_kernel(Run& run) {
  add_bias_once(run, 2);
  const auto* halo = run.solution.halo(0);
  if (!halo) {
    return call_op_nonempty(run);
  }
  const auto sizes = sizes_of_piece(run);
  if (std::any_of(sizes.begin() + 2, sizes.end(), [](const c10::SymInt& n) { return n == 0; })) {
    stand_in_for_input(run);
    run.stack.back() = run.stack.back().toTensor().new_zeros_symint(sizes);
    return;
  }
  if (run.arg(argument(run, "transposed")).toBool()) {
    return transposed_with_halo(run, *halo);
  }
  replace_padding(run, static_cast<int64_t>(sizes.size()) - 2);
  call_op_nonempty(run);
}

// The meta kernel does not recognize a batch of one as channels_last.
std::optional<Order> order_of_result(const TensorArg& input, const TensorArg& weight) {
  for (const auto* t : {&input, &weight}) {
    if (t->has_symbols()) {
      continue;
    }
    if (c10::is_channels_last_strides_2d(t->sizes(), t->strides())) {
      return Order{0, 2, 3, 1};
    }
    if (c10::is_channels_last_strides_3d(t->sizes(), t->strides())) {
      return Order{0, 2, 3, 4, 1};
    }
  }
  return std::nullopt;
}

// Without channels to read, torch's result has no channels either, and the gradients are zeros of the operands' sizes. So the
// batch alone may be cut.
Rule without_channels(const Call& call) {
  Rule rule;
  const auto n = rule.reduced(ReduceOp::Sum);
  const auto with_batch = [&](int64_t ndim) { return Operand(with_space(ndim, n, kNone)); };
  const bool backward = call.tensors[0].arg == 0 && call.schema.returns().size() == 3;
  for (const auto& t : call.tensors) {
    const bool weight = t.arg > backward;
    rule.operands.push_back(weight ? Operand(Dims(t.dim(), Dim(kNone))) : with_batch(t.dim()));
  }
  const auto ndim = call.tensors[0].dim();
  rule.results.emplace_back(with_space(ndim, n, kNone));
  if (backward) {
    rule.results.emplace_back(Dims(ndim, Dim(kNone)));
    rule.results.emplace_back(Dims{Dim(kNone)});
  }
  return rule;
}

Rule convolution(const Call& call) {
  if (call.tensors[0].sym_size(1) == 0) {
    return without_channels(call);
  }
  Rule rule;
  const bool transposed = call.flag(call.position("transposed"));
  const auto grouped = call.integer(call.position("groups"));
  const auto f = convolution_factors(rule, grouped != 1);
  const auto &input = call.tensors[0], &weight = call.tensors[1];
  rule.operands.emplace_back(with_space(input, f.n, f.in));
  rule.operands.emplace_back(weight_dims(weight, f, transposed));
  const bool biased = call.operand(2) >= 0;
  if (biased) {
    rule.operands.emplace_back(Dims{Dim(f.out)});
  }
  rule.results.emplace_back(with_space(input, f.n, f.out));
  rule.results[0].order = order_of_result(input, weight);
  if (cut_in_space(call, input.dim() - 2) && has_space(input)) {
    check_fits(input, weight, call);
    rule.spread.push_back(f.n);
    auto& sizes = rule.results[0].sizes;
    sizes = {input.sym_size(0), transposed ? weight.sym_size(1) * grouped : weight.sym_size(0)};
    for (int64_t d = 2; d < input.dim(); ++d) {
      const auto taps = taps_of(call, weight, d - 2);
      Factor h;
      h.size = taps.results(input.size(d), transposed);
      sizes.push_back(h.size);
      const auto o = rule.factor(h);
      rule.operands[0].dims[d] = rule.windows(o, taps.reach(transposed));
      rule.results[0].dims[d] = o;
    }
  }
  const uint64_t bias = biased ? 0b100 : 0;
  rule.jointly_linear(0b001 | bias);
  rule.jointly_linear(0b010 | bias);
  rule.kernel = convolution_kernel;
  rule.always_kernel = true;
  rule.notes = Contracted{f.in};
  return rule;
}

// The results whose gradients this rank adds to the bias's: those of the run up to where the next rank's begins, and at the edges
// of the whole all that lie beyond. `read` holds them.
Interval own_results(const Reach& readers, const Interval& run, const Stretch& read, int64_t size, int64_t results) {
  const auto at = [&](int64_t i) { return i <= 0 ? 0 : i >= size ? results : std::clamp<int64_t>(readers.lo(i), 0, results); };
  const auto start = at(run.start), end = at(run.start + run.length);
  return {start - read.start(), end - start};
}

// The gradients of this rank's piece of the input, from the gradients of all results that read it. The windows of these results
// may stick out of the piece: there the piece is padded, by torch, evenly on both sides; then gradients of results that lie
// only in that padding are zeros.
void backward_with_halo(Run& run, const Solution::Halo& halo) {
  auto grad = run.arg(0).toTensor();
  const auto input = run.arg(1).toTensor(), weight = run.arg(2).toTensor();
  const auto space = weight.dim() - 2;
  const auto mask = run.arg(argument(run, "output_mask")).toBoolList();
  const bool transposed = run.arg(argument(run, "transposed")).toBool();
  auto own = grad;
  bool reads_nothing = false;
  std::vector<int64_t> padding, output_padding, pad(2 * space, 0);
  for (int64_t i = 0; i < space; ++i) {
    const auto taps = taps_of(run, weight, i);
    padding.push_back(taps.padding);
    output_padding.push_back(taps.output_padding);
    if (!run_along(run, i)) {
      continue;
    }
    const auto& mine = *run_along(run, i);
    const auto& read = halo.fetch.mine()[i + 2];
    reads_nothing = reads_nothing || !read.length() || !mine.length;
    if (reads_nothing) {
      break;
    }
    const auto ours = own_results(taps.readers(transposed), mine, read, run.operands[1].size(i + 2), run.operands[0].size(i + 2));
    own = own.narrow(i + 2, ours.start, ours.length);
    auto& before = pad[2 * (space - 1 - i)];
    auto& after = pad[2 * (space - 1 - i) + 1];
    if (transposed) { // its results without padding are those that are read, but for what the bias alone needs
      padding.back() = output_padding.back() = 0;
      after = (mine.length - 1) * taps.stride + taps.span() - read.length();
      continue;
    }
    const auto begin = read.start() * taps.stride - taps.padding;
    const auto end = begin + (read.length() - 1) * taps.stride + taps.span();
    const auto left = mine.start - begin, right = end - mine.start - mine.length;
    before = std::max({int64_t{0}, ceil_div(-left, taps.stride), ceil_div(right - left, taps.stride)});
    padding.back() = left + before * taps.stride;
    after = floor_div(mine.length + 2 * padding.back() - taps.span(), taps.stride) + 1 - before - read.length();
  }
  at::Tensor bias;
  if (mask.get(2)) {
    std::vector<int64_t> over(space + 1, 0);
    std::iota(over.begin() + 1, over.end(), 2);
    bias = reads_nothing ? grad.new_zeros_symint({grad.sym_size(1)}) : own.sum(over);
  }
  run.arg(argument(run, "output_mask")) = c10::List<bool>({mask.get(0), mask.get(1), false});
  if (reads_nothing) { // zeros, of the op itself
    const auto span = [&](int64_t i) { return taps_of(run, weight, i).span(); };
    run.arg(0) = stand_in(run, 0, 2, kFirstSpace, [&](int64_t i) { return transposed ? span(i) : 1; });
    run.arg(1) = stand_in(run, 1, 2, kFirstSpace, [&](int64_t i) { return transposed ? 1 : span(i); });
    replace_padding(run, space);
    call_op_nonempty(run);
    const auto results = run.stack.end() - 3;
    results[0] = mask.get(0) ? at::zeros_like(input) : at::Tensor();
    results[1] = mask.get(1) ? at::zeros_like(weight) : at::Tensor();
    results[2] = bias;
    return;
  }
  if (std::any_of(pad.begin(), pad.end(), [](int64_t n) { return n != 0; })) {
    run.arg(0) = at::constant_pad_nd(grad, pad);
  }
  replace_ints(run, "padding", space, [&](int64_t i, int64_t) { return padding[i]; });
  replace_ints(run, "output_padding", space, [&](int64_t i, int64_t) { return output_padding[i]; });
  if (mask.get(0) || mask.get(1)) {
    call_op_nonempty(run);
  } else {
    run.returns({at::Tensor(), at::Tensor(), at::Tensor()});
  }
  run.stack.back() = bias;
}

void convolution_backward_kernel(Run& run) {
  if (const auto* halo = run.solution.halo(0)) {
    return backward_with_halo(run, *halo);
  }
  const auto bias_sizes = run.op.schema().argumentIndexWithName("bias_sizes");
  if (!run.arg(*bias_sizes).isNone()) {
    const auto channels = run.arg(0).toTensor().sym_size(1);
    run.arg(*bias_sizes) = c10::SymIntArrayRef({channels == 0 ? c10::SymInt(1) : channels});
  }
  call_op_nonempty(run);
}

Rule convolution_backward(const Call& call) {
  if (call.tensors[1].sym_size(1) == 0) {
    return without_channels(call);
  }
  Rule rule;
  const bool transposed = call.flag(call.position("transposed"));
  const auto f = convolution_factors(rule, call.integer(call.position("groups")) != 1);
  const auto &grad = call.tensors[0], &input = call.tensors[1], &weight = call.tensors[2];
  rule.operands.emplace_back(with_space(grad, f.n, f.out));
  rule.operands.emplace_back(with_space(input, f.n, f.in));
  rule.operands.emplace_back(weight_dims(weight, f, transposed));
  if (cut_in_space(call, grad.dim() - 2) && has_space(input)) {
    rule.spread.push_back(f.n);
    for (int64_t d = 2; d < input.dim(); ++d) {
      const auto taps = taps_of(call, weight, d - 2);
      Factor h;
      h.reduce = ReduceOp::Sum;
      h.size = input.size(d);
      const auto i = rule.factor(h);
      rule.operands[0].dims[d] = rule.windows(i, taps.readers(transposed));
      rule.operands[1].dims[d] = i;
    }
  }
  rule.results.emplace_back(rule.operands[1].dims);
  rule.results.emplace_back(rule.operands[2].dims);
  rule.results.emplace_back(Dims{Dim(f.out)});
  rule.results[2].same_over = uint64_t{1} << f.in;
  rule.linear_in({0});
  rule.kernel = convolution_backward_kernel;
  rule.always_kernel = true;
  return rule;
}

} // namespace

void register_convolution(Registry& r) {
  Options same;
  same.one_dtype = ~uint64_t{0};
  same.symbols = true;
  r.add("convolution", {"convolution", "convolution_overrideable"}, convolution, same);
  r.add("convolution", {"convolution_backward", "convolution_backward_overrideable"}, convolution_backward, {.symbols = true});
}

} // namespace shardtensor::rules
