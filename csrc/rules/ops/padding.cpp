// Padding, along any dim: with a number, each piece adding its share; with the border's values, each piece reading what it shows.
#include "rules/empties.h"
#include "rules/exact.h"
#include "rules/pieces.h"
#include "rules/registry.h"
#include "rules/windows.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace shardtensor::rules {

namespace {

struct Padded {
  SymSizes sizes; // of the result
};

// Every piece adds its share of the padding.
void pad_kernel(Run& run) {
  auto pad = run.arg(1).toSymIntVector();
  const auto n = static_cast<int64_t>(run.operands[0].dim());
  const auto& to = *run.solution.results[0].layout;
  for (size_t i = 0; i * 2 < pad.size(); ++i) {
    const auto d = n - 1 - static_cast<int64_t>(i);
    if (!to.shards(d)) {
      continue;
    }
    const auto held = mine(run, 0, d), made = mine(to, d, noted<Padded>(run.solution).sizes[d]);
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
    // torch crops before it pads. Pieces might have enough to crop, or nothing.
    TORCH_CHECK(
        left >= 0, "narrow(): length must be non-negative: constant_pad_nd crops ", x.sym_size(d), " by ", before, " and ", after,
        " along dim ", d, ".");
    Factor f{.kernel = before != 0 || after != 0};
    // The factor's indices are those of the input and those of the result; each of both has a window of them.
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
  rule.notes = Padded{sizes};
  rule.operands.emplace_back(std::move(in));
  rule.results.emplace_back(std::move(out), std::move(sizes));
  rule.kernel = pad_kernel;
  if (call.arg(2).toScalar().equal(0)) {
    rule.linear.push_back(computes(call, 1, call.tensors[0].dtype));
  }
  return rule;
}

// ---- with the border's values ----

// Noted where space is cut.
struct Border {
  int64_t lead; // dims before space
  Beyond beyond;
  struct Sides {
    int64_t size, before, after; // of the input, along one dim
  };
  std::vector<Sides> sides;
};

// Nothing if torch refuses the padding, or if some of it is negative. `input`: the sizes of the input.
template <int64_t spatial, Beyond beyond>
std::optional<Border> border_of(const Call& call, c10::IntArrayRef input) {
  const auto pad = call.ints(call.position("padding"));
  const auto lead = static_cast<int64_t>(input.size()) - spatial;
  if (lead < 0 || static_cast<int64_t>(pad.size()) != 2 * spatial) {
    return std::nullopt;
  }
  Border border{lead, beyond, {}};
  for (int64_t i = 0; i < spatial; ++i) {
    const auto size = input[lead + i], before = pad[2 * (spatial - 1 - i)], after = pad[2 * (spatial - 1 - i) + 1];
    if (before < 0 || after < 0 || size < 1 || (beyond == Beyond::Reflect && (before >= size || after >= size))) {
      return std::nullopt;
    }
    border.sides.push_back({size, before, after});
  }
  return border;
}

// What is left to torch's op: the dims that are not cut. True if there is anything.
bool leave_rest(const Run& run, const Border& border) {
  const auto space = static_cast<int64_t>(border.sides.size());
  std::vector<int64_t> pad(2 * space, 0);
  bool any = false;
  for (int64_t i = 0; i < space; ++i) {
    if (!cut_run(run, border.lead + i)) {
      pad[2 * (space - 1 - i)] = border.sides[i].before;
      pad[2 * (space - 1 - i) + 1] = border.sides[i].after;
      any = any || border.sides[i].before || border.sides[i].after;
    }
  }
  run.arg(argument(run, "padding")) = pad;
  return any;
}

// Which index of the input each of the results from `start` on has, as source() in layout/reach.h.
at::Tensor sources(const Border::Sides& sides, Beyond beyond, const Interval& results, const at::Device& device) {
  const auto at = at::arange(results.start, results.start + results.length, at::TensorOptions(at::kLong).device(device));
  const auto e = at.sub(sides.before);
  return beyond == Beyond::Replicate ? e.clamp(0, sides.size - 1) : e.abs().sub(sides.size - 1).abs().neg().add(sides.size - 1);
}

// On a rank that makes nothing: runs what other ranks leave to torch's op, for its errors.
void returns_zeros(Run& run, const Border& border, at::Tensor zeros) {
  if (!leave_rest(run, border)) {
    return run.returns({std::move(zeros)});
  }
  run.call_op();
  run.stack.back() = std::move(zeros);
}

void border_kernel(Run& run) {
  const auto* halo = run.solution.halo(0);
  if (!halo) {
    return call_op_nonempty(run);
  }
  const auto& border = noted<Border>(run.solution);
  auto out = run.arg(0).toTensor();
  const auto sizes = sizes_of_piece(run);
  if (makes_nothing(sizes)) {
    run.arg(0) = stand_in(run, 0, border.lead, border.lead, [](int64_t) { return 1; });
    return returns_zeros(run, border, out.new_zeros_symint(sizes));
  }
  for (size_t i = 0; i < border.sides.size(); ++i) {
    const auto d = border.lead + static_cast<int64_t>(i);
    if (const auto* mine = cut_run(run, d)) {
      const auto& read = halo->fetch.mine()[d].inside;
      const auto& sides = border.sides[i];
      const auto start = mine->start - sides.before;
      if (start < 0 || start + mine->length > sides.size) {
        out = out.index_select(d, sources(sides, border.beyond, *mine, out.device()).sub(read.start));
      }
    }
  }
  run.arg(0) = out;
  leave_rest(run, border) ? run.call_op() : run.returns({out});
}

// Adds the gradients of all results that show an index of this rank's piece.
void border_backward_kernel(Run& run) {
  const auto* halo = run.solution.halo(0);
  if (!halo) {
    return call_op_nonempty(run);
  }
  const auto& border = noted<Border>(run.solution);
  auto grad = run.arg(0).toTensor();
  const auto input = run.arg(1).toTensor();
  if (is_empty(input) || is_empty(grad)) {
    run.arg(0) = stand_in(run, 0, border.lead, border.lead, [](int64_t) { return 1; });
    run.arg(1) = stand_in(run, 1, border.lead, border.lead, [](int64_t) { return 1; });
    return returns_zeros(run, border, at::zeros_like(input));
  }
  for (size_t i = 0; i < border.sides.size(); ++i) {
    const auto d = border.lead + static_cast<int64_t>(i);
    if (const auto* mine = cut_run(run, d)) {
      const auto& read = halo->fetch.mine()[d].inside;
      const auto at = sources(border.sides[i], border.beyond, read, grad.device()).sub(mine->start);
      std::vector<int64_t> along(grad.dim(), 1);
      along[d] = read.length;
      const auto inside = at::logical_and(at.ge(0), at.lt(mine->length)).view(along);
      auto sizes = grad.sym_sizes().vec();
      sizes[d] = mine->length;
      grad = grad.new_zeros_symint(sizes).index_add(
          d, at.clamp(0, mine->length - 1), at::where(inside, grad, at::zeros({}, grad.options())));
    }
  }
  run.arg(0) = grad;
  leave_rest(run, border) ? run.call_op() : run.returns({grad});
}

// Pieces may be empty. As in torch, of the whole only the batch may be.
void check_not_empty(const TensorArg& input, int64_t spatial) {
  for (auto d = input.dim() - spatial - 1; d >= 0 && d < input.dim() && input.dim() <= spatial + 2; ++d) {
    TORCH_CHECK(
        input.sym_size(d) != 0, "Expected ", spatial + 1, "D or ", spatial + 2,
        "D (batch mode) tensor with possibly 0 batch size and other non-zero dimensions for input, but got: ", input.sizes());
  }
}

template <int64_t spatial, Beyond beyond, bool backward>
Rule border_pad(const Call& call) {
  auto rule = planes(call, std::min<int64_t>(spatial, call.tensors[0].dim()));
  rule.linear_in({0});
  rule.always(call_op_nonempty);
  const auto& input = call.tensors[backward];
  if (!backward) {
    check_not_empty(input, spatial);
  }
  if (spatial == 2 && call.mesh.description().device_type == "cpu" && !input.has_symbols()) {
    rule.results[0].order = channels_last_order(input); // torch's meta kernel gives another
  }
  const auto border = cut_in_space(call, spatial) ? border_of<spatial, beyond>(call, input.sizes()) : std::nullopt;
  if (!border) {
    return rule;
  }
  rule.results[0].sizes = input.sym_sizes();
  for (int64_t i = 0; i < spatial; ++i) {
    const auto& [size, before, after] = border->sides[i];
    const Reach reach{1, 1, -before, -before, beyond};
    read_through(rule, border->lead + i, backward ? size : before + size + after, backward ? mirror(reach, size) : reach);
  }
  if (backward) {
    rule.operands[1].dims = rule.results[0].dims;
  }
  rule.operands[0].padding = std::nullopt;
  rule.notes = *border;
  rule.kernel = backward ? border_backward_kernel : border_kernel;
  return rule;
}

// The four ops of one number of dims.
template <int64_t spatial>
void register_border(
    Registry& r, const char* reflect, const char* reflect_backward, const char* replicate, const char* replicate_backward) {
  r.add("padding", {reflect}, border_pad<spatial, Beyond::Reflect, false>, {.symbols = true});
  r.add("padding", {reflect_backward}, border_pad<spatial, Beyond::Reflect, true>, {.symbols = true});
  r.add("padding", {replicate}, border_pad<spatial, Beyond::Replicate, false>, {.symbols = true});
  r.add("padding", {replicate_backward}, border_pad<spatial, Beyond::Replicate, true>, {.symbols = true});
}

} // namespace

void register_padding(Registry& r) {
  r.add("padding", {"constant_pad_nd"}, constant_pad, {.symbols = true});
  register_border<1>(r, "reflection_pad1d", "reflection_pad1d_backward", "replication_pad1d", "replication_pad1d_backward");
  register_border<2>(r, "reflection_pad2d", "reflection_pad2d_backward", "replication_pad2d", "replication_pad2d_backward");
  register_border<3>(r, "reflection_pad3d", "reflection_pad3d_backward", "replication_pad3d", "replication_pad3d_backward");
}

} // namespace shardtensor::rules
