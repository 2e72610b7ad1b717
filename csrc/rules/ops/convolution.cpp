// Convolutions. Any dim may be cut: batch, channels, space.
#include "comm/tensor_kind.h"
#include "redistribute/exchange.h"
#include "redistribute/neutral_value.h"
#include "rules/kernel_utils.h"
#include "rules/pad_empty.h"
#include "rules/registry.h"
#include "rules/solution.h"
#include "rules/windows.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
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

Dims weight_dims(const TensorArg& t, const Factors& f, bool transposed) {
  return transposed ? with_space(t.dim(), f.in, f.out) : with_space(t.dim(), f.out, f.in);
}

// ---- space: where it is cut, the op needs no padding of its own (windows.h) ----

constexpr int64_t kIn = 1, kOut = 2; // the factors are n, in, out, and those of space

// The call's windows; none if space is not cut, or if the input has none. Raises where torch does, with its words: a kernel would
// see only its piece.
Windows windows_of(const Call& call, const TensorArg& input, const TensorArg& weight) {
  Windows windows;
  const auto space = input.dim() - 2;
  if (!cut_in_space(call, space)) {
    return windows;
  }
  for (int64_t d = 2; d < input.dim(); ++d) {
    if (input.size(d) < 1) {
      return windows;
    }
  }
  const auto list = [&](const char* name) { return call.ints(call.position(name)); };
  const auto stride = list("stride"), padding = list("padding"), dilation = list("dilation"), more = list("output_padding");
  const bool transposed = call.flag(call.position("transposed"));
  std::vector<int64_t> padded, kernel;
  bool fits = true;
  for (int64_t i = 0; i < space; ++i) {
    const auto size = input.size(i + 2);
    const WindowSpec taps{
        weight.size(i + 2), integer_at(stride, i), integer_at(padding, i), integer_at(dilation, i), integer_at(more, i)};
    TORCH_CHECK(taps.stride > 0, "non-positive stride is not supported");
    TORCH_CHECK(taps.padding >= 0, "negative padding is not supported");
    TORCH_CHECK(taps.dilation > 0, "dilation should be greater than zero");
    TORCH_CHECK(taps.output_padding >= 0, "negative output_padding is not supported");
    const auto results = taps.results(size, transposed);
    if (transposed) {
      TORCH_CHECK(
          taps.output_padding < std::max(taps.stride, taps.dilation),
          "output padding must be smaller than either stride or dilation, but got ", taps.output_padding, " along dim ", i + 2);
      TORCH_CHECK(
          results > 0, "Given input size per channel: ", size, ", calculated output size per channel: ", results, " along dim ",
          i + 2, ". Output size is too small");
    }
    padded.push_back(size + 2 * taps.padding);
    kernel.push_back(taps.span());
    fits = fits && (transposed || padded.back() >= kernel.back());
    windows.space.push_back({transposed ? results : size, transposed ? size : results, taps.reach(), taps});
  }
  TORCH_CHECK(
      fits, "Calculated padded input size per channel: (", c10::Join(" x ", padded), "). Kernel size: (",
      c10::Join(" x ", kernel), "). Kernel size can't be greater than actual input size");
  windows.lead = 2;
  windows.more_factors = 1;
  return windows;
}

void replace_padding(const KernelRun& run, const Windows& windows) {
  for (int64_t i = 0; i < windows.ndim(); ++i) {
    if (const auto share = share_of(run, windows, i); share.cut) {
      whole_windows(run, windows, i, share);
    }
  }
}

// ---- this rank's own piece first, while the halo travels ----

std::atomic<int64_t> g_second_call{int64_t{1} << 20};

// torch's op runs on the piece as it is, with the padding that puts its results in their places. Then it runs on boxes around
// the piece's edges, for the results that read the halo.
struct SplitConvolution {
  std::vector<int64_t> padding; // the first call's
  std::vector<Box> rest;        // results that read other ranks' input; backward: results of other ranks that read this piece
};

// What the results of a box read of the input along a dim of space, padding included.
Interval window(const Windows& windows, const Box& results, int64_t i) {
  return windows.space[i].taps.cells({results.offsets[i + 2], results.sizes[i + 2]});
}

// Nothing if torch's op on the piece alone would put its results in other places, or if the boxes would cost more than one call
// on the piece joined with its halo. Each rank may decide for itself, because the messages are the same.
std::optional<SplitConvolution> split_of(const KernelRun& run, const Solution::Halo& halo, const Windows& windows) {
  const bool backward = windows.backward;
  const auto given = run.arg(0).toTensor(), input = run.arg(backward).toTensor(), weight = run.arg(backward + 1).toTensor();
  const auto gain = static_cast<int64_t>(input.nbytes()) - g_second_call.load(std::memory_order_relaxed);
  if (gain < 0 || given.numel() == 0 || input.numel() == 0 || weight.numel() == 0) {
    return std::nullopt;
  }
  SplitConvolution split;
  Box all, own; // results that this rank makes or reads, and those of them in the first call
  for (int64_t d = 0; d < input.dim(); ++d) {
    const auto piece = run.operands[0].layout->intervals(d, run.operands[0].size(d), run.mesh().coordinate())[0];
    const auto read = halo.fetch.mine()[d].inside;
    const auto share = d < 2 ? WindowShare{false, {}, {}} : share_of(run, windows, d - 2);
    if (d >= 2) {
      split.padding.push_back(windows.space[d - 2].taps.padding);
    }
    if (!share.cut) { // all of this dim, by each call
      if (!(piece == read)) {
        return std::nullopt;
      }
      for (auto* box : {&all, &own}) {
        box->offsets.push_back(0);
        box->sizes.push_back(1);
      }
      continue;
    }
    const auto& taps = windows.space[d - 2].taps;
    const auto &in = backward ? share.makes : piece, &out = backward ? piece : share.makes;
    const auto in_end = in.end(), out_end = out.end(), read_end = read.end();
    auto shifted = taps;
    split.padding.back() = shifted.padding = in.start - taps.cells(out).start;
    if (shifted.padding < 0 || shifted.results(in.length) != out.length) {
      return std::nullopt;
    }
    auto start = out.start, end = out_end;
    if (!backward && read.start < in.start) {
      start = std::clamp(ceil_div(in.start + taps.padding, taps.stride), out.start, out_end);
    }
    if (!backward && read_end > in_end) {
      end = std::clamp(floor_div(in_end + taps.padding - taps.span(), taps.stride) + 1, start, out_end);
    }
    all.offsets.push_back(backward ? read.start : out.start);
    all.sizes.push_back(backward ? read.length : out.length);
    own.offsets.push_back(start);
    own.sizes.push_back(end - start);
  }
  if (!meet(all, own)) {
    return std::nullopt;
  }
  subtract(all, own, split.rest);
  int64_t boxes = 0;
  for (const auto& box : split.rest) {
    auto bytes = static_cast<int64_t>(input.element_size());
    for (int64_t d = 0; d < input.dim(); ++d) {
      const bool cut = d >= 2 && share_of(run, windows, d - 2).cut;
      bytes *= cut ? window(windows, box, d - 2).length : input.size(d);
    }
    boxes += bytes;
  }
  constexpr int64_t kBoxes = 4; // the cost of a box's element over a piece's: boxes are copied, and small calls are slower
  return gain < kBoxes * boxes ? std::nullopt : std::make_optional(std::move(split));
}

// A part of the input that this rank reads: `box` along the dims that are cut, in indices of the whole, and all of the other
// dims.
at::Tensor fetched(
    const KernelRun& run,
    const Solution::Halo& halo,
    const Windows& windows,
    const HaloExchange::HaloInFlight& arriving,
    Box box) {
  for (size_t d = 0; d < box.sizes.size(); ++d) {
    const bool cut = d >= 2 && share_of(run, windows, static_cast<int64_t>(d) - 2).cut;
    box.offsets[d] = cut ? box.offsets[d] - halo.fetch.mine()[d].start() : 0;
    box.sizes[d] = cut ? box.sizes[d] : halo.fetch.sizes()[d];
  }
  const auto& piece = arriving.piece;
  return halo.fetch.box(arriving, box, strides_like(box.sizes, piece), neutral_value(halo.padding, piece.scalar_type()));
}

// Replaces the piece by the piece with its halo, if the kernel has to fetch the halo.
void fetch_all(const KernelRun& run, const Solution::Halo& halo) {
  const auto piece = run.arg(0).toTensor();
  run.arg(0) = halo.joined(piece, strides_like(halo.fetch.sizes(), piece));
}

// The results of torch's op on the piece as it is, while the halo travels. Then the op is ready for boxes around the piece's
// edges.
std::vector<c10::IValue> results_of_piece(
    const KernelRun& run, const Windows& windows, const SplitConvolution& split, HaloExchange::HaloInFlight& arriving) {
  for (int64_t i = 0; i < windows.ndim(); ++i) {
    set_along(run, windows, "padding", i, split.padding[i]);
  }
  auto results = results_of_op(run);
  arriving.messages.wait();
  replace_padding(run, windows);
  return results;
}

void piece_first(KernelRun& run, const Solution::Halo& halo, const Windows& windows, const SplitConvolution& split) {
  auto arriving = halo.fetch.start(run.arg(0).toTensor());
  const auto out = results_of_piece(run, windows, split, arriving)[0].toTensor();
  for (const auto& box : split.rest) {
    auto reads = box;
    auto part = out;
    for (int64_t i = 0; i < windows.ndim(); ++i) {
      if (const auto share = share_of(run, windows, i); share.cut) {
        const auto w = window(windows, box, i);
        reads.offsets[i + 2] = w.start;
        reads.sizes[i + 2] = w.length;
        part = part.narrow(i + 2, box.offsets[i + 2] - share.makes.start, box.sizes[i + 2]);
      }
    }
    run.arg(0) = fetched(run, halo, windows, arriving, reads);
    part.copy_(results_of_op(run)[0].toTensor());
  }
  run.returns({out});
}

// A transposed convolution. Without padding, torch's first result is the first one that the operand's first index contributes to.
// So results before and behind this rank's have to be dropped: torch drops `padding` results on both sides, and `output_padding`
// fewer behind.
NativeIntervals dropped_by_torch(const KernelRun& run, const Windows& windows, int64_t i, const WindowShare& share) {
  const auto& taps = windows.space[i].taps;
  const auto cells = taps.cells(share.read());
  const auto drop = share.makes.start - cells.start;
  const auto surplus = cells.length - drop - share.makes.length;
  if (drop < 0 || drop < surplus || drop - surplus >= std::max(taps.stride, taps.dilation)) {
    whole_windows(run, windows, i, share);
    return {share.read(), cells};
  }
  set_along(run, windows, "padding", i, drop);
  set_along(run, windows, "output_padding", i, drop - surplus);
  return {share.read(), share.makes};
}

// If the input's channels are sharded, one rank along them adds the bias.
void convolution_kernel(KernelRun& run) {
  add_bias_once(run, 2, kIn);
  const auto* halo = run.solution.halo(0);
  if (!halo) {
    return call_op_nonempty(run);
  }
  const auto& windows = kernel_data<Windows>(run.solution);
  if (halo->awaits(run.arg(0).toTensor())) {
    if (const auto split = split_of(run, *halo, windows)) {
      return piece_first(run, *halo, windows, *split);
    }
    fetch_all(run, *halo);
  }
  const auto bias = run.arg(2).isTensor() ? run.arg(2).toTensor() : at::Tensor(); // torch may also give an undefined one
  bool adds = true; // torch's op adds the bias: not where zeros are added to its results, or where it has nothing to do
  const auto each = [&](int64_t i, const WindowShare& share) {
    const auto native = (windows.reversed ? dropped_by_torch : whole_windows)(run, windows, i, share);
    adds = adds && native.made == share.makes;
    run.arg(2) = adds ? run.arg(2) : c10::IValue();
    return native;
  };
  adds = run_windowed(run, windows, each, call_op_nonempty) && adds;
  if (bias.defined() && !adds) {
    std::vector<int64_t> along_channels(windows.ndim() + 1, 1);
    along_channels[0] = -1;
    run.stack.back() = run.stack.back().toTensor().add(bias.view(along_channels));
  }
}

// The meta kernel does not recognize a batch of one as channels_last.
std::optional<DimOrder> order_of_result(const TensorArg& input, const TensorArg& weight) {
  const auto order = channels_last_order(input);
  return order ? order : channels_last_order(weight);
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
  rule.operands.emplace_back(with_space(input.dim(), f.n, f.in));
  rule.operands.emplace_back(weight_dims(weight, f, transposed));
  const bool biased = call.operand(2) >= 0;
  if (biased) {
    rule.operands.emplace_back(Dims{Dim(f.out)});
  }
  rule.results.emplace_back(with_space(input.dim(), f.n, f.out));
  rule.results[0].order = order_of_result(input, weight);
  auto windows = windows_of(call, input, weight);
  if (windows.ndim()) {
    windows.reversed = transposed;
    rule.spread.push_back(f.n);
    auto& sizes = rule.results[0].sizes;
    sizes = {input.sym_size(0), transposed ? weight.sym_size(1) * grouped : weight.sym_size(0)};
    for (int64_t i = 0; i < windows.ndim(); ++i) {
      const auto& along = windows.space[i];
      sizes.push_back(transposed ? along.size : along.count);
      const auto o = rule.factor({.size = sizes.back()});
      rule.operands[0].dims[i + 2] = rule.windows(o, along.taps.reach(transposed));
      rule.results[0].dims[i + 2] = o;
    }
    rule.operands[0].awaited = !transposed;
  }
  const uint64_t bias = biased ? 0b100 : 0;
  rule.jointly_linear(0b001 | bias);
  rule.jointly_linear(0b010 | bias);
  rule.always(convolution_kernel);
  rule.kernel_data = std::move(windows);
  return rule;
}

// The results whose gradients this rank adds to the bias's: from its first result to the next rank's first, and at the edges of
// the whole all results beyond. `read` contains them.
Interval own_results(const Reach& readers, const Interval& run, const PaddedInterval& read, int64_t size, int64_t results) {
  const auto at = [&](int64_t i) { return i <= 0 ? 0 : i >= size ? results : std::clamp<int64_t>(readers.lo(i), 0, results); };
  const auto start = at(run.start), end = at(run.end());
  return {start < end ? start - read.start() : 0, end - start};
}

// The bias's gradient, from the results' gradients with their halo (argument 0). `piece`: the part of these to add up, if the
// caller knows it.
at::Tensor bias_gradient(const KernelRun& run, const Windows& windows, const at::Tensor& piece) {
  auto own = piece.defined() ? piece : run.arg(0).toTensor();
  for (int64_t i = 0; i < windows.ndim() && !piece.defined() && !is_empty(own); ++i) {
    const auto& along = windows.space[i];
    const bool transposed = windows.reversed != windows.backward;
    if (const auto share = share_of(run, windows, i); share.cut) {
      const auto input = transposed ? along.count : along.size, results = transposed ? along.size : along.count;
      const auto ours = own_results(along.taps.readers(transposed), share.makes, share.reads, input, results);
      own = own.narrow(i + 2, ours.start, ours.length);
    }
  }
  std::vector<int64_t> over(windows.ndim() + 1, 0);
  std::iota(over.begin() + 1, over.end(), 2);
  return own.sum(over);
}

// What the op gets along a cut dim to make the gradients of this rank's piece of the input, from the gradients of all results
// that read it. The windows of these results may stick out of the piece: there the piece is padded, by torch, evenly on both
// sides; then gradients of results that lie only in that padding are zeros.
NativeIntervals padded_piece(const KernelRun& run, const Windows& windows, int64_t i, const WindowShare& share) {
  const auto& taps = windows.space[i].taps;
  const auto &mine = share.makes, read = share.read();
  if (!windows.reversed) { // transposed: its results without padding are those read, but for what the bias alone needs
    whole_windows(run, windows, i, share);
    return {taps.cells(mine), mine};
  }
  const auto cells = taps.cells(read);
  const auto left = mine.start - cells.start, right = cells.length - left - mine.length;
  const auto before = std::max({int64_t{0}, ceil_div(-left, taps.stride), ceil_div(right - left, taps.stride)});
  auto padded = taps;
  padded.padding = left + before * taps.stride;
  set_along(run, windows, "padding", i, padded.padding);
  return {{read.start - before, padded.results(mine.length)}, mine};
}

bool wants(const KernelRun& run, int64_t gradient) {
  return run.arg(argument(run, "output_mask")).toBoolList()[gradient];
}

// From now on the op makes no gradient of the bias.
void without_bias(const KernelRun& run) {
  run.arg(argument(run, "output_mask")) = c10::List<bool>({wants(run, 0), wants(run, 1), false});
}

void backward_with_halo(KernelRun& run, const Windows& windows, const at::Tensor& piece = {}) {
  const auto bias = wants(run, 2) ? bias_gradient(run, windows, piece) : at::Tensor();
  without_bias(run);
  const auto each = [&](int64_t i, const WindowShare& share) { return padded_piece(run, windows, i, share); };
  run_windowed(run, windows, each, [](KernelRun& run) {
    const bool any = wants(run, 0) || wants(run, 1);
    any ? call_op_nonempty(run) : run.returns({at::Tensor(), at::Tensor(), at::Tensor()});
  });
  run.stack.back() = bias;
}

void replace_bias_sizes(const KernelRun& run) {
  auto& sizes = run.arg(argument(run, "bias_sizes"));
  if (!sizes.isNone()) {
    const auto channels = run.arg(0).toTensor().sym_size(1);
    sizes = c10::SymIntArrayRef({channels == 0 ? c10::SymInt(1) : channels});
  }
}

// The gradients from this rank's results alone. The contributions of other ranks' results are linear in those, and are added
// later: to the input's gradient near the cuts, and to the weight's.
void backward_piece_first(KernelRun& run, const Solution::Halo& halo, const Windows& windows, const SplitConvolution& split) {
  const auto input = run.arg(1).toTensor();
  auto arriving = halo.fetch.start(run.arg(0).toTensor());
  replace_bias_sizes(run);
  auto results = results_of_piece(run, windows, split, arriving);
  without_bias(run);
  for (const auto& box : split.rest) {
    auto common = input; // of the input on this rank, what the results of the box read
    auto to = results[0].toTensor();
    CropOrPad padded, cropped;
    for (int64_t i = 0; i < windows.ndim() && !is_empty(common); ++i) { // with a stride, windows may leave out what lies between
      const auto share = share_of(run, windows, i);
      if (!share.cut) {
        continue;
      }
      const auto w = window(windows, box, i);
      const auto& mine = share.makes;
      const auto held = intersection(mine, w);
      padded.along(i + 2, held, w);
      cropped.along(i + 2, w, held);
      common = common.narrow(i + 2, held.length ? held.start - mine.start : 0, held.length);
      to = to.defined() && held.length ? to.narrow(i + 2, held.start - mine.start, held.length) : to;
    }
    if (is_empty(common)) {
      continue;
    }
    run.arg(0) = fetched(run, halo, windows, arriving, box);
    run.arg(1) = padded(common);
    const auto more = results_of_op(run);
    if (wants(run, 0)) {
      to.add_(cropped(more[0].toTensor()));
    }
    if (wants(run, 1)) {
      results[1].toTensor().add_(more[1].toTensor());
    }
  }
  run.returns(std::move(results));
}

// Whether the pieces of the results' gradients fit the sums of the weight's and the bias's gradients: along mesh dims that are
// summed over, each gradient is in one piece; along others it is in all. So a mesh dim must cut the pieces along the dim whose
// factor it cuts, and channels alike. The answer is the same on all ranks.
bool pieces_are_apart(const KernelRun& run, const Windows& windows) {
  const auto& grad = run.operands[0];
  const auto& layout = *grad.layout;
  const auto& bias = *run.solution.results[2].layout;
  for (int64_t m = 0; m < layout.ndim(); ++m) {
    if (run.mesh().size(m) == 1) {
      continue;
    }
    const auto& placement = layout.placement(m);
    const auto cuts = [&](int64_t d) {
      const auto factor = d == 0 ? 0 : d == 1 ? kOut : d + windows.more_factors;
      return static_cast<bool>(run.mesh_dims(factor) >> m & 1);
    };
    bool apart = true;
    for (int64_t d = 0; d < grad.dim(); ++d) {
      apart = apart && placement.is_shard(d) == cuts(d);
    }
    if (!apart || (cuts(1) && !same_cut(layout.cut(m), bias.cut(m)))) {
      return false;
    }
  }
  return true;
}

void convolution_backward_kernel(KernelRun& run) {
  const auto* halo = run.solution.halo(0);
  if (!halo) {
    replace_bias_sizes(run);
    return call_op_nonempty(run);
  }
  const auto& windows = kernel_data<Windows>(run.solution);
  if (!halo->awaits(run.arg(0).toTensor())) {
    return backward_with_halo(run, windows);
  }
  const auto piece = run.arg(0).toTensor();
  const bool apart = pieces_are_apart(run, windows);
  if (apart && (wants(run, 0) || wants(run, 1))) {
    if (const auto split = split_of(run, *halo, windows)) {
      return backward_piece_first(run, *halo, windows, *split);
    }
  }
  fetch_all(run, *halo);
  backward_with_halo(run, windows, apart ? piece : at::Tensor());
}

Rule convolution_backward(const Call& call) {
  if (call.tensors[1].sym_size(1) == 0) {
    return without_channels(call);
  }
  Rule rule;
  const bool transposed = call.flag(call.position("transposed"));
  const auto f = convolution_factors(rule, call.integer(call.position("groups")) != 1);
  const auto &grad = call.tensors[0], &input = call.tensors[1], &weight = call.tensors[2];
  rule.operands.emplace_back(with_space(grad.dim(), f.n, f.out));
  rule.operands.emplace_back(with_space(input.dim(), f.n, f.in));
  rule.operands.emplace_back(weight_dims(weight, f, transposed));
  auto windows = windows_of(call, input, weight);
  for (int64_t i = 0; i < windows.ndim(); ++i) {
    const auto at = rule.factor({.reduce = ReduceOp::Sum, .size = input.size(i + 2)});
    rule.operands[0].dims[i + 2] = rule.windows(at, windows.space[i].taps.readers(transposed));
    rule.operands[1].dims[i + 2] = at;
  }
  rule.results.emplace_back(rule.operands[1].dims);
  rule.results.emplace_back(rule.operands[2].dims);
  rule.results.emplace_back(Dims{Dim(f.out)});
  rule.results[2].same_over = uint64_t{1} << f.in;
  if (windows.ndim()) {
    windows.backward = true;
    windows.reversed = !transposed;
    rule.spread.push_back(f.n);
    rule.operands[0].awaited = !transposed;
    rule.results[0].sizes = input.sym_sizes();
    rule.results[1].sizes = weight.sym_sizes();
    rule.results[2].sizes = {grad.sym_size(1)};
  }
  rule.kernel_data = std::move(windows);
  rule.linear_in({0});
  rule.always(convolution_backward_kernel);
  return rule;
}

} // namespace

int64_t min_overlap_bytes() {
  return g_second_call.load(std::memory_order_relaxed);
}
void set_min_overlap_bytes(int64_t bytes) {
  g_second_call.store(bytes, std::memory_order_relaxed);
}

void register_convolution(Registry& r) {
  r.add("convolution", {"convolution", "convolution_overrideable"}, convolution, {.symbols = true, .one_dtype = ~uint64_t{0}});
  r.add(
      "convolution", {"convolution_backward"}, convolution_backward,
      {.autograd = formulas::convolution_backward, .symbols = true});
  r.add("convolution", {"convolution_backward_overrideable"}, convolution_backward, {.symbols = true});
}

} // namespace shardtensor::rules
