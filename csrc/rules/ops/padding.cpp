// Padding, along any dim. With a number, each piece adds its share. With the border's values, each piece reads the indices that
// its results show.
#include "rules/exact_dtypes.h"
#include "rules/kernel_utils.h"
#include "rules/pad_empty.h"
#include "rules/registry.h"
#include "rules/windows.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace shardtensor::rules {

namespace {

struct PaddedSizes {
  SymSizes sizes; // of the result
};

// Every piece adds its share of the padding.
void pad_kernel(KernelRun& run) {
  auto pad = run.arg(1).toSymIntVector();
  const auto n = static_cast<int64_t>(run.operands[0].dim());
  const auto& to = *run.solution.results[0].layout;
  for (size_t i = 0; i * 2 < pad.size(); ++i) {
    const auto d = n - 1 - static_cast<int64_t>(i);
    if (!to.shards(d)) {
      continue;
    }
    const auto held = mine(run, 0, d), made = mine(to, d, kernel_data<PaddedSizes>(run.solution).sizes[d]);
    const auto shift = plus(plus(pad[2 * i], held.start), -made.start);
    // If both pieces have elements, their offsets decide; an empty piece has no place.
    const auto before = made.length == 0       ? -held.length
                        : held.length == 0     ? made.length
                        : -held.length < shift ? shift
                                               : -held.length;
    pad[2 * i] = before;
    pad[2 * i + 1] = plus(plus(made.length, -held.length), -before);
  }
  run.returns({at::constant_pad_nd_symint(run.arg(0).toTensor(), pad, run.arg(2).toScalar())});
}

Rule constant_pad(const Call& call) {
  Rule rule;
  const auto& x = call.tensors[0];
  const auto pad = call.sym_ints(1);
  TORCH_CHECK(
      pad.size() % 2 == 0 && static_cast<int64_t>(pad.size()) <= 2 * x.dim(), "constant_pad_nd: length of pad is ", pad.size(),
      "; it must be even and at most twice the ", x.dim(), " dims of the input");
  Dims in, out;
  auto sizes = x.sym_sizes();
  for (int64_t d = 0; d < x.dim(); ++d) {
    const auto i = static_cast<size_t>(x.dim() - 1 - d) * 2;
    const c10::SymInt before = i < pad.size() ? pad[i] : 0, after = i < pad.size() ? pad[i + 1] : 0;
    const auto added = before + after;
    sizes[d] = added == 0 ? sizes[d] : sizes[d] + added; // torch cannot trace a symbol plus 0
    TORCH_CHECK(
        sizes[d] >= 0, "The input size ", x.sym_size(d), ", plus negative padding ", before, " and ", after,
        ", resulted in a negative output size, which is invalid.");
    auto left = x.sym_size(d);
    for (const auto& side : {before, after}) {
      left = side < 0 ? left + side : left;
    }
    // torch crops before it pads. A piece may have fewer indices than are cropped.
    TORCH_CHECK(
        left >= 0, "narrow(): length must be non-negative: constant_pad_nd crops ", x.sym_size(d), " by ", before, " and ", after,
        " along dim ", d, ".");
    Factor f{.kernel = before != 0 || after != 0};
    // The factor covers the indices of the input and of the result; each of the two is a window of it.
    const bool grows = before > 0 || after > 0, shrinks = before < 0 || after < 0;
    f.size = x.sym_size(d);
    for (const auto& side : {before, after}) {
      f.size = side > 0 ? f.size + side : f.size;
    }
    in.emplace_back(rule.factor(f));
    out.push_back(in.back());
    if (grows) {
      in.back().window = Dim::SymWindow{before > 0 ? before : c10::SymInt(0), 1, x.sym_size(d)};
    }
    if (shrinks) {
      out.back().window = Dim::SymWindow{before < 0 ? -before : c10::SymInt(0), 1, sizes[d]};
    }
  }
  rule.kernel_data = PaddedSizes{sizes};
  rule.operands.emplace_back(std::move(in));
  rule.results.emplace_back(std::move(out), std::move(sizes));
  rule.kernel = pad_kernel;
  if (call.arg(2).toScalar().equal(0)) {
    rule.linear.push_back(computes(call, 1, call.tensors[0].dtype));
  }
  return rule;
}

// ---- with the border's values ----

// The cells before and after a dim of space, in the list that torch's op takes: the last dim first.
int64_t& before(std::vector<int64_t>& pad, int64_t i) {
  return pad[pad.size() - 2 - 2 * i];
}
int64_t& after(std::vector<int64_t>& pad, int64_t i) {
  return pad[pad.size() - 1 - 2 * i];
}

// Nothing if space is not cut, if torch refuses the padding, or if some of it is negative.
template <PaddingMode beyond>
std::optional<Windows> border_of(const Call& call, const TensorArg& input, int64_t space) {
  if (input.dim() < space || !cut_in_space(call, space)) {
    return std::nullopt;
  }
  const auto given = call.ints(call.position("padding"));
  std::vector<int64_t> pad(given.begin(), given.end());
  if (static_cast<int64_t>(pad.size()) != 2 * space) {
    return std::nullopt;
  }
  Windows border;
  border.lead = input.dim() - space;
  for (int64_t i = 0; i < space; ++i) {
    const auto size = input.size(border.lead + i), more = before(pad, i), behind = after(pad, i);
    if (more < 0 || behind < 0 || size < 1 || (beyond == PaddingMode::Reflect && (more >= size || behind >= size))) {
      return std::nullopt;
    }
    border.space.push_back({size, more + size + behind, {1, 1, -more, -more, beyond}});
  }
  return border;
}

// Which index of the input each of these results has, as source_index() in layout/reach.h.
at::Tensor sources(const Windows::WindowedDim& along, const Interval& results, const at::Device& device) {
  const auto at = at::arange(results.start, results.end(), at::TensorOptions(at::kLong).device(device));
  const auto e = at.add(along.reach.first);
  const auto last = along.size - 1;
  return along.reach.beyond == PaddingMode::Replicate ? e.clamp(0, last) : e.abs().sub(last).abs().neg().add(last);
}

// The results along a dim, of what this rank reads.
at::Tensor with_border(const at::Tensor& x, int64_t dim, const Windows::WindowedDim& along, const WindowShare& share) {
  const auto start = share.makes.start + along.reach.first;
  if (start >= 0 && start + share.makes.length <= along.size) {
    return x;
  }
  return x.index_select(dim, sources(along, share.makes, x.device()).sub(share.reads.start()));
}

// Adds the gradients of all results that show an index of this rank's piece.
at::Tensor added_to_shown(const at::Tensor& grad, int64_t dim, const Windows::WindowedDim& along, const WindowShare& share) {
  const auto& mine = share.makes;
  const auto at = sources(along, share.read(), grad.device()).sub(mine.start);
  std::vector<int64_t> shape(grad.dim(), 1);
  shape[dim] = share.reads.length();
  const auto inside = at::logical_and(at.ge(0), at.lt(mine.length)).view(shape);
  auto sizes = grad.sym_sizes().vec();
  sizes[dim] = mine.length;
  return grad.new_zeros_symint(sizes).index_add(
      dim, at.clamp(0, mine.length - 1), at::where(inside, grad, at::zeros({}, grad.options())));
}

// Along a cut dim, the results or gradients are made here. The other dims are left to torch's op, if any are padded.
void border_kernel(KernelRun& run) {
  if (!run.solution.halo(0)) {
    return call_op_nonempty(run);
  }
  const auto& border = kernel_data<Windows>(run.solution);
  const auto make = [&](int64_t i, const WindowShare& share) {
    auto& list = run.arg(argument(run, "padding"));
    const auto given = guarded(list.toSymIntVector());
    std::vector<int64_t> pad(given.begin(), given.end());
    before(pad, i) = after(pad, i) = 0;
    list = std::move(pad);
    run.arg(0) = (border.reversed ? added_to_shown : with_border)(run.arg(0).toTensor(), border.lead + i, border.space[i], share);
    return NativeIntervals{share.read(), share.makes};
  };
  run_windowed(run, border, make, [](KernelRun& run) {
    const auto pad = run.arg(argument(run, "padding")).toIntVector();
    const bool rest = std::any_of(pad.begin(), pad.end(), [](int64_t n) { return n != 0; });
    rest ? run.call_op() : run.returns({run.arg(0)});
  });
}

// Pieces may be empty. Of the whole, only the batch may be empty, as in torch.
void check_not_empty(const TensorArg& input, int64_t space) {
  for (auto d = input.dim() - space - 1; d >= 0 && d < input.dim() && input.dim() <= space + 2; ++d) {
    TORCH_CHECK(
        input.sym_size(d) != 0, "Expected ", space + 1, "D or ", space + 2,
        "D (batch mode) tensor with possibly 0 batch size and other non-zero dimensions for input, but got: ", input.sizes());
  }
}

template <PaddingMode beyond, bool backward>
Rule border_pad(const Call& call) {
  const auto space = space_of(call.schema);
  auto rule = planes(call, std::min<int64_t>(space, call.tensors[0].dim()));
  rule.linear_in({0});
  rule.always(call_op_nonempty);
  const auto& input = call.tensors[backward];
  if (!backward) {
    check_not_empty(input, space);
  }
  if (space == 2 && call.mesh.description().device_type == "cpu" && !input.has_symbols()) {
    rule.results[0].order = channels_last_order(input); // torch's meta kernel gives another
  }
  if (auto border = border_of<beyond>(call, input, space)) {
    border->reversed = border->backward = backward;
    read_through(rule, *border, input.sym_sizes());
    rule.operands[0].padding = std::nullopt;
    rule.kernel_data = *border;
    rule.kernel = border_kernel;
  }
  return rule;
}

} // namespace

void register_padding(Registry& r) {
  const Options symbols{.symbols = true}, backward{.autograd = formulas::through_windows, .symbols = true};
  r.add("padding", {"_pad_circular"}, kAsOtherOps, {.autograd = formulas::pad_circular});
  r.add("padding", {"constant_pad_nd"}, constant_pad, symbols);
  r.add(
      "padding", {"reflection_pad1d", "reflection_pad2d", "reflection_pad3d"}, border_pad<PaddingMode::Reflect, false>, symbols);
  r.add(
      "padding", {"reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward"},
      border_pad<PaddingMode::Reflect, true>, backward);
  r.add(
      "padding", {"replication_pad1d", "replication_pad2d", "replication_pad3d"}, border_pad<PaddingMode::Replicate, false>,
      symbols);
  r.add(
      "padding", {"replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward"},
      border_pad<PaddingMode::Replicate, true>, backward);
}

} // namespace shardtensor::rules
