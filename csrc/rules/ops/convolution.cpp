// Convolutions. Any dim may be cut: batch, channels, space.
#include "comm/values.h"
#include "redistribute/exchange.h"
#include "redistribute/identity.h"
#include "rules/empties.h"
#include "rules/pieces.h"
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

Dims with_space(const TensorArg& t, int64_t first, int64_t second) {
  return with_space(t.dim(), first, second);
}

Dims weight_dims(const TensorArg& t, const Factors& f, bool transposed) {
  return transposed ? with_space(t, f.in, f.out) : with_space(t, f.out, f.in);
}

// ---- space: where it is cut, the op needs no padding of its own (windows.h) ----

constexpr int64_t kBatch = 0, kOut = 2, kFirstSpace = 3; // the factors are n, in, out, and those of space

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

// ---- this rank's own piece first, while the halo travels ----

std::atomic<int64_t> g_second_call{int64_t{1} << 20};

// torch's op runs on the piece as it is, with the padding that brings its results where they belong. Then it runs on boxes around
// the piece's edges, for what reads the halo.
struct Split {
  std::vector<Taps> taps;       // per dim of space, as the call gives them
  std::vector<int64_t> padding; // the first call's
  std::vector<Box> rest;        // results that other ranks' input changes; backward: those of other ranks that read this piece
};

// What a run of results reads of the input, padding included.
Interval window(const Taps& taps, int64_t first, int64_t count) {
  return {first * taps.stride - taps.padding, (count - 1) * taps.stride + taps.span()};
}

// Nothing where torch's op on the piece alone would place its results elsewhere, or where the boxes would cost more than reading
// the piece once more, joined with its halo. Each rank decides for itself: the messages are the same.
std::optional<Split> split_of(const Run& run, const Solution::Halo& halo, bool backward) {
  const auto given = run.arg(0).toTensor(), input = run.arg(backward).toTensor(), weight = run.arg(backward + 1).toTensor();
  const auto gain = static_cast<int64_t>(input.nbytes()) - g_second_call.load(std::memory_order_relaxed);
  if (gain < 0 || given.numel() == 0 || input.numel() == 0 || weight.numel() == 0) {
    return std::nullopt;
  }
  Split split;
  Box all, own; // results that this rank makes or reads, and those that the first call does
  for (int64_t d = 0; d < input.dim(); ++d) {
    const auto piece = run.operands[0].layout->intervals(d, run.operands[0].size(d), run.mesh().coordinate())[0];
    const auto read = halo.fetch.mine()[d].inside;
    const auto* mine = d < 2 ? nullptr : run_along(run, d - 2);
    if (d >= 2) {
      split.taps.push_back(taps_of(run, weight, d - 2));
      split.padding.push_back(split.taps.back().padding);
    }
    if (!mine) { // all of this dim, by each call
      if (!(piece == read)) {
        return std::nullopt;
      }
      for (auto* box : {&all, &own}) {
        box->offsets.push_back(0);
        box->sizes.push_back(1);
      }
      continue;
    }
    const auto& taps = split.taps.back();
    const auto &in = backward ? *mine : piece, &out = backward ? piece : *mine;
    const auto in_end = in.start + in.length, out_end = out.start + out.length, read_end = read.start + read.length;
    auto shifted = taps;
    split.padding.back() = shifted.padding = in.start - window(taps, out.start, 1).start;
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
      const bool cut = d >= 2 && run_along(run, d - 2);
      bytes *= cut ? window(split.taps[d - 2], box.offsets[d], box.sizes[d]).length : input.size(d);
    }
    boxes += bytes;
  }
  constexpr int64_t kBoxes = 4; // what boxes cost over the piece: they are copied, and small calls are slower
  return gain < kBoxes * boxes ? std::nullopt : std::make_optional(std::move(split));
}

// A box of what this rank reads: `box` along the dims that are cut, in indices of the whole, and all of the others.
at::Tensor fetched(const Run& run, const Solution::Halo& halo, const Fetch::Arriving& arriving, Box box) {
  for (size_t d = 0; d < box.sizes.size(); ++d) {
    const bool cut = d >= 2 && run_along(run, static_cast<int64_t>(d) - 2);
    box.offsets[d] = cut ? box.offsets[d] - halo.fetch.mine()[d].start() : 0;
    box.sizes[d] = cut ? box.sizes[d] : halo.fetch.sizes()[d];
  }
  const auto& piece = arriving.piece;
  return halo.fetch.box(arriving, box, strides_like(box.sizes, piece), identity(halo.padding, piece.scalar_type()));
}

// The piece with all of its halo, in its place, where the kernel has to fetch that.
void fetch_all(const Run& run, const Solution::Halo& halo) {
  const auto piece = run.arg(0).toTensor();
  run.arg(0) = halo.joined(piece, strides_like(halo.fetch.sizes(), piece));
}

void piece_first(Run& run, const Solution::Halo& halo, const Split& split) {
  const auto space = static_cast<int64_t>(split.taps.size());
  auto arriving = halo.fetch.start(run.arg(0).toTensor());
  replace_ints(run, "padding", space, [&](int64_t i, int64_t) { return split.padding[i]; });
  const auto out = results_of_op(run)[0].toTensor();
  arriving.messages.wait();
  replace_padding(run, space);
  for (const auto& box : split.rest) {
    auto reads = box;
    auto part = out;
    for (int64_t i = 0; i < space; ++i) {
      if (const auto* mine = run_along(run, i)) {
        const auto w = window(split.taps[i], box.offsets[i + 2], box.sizes[i + 2]);
        reads.offsets[i + 2] = w.start;
        reads.sizes[i + 2] = w.length;
        part = part.narrow(i + 2, box.offsets[i + 2] - mine->start, box.sizes[i + 2]);
      }
    }
    run.arg(0) = fetched(run, halo, arriving, reads);
    part.copy_(results_of_op(run)[0].toTensor());
  }
  run.returns({out});
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
  if (halo->awaits(run.arg(0).toTensor())) {
    if (const auto split = split_of(run, *halo, false)) {
      return piece_first(run, *halo, *split);
    }
    fetch_all(run, *halo);
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
    const auto sizes = t->sym_sizes(), strides = t->sym_strides();
    const c10::SymIntArrayRef size(sizes), stride(strides);
    if (c10::is_channels_last_strides_2d(size, stride)) {
      return Order{0, 2, 3, 1};
    }
    if (c10::is_channels_last_strides_3d(size, stride)) {
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
    rule.operands[0].awaited = !transposed;
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
// `piece`: what of them gives the bias's gradient, if the caller knows.
void backward_with_halo(Run& run, const Solution::Halo& halo, const at::Tensor& piece = {}) {
  auto grad = run.arg(0).toTensor();
  const auto input = run.arg(1).toTensor(), weight = run.arg(2).toTensor();
  const auto space = weight.dim() - 2;
  const auto mask = run.arg(argument(run, "output_mask")).toBoolList();
  const bool transposed = run.arg(argument(run, "transposed")).toBool();
  auto own = piece.defined() ? piece : grad;
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
    if (!piece.defined()) {
      const auto ours =
          own_results(taps.readers(transposed), mine, read, run.operands[1].size(i + 2), run.operands[0].size(i + 2));
      own = own.narrow(i + 2, ours.start, ours.length);
    }
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
    bias = reads_nothing && !piece.defined() ? grad.new_zeros_symint({grad.sym_size(1)}) : own.sum(over);
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

void replace_bias_sizes(const Run& run) {
  auto& sizes = run.arg(argument(run, "bias_sizes"));
  if (!sizes.isNone()) {
    const auto channels = run.arg(0).toTensor().sym_size(1);
    sizes = c10::SymIntArrayRef({channels == 0 ? c10::SymInt(1) : channels});
  }
}

// The gradients of this rank's results alone, as if other ranks had none. What those of other ranks add is linear in them: they
// change the input's gradient near the cuts, and the weight's.
void backward_piece_first(Run& run, const Solution::Halo& halo, const Split& split) {
  const auto space = static_cast<int64_t>(split.taps.size());
  const auto input = run.arg(1).toTensor();
  const auto mask = run.arg(argument(run, "output_mask")).toBoolList();
  auto arriving = halo.fetch.start(run.arg(0).toTensor());
  replace_bias_sizes(run);
  replace_ints(run, "padding", space, [&](int64_t i, int64_t) { return split.padding[i]; });
  auto results = results_of_op(run);
  arriving.messages.wait();
  run.arg(argument(run, "output_mask")) = c10::List<bool>({mask.get(0), mask.get(1), false});
  replace_padding(run, space);
  for (const auto& box : split.rest) {
    auto common = input;
    std::vector<int64_t> pad(2 * space, 0);
    std::vector<Interval> runs(space); // of the input on this rank, by its own indices, that the results of the box read
    bool reads = true;
    for (int64_t i = 0; i < space; ++i) {
      const auto* mine = run_along(run, i);
      if (!mine) {
        runs[i] = {0, input.size(i + 2)};
        continue;
      }
      const auto w = window(split.taps[i], box.offsets[i + 2], box.sizes[i + 2]);
      const auto before = std::max<int64_t>(mine->start - w.start, 0);
      const auto after = std::max<int64_t>(w.start + w.length - mine->start - mine->length, 0);
      runs[i] = {w.start + before - mine->start, w.length - before - after};
      reads = reads && runs[i].length > 0; // with a stride, windows may leave out what lies between them
      if (!reads) {
        break;
      }
      common = common.narrow(i + 2, runs[i].start, runs[i].length);
      pad[2 * (space - 1 - i)] = before;
      pad[2 * (space - 1 - i) + 1] = after;
    }
    if (!reads) {
      continue;
    }
    run.arg(0) = fetched(run, halo, arriving, box);
    run.arg(1) = at::constant_pad_nd(common, pad);
    const auto more = results_of_op(run);
    if (mask.get(0)) {
      auto to = results[0].toTensor(), from = more[0].toTensor();
      for (int64_t i = 0; i < space; ++i) {
        to = to.narrow(i + 2, runs[i].start, runs[i].length);
        from = from.narrow(i + 2, pad[2 * (space - 1 - i)], runs[i].length);
      }
      to.add_(from);
    }
    if (mask.get(1)) {
      results[1].toTensor().add_(more[1].toTensor());
    }
  }
  run.returns(std::move(results));
}

// Whether each gradient of a result is in one rank's piece, of those that the weight's and the bias's gradients are added up
// over, and in all pieces of the others. So a mesh dim cuts the pieces along the dim whose factor it cuts, channels alike. All
// ranks find the same.
bool pieces_are_apart(const Run& run) {
  const auto& grad = run.operands[0];
  const auto& layout = *grad.layout;
  const auto& bias = *run.solution.results[2].layout;
  for (int64_t m = 0; m < layout.ndim(); ++m) {
    if (run.mesh().size(m) == 1) {
      continue;
    }
    const auto& placement = layout.placement(m);
    const auto cuts = [&](int64_t d) {
      const auto factor = d == 0 ? kBatch : d == 1 ? kOut : kFirstSpace + d - 2;
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

void convolution_backward_kernel(Run& run) {
  if (const auto* halo = run.solution.halo(0)) {
    if (!halo->awaits(run.arg(0).toTensor())) {
      return backward_with_halo(run, *halo);
    }
    const auto mask = run.arg(argument(run, "output_mask")).toBoolList();
    const auto piece = run.arg(0).toTensor();
    const bool apart = pieces_are_apart(run);
    if (apart && (mask.get(0) || mask.get(1))) {
      if (const auto split = split_of(run, *halo, true)) {
        return backward_piece_first(run, *halo, *split);
      }
    }
    fetch_all(run, *halo);
    return backward_with_halo(run, *halo, apart ? piece : at::Tensor());
  }
  replace_bias_sizes(run);
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
    rule.operands[0].awaited = !transposed;
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

int64_t second_call() {
  return g_second_call.load(std::memory_order_relaxed);
}
void set_second_call(int64_t bytes) {
  g_second_call.store(bytes, std::memory_order_relaxed);
}

void register_convolution(Registry& r) {
  Options same;
  same.one_dtype = ~uint64_t{0};
  same.symbols = true;
  r.add("convolution", {"convolution", "convolution_overrideable"}, convolution, same);
  r.add("convolution", {"convolution_backward", "convolution_backward_overrideable"}, convolution_backward, {.symbols = true});
}

} // namespace shardtensor::rules
