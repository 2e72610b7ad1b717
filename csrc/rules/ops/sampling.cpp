// grid_sample on images and volumes. The space of the input and of the grid may be cut. The grid's values say which elements
// are read, so the ranks first tell each other which rows and columns they read, and then exchange these.
#include "rules/batched.h"
#include "rules/deferred_op.h"
#include "rules/kernel_utils.h"
#include "rules/owner_exchange.h"
#include "rules/pad_empty.h"
#include "rules/registry.h"
#include "rules/windows.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>

#include <algorithm>

namespace shardtensor::rules {

namespace {

constexpr int64_t kLead = 2; // batch and channels

// How the grid is read, in torch's numbers.
struct GridSampleMode {
  int64_t interpolation, padding; // 0 linear, 1 nearest, 2 cubic; 0 zeros, 1 border, 2 reflection
  bool aligned;
};

at::Tensor reflected(const at::Tensor& x, int64_t size, bool aligned) {
  const double low = aligned ? 0 : -0.5, span = aligned ? static_cast<double>(size - 1) : static_cast<double>(size);
  if (span == 0) {
    return at::zeros_like(x);
  }
  const auto from = x.sub(low).abs();
  const auto extra = from.fmod(span), turns = from.div(span, "floor");
  return at::where(turns.remainder(2).eq(0), extra.add(low), extra.neg().add(span + low));
}

// The run from the first to the last index of a dim that these coordinates of a grid read, with one more at each end: torch's
// kernels round differently.
Interval read_by(const at::Tensor& coordinates, int64_t size, const GridSampleMode& how) {
  const auto type = coordinates.scalar_type();
  const Interval all{0, size};
  if (coordinates.numel() == 0) {
    return {0, 0};
  }
  constexpr int64_t kMost = 1 << 20; // beyond, and in half precision, rounding moves a reflected position by more than one
  if ((type != at::kFloat && type != at::kDouble) || size > kMost) {
    return all;
  }
  const auto g = coordinates.to(at::kDouble);
  const auto place =
      how.aligned ? g.add(1).mul(static_cast<double>(size - 1) / 2) : g.add(1).mul(static_cast<double>(size)).sub(1).div(2);
  auto x = place;
  std::vector<at::Tensor> taps;
  const bool cubic = how.interpolation == 2;
  if (!cubic && how.padding == 2) {
    x = reflected(x, size, how.aligned);
  }
  for (int64_t tap = cubic ? -1 : 0; tap <= (cubic ? 2 : 1); ++tap) {
    const auto at = x.floor().add(tap);
    taps.push_back(cubic && how.padding == 2 ? reflected(at, size, how.aligned) : at);
  }
  auto at = at::stack(taps);
  at = how.padding ? at.clamp(0, size - 1) : at;
  const auto inside = at.ge(-1).logical_and(at.le(size));
  const auto least = at.masked_fill(inside.logical_not(), size + 1).amin(),
             most = at.masked_fill(inside.logical_not(), -2).amax();
  const auto known = how.padding == 2 ? place.abs().le(kMost) : place.isfinite();
  const auto found = at::stack({least, most, known.all().to(at::kDouble)}).cpu();
  const auto* ends = found.const_data_ptr<double>();
  if (ends[2] == 0) {
    return all;
  }
  const auto lo = std::max<int64_t>(0, static_cast<int64_t>(ends[0]) - 1);
  const auto hi = std::min(size, static_cast<int64_t>(ends[1]) + 2);
  return lo < hi ? Interval{lo, hi - lo} : Interval{0, 0};
}

// The boxes that every rank reads of operand `read`, which is cut in space.
class GridReads {
 public:
  GridReads(const KernelRun& run, size_t read, const at::Tensor& grid, const GridSampleMode& how)
      : run_(run), layout_(*run.operands[read].layout), sizes_(run.operands[read].sizes()) {
    const auto space = static_cast<int64_t>(sizes_.size()) - kLead;
    std::vector<int64_t> ends;
    for (int64_t i = 0; i < space; ++i) {
      const bool cut = layout_.shards(kLead + i);
      const auto mine = cut ? read_by(grid.select(-1, space - 1 - i), sizes_[kLead + i], how) : Interval{0, sizes_[kLead + i]};
      ends.push_back(mine.start);
      ends.push_back(mine.length);
    }
    auto all = at::tensor(ends, at::kLong).to(grid.device()).unsqueeze(0);
    for (int64_t m = layout_.ndim() - 1; m >= 0; --m) {
      all = gather_slices(all, 0, run.mesh(), m);
    }
    all = all.cpu();
    const auto* numbers = all.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < run.mesh().size(); ++i) { // coordinate_at()'s order: the last mesh dim varies fastest
      auto& boxes = reads_.emplace_back();
      for (int64_t d = 0; d < space; ++d) {
        boxes.push_back({numbers[2 * (i * space + d)], numbers[2 * (i * space + d) + 1]});
      }
    }
  }

  // The operand in its whole space, with the values that this rank reads. The others are not set.
  at::Tensor window(const at::Tensor& piece) const {
    const HaloExchange fetch(layout_, sizes_, [&](const Coordinate& at) {
      PaddedBox out;
      for (int64_t d = 0; d < static_cast<int64_t>(sizes_.size()); ++d) {
        out.push_back(
            {0, d < kLead ? layout_.intervals(d, sizes_[d], at)[0] : reads_[layout_.mesh().index_of(at)][d - kLead], 0});
      }
      return out;
    });
    std::vector<int64_t> strides(sizes_.size(), 1);
    for (auto d = static_cast<int64_t>(sizes_.size()) - 2; d >= 0; --d) {
      strides[d] = strides[d + 1] * std::max<int64_t>(fetch.sizes()[d + 1], 1);
    }
    const auto values = fetch(piece, strides, 0);
    auto out = at::empty(space_of(piece), piece.options());
    narrowed(out, reads_[layout_.mesh().index_of(run_.mesh().coordinate())]).copy_(values);
    return out;
  }

  // The reverse: from gradients of the whole space to the gradient of this rank's piece, with the contributions of other ranks
  // added.
  at::Tensor back(const at::Tensor& grad) const {
    const auto& mesh = run_.mesh();
    const auto& here = mesh.coordinate();
    const auto& read = reads_[mesh.index_of(here)];
    const auto held = piece_at(here);
    std::vector<std::pair<int64_t, int64_t>> row; // ranks that differ along the mesh dims that cut space, and their numbers
    for (int64_t i = 0; i < mesh.size(); ++i) {
      const auto at = mesh.coordinate_at(i);
      bool same = true;
      for (int64_t m = 0; m < layout_.ndim(); ++m) {
        const auto& p = layout_.placement(m);
        same = same && (at[m] == here[m] || (p.is_shard() && p.dim >= kLead));
      }
      if (same) {
        row.emplace_back(mesh.rank_at(at), i);
      }
    }
    std::sort(row.begin(), row.end());
    std::vector<int64_t> ranks, received;
    std::vector<at::Tensor> leaving;
    const auto planes = grad.size(0) * grad.size(1);
    for (const auto& [rank, i] : row) {
      ranks.push_back(rank);
      leaving.push_back(narrowed(grad, common(read, piece_at(mesh.coordinate_at(i)))));
      received.push_back(planes);
      for (const auto& run : common(reads_[i], held)) {
        received.back() *= run.length;
      }
    }
    const auto arrived = exchange_parts(leaving, received, ranks, mesh);
    std::vector<int64_t> sizes{grad.size(0), grad.size(1)};
    for (const auto& run : held) {
      sizes.push_back(run.length);
    }
    auto out = at::zeros(sizes, grad.options());
    for (size_t k = 0; k < row.size(); ++k) {
      auto inside = common(reads_[row[k].second], held);
      for (size_t d = 0; d < inside.size(); ++d) {
        inside[d].start -= inside[d].length ? held[d].start : 0;
      }
      const auto into = narrowed(out, inside);
      into.add_(arrived[k].view_as(into));
    }
    return out;
  }

 private:
  using SpaceBox = std::vector<Interval>; // one per dim of space

  static at::Tensor narrowed(at::Tensor t, const SpaceBox& to) {
    for (size_t d = 0; d < to.size(); ++d) {
      t = t.narrow(kLead + static_cast<int64_t>(d), to[d].start, to[d].length);
    }
    return t;
  }
  static SpaceBox common(const SpaceBox& a, const SpaceBox& b) {
    SpaceBox out;
    for (size_t d = 0; d < a.size(); ++d) {
      const auto both = intersection(a[d], b[d]);
      out.push_back(both.length ? both : Interval{0, 0});
    }
    return out;
  }
  SpaceBox piece_at(const Coordinate& at) const {
    SpaceBox out;
    for (size_t d = kLead; d < sizes_.size(); ++d) {
      out.push_back(layout_.intervals(static_cast<int64_t>(d), sizes_[d], at)[0]);
    }
    return out;
  }
  std::vector<int64_t> space_of(const at::Tensor& piece) const {
    std::vector<int64_t> out{piece.size(0), piece.size(1)};
    out.insert(out.end(), sizes_.begin() + kLead, sizes_.end());
    return out;
  }

  const KernelRun& run_;
  const Layout& layout_;
  Sizes sizes_; // of the operand
  std::vector<SpaceBox> reads_;
};

GridSampleMode how_of(const KernelRun& run) {
  return {
      run.arg(argument(run, "interpolation_mode")).toInt(), run.arg(argument(run, "padding_mode")).toInt(),
      run.arg(argument(run, "align_corners")).toBool()};
}

bool cuts_space(const Layout& layout) {
  return layout.sharded_dims() >> kLead;
}

void sample_kernel(KernelRun& run) {
  if (cuts_space(*run.operands[0].layout)) {
    if (!may_ask_values(run.arg(0).toTensor())) {
      return defer_call(run, {sizes_of_piece(run)});
    }
    const GridReads reading(run, 0, run.arg(1).toTensor(), how_of(run));
    run.arg(0) = reading.window(run.arg(0).toTensor());
  }
  call_op_nonempty(run);
}

// (gradient, input, grid, ...) -> gradients of input and grid, if output_mask asks for them
void sample_backward_kernel(KernelRun& run) {
  const auto& layout = *run.operands[1].layout;
  if (!cuts_space(layout)) {
    return call_op_nonempty(run);
  }
  const auto input = run.arg(1).toTensor(), grid = run.arg(2).toTensor();
  const bool wanted = run.arg(argument(run, "output_mask")).toBoolList()[0];
  if (!may_ask_values(input)) {
    return defer_call(run, {wanted ? std::optional(input.sym_sizes().vec()) : std::nullopt, grid.sym_sizes().vec()});
  }
  const GridReads reading(run, 1, grid, how_of(run));
  run.arg(1) = reading.window(input);
  const auto space = run.arg(1).toTensor();
  at::Tensor to_input, to_grid;
  if (is_empty(run.arg(0).toTensor())) {
    to_input = at::zeros_like(space);
    to_grid = at::zeros_like(grid);
  } else {
    const auto results = results_of_op(run);
    to_input = results[0].toTensor();
    to_grid = results[1].toTensor();
  }
  run.returns({wanted ? reading.back(to_input) : at::Tensor(), to_grid});
}

// Dims of input, grid and result. Where input is cut it stays so.
struct GridSampleDims {
  Dims input, grid, result;
};

// Nothing if no dim of space is cut, or if torch refuses the call.
std::optional<GridSampleDims> sampled(const Call& call, Rule& rule, const TensorArg& input, const TensorArg& grid) {
  const auto space = input.dim() - kLead;
  if ((space != 2 && space != 3) || grid.dim() != input.dim()) {
    return std::nullopt;
  }
  bool cut = false; // asked before any size, so that a graph keeps its symbols
  for (int64_t i = 0; i < space; ++i) {
    cut = cut || input.layout->shards(kLead + i) || grid.layout->shards(1 + i);
  }
  if (!cut || grid.size(-1 + grid.dim()) != space || grid.size(0) != input.size(0) || grid.dtype != input.dtype) {
    return std::nullopt;
  }
  for (int64_t i = 0; i < space; ++i) {
    if (input.size(kLead + i) < 1 || grid.size(1 + i) < 1) {
      return std::nullopt;
    }
  }
  const auto mode = call.integer(call.position("interpolation_mode")), padding = call.integer(call.position("padding_mode"));
  if (mode < 0 || mode > (space == 2 ? 2 : 1) || padding < 0 || padding > 2) {
    return std::nullopt;
  }
  const auto batch = rule.factor(), channels = rule.reduced(ReduceOp::Sum); // for the grid's gradient
  GridSampleDims out{{batch, channels}, {batch}, {batch, channels}};
  for (int64_t i = 0; i < space; ++i) {
    // Reduced for the gradient of an input that is not cut.
    const auto at = rule.factor({.reduce = ReduceOp::Sum, .size = grid.size(1 + i)});
    out.grid.emplace_back(at);
    out.result.emplace_back(at);
    out.input.push_back(
        input.layout->shards(kLead + i) ? rule.windows(at, {input.size(kLead + i), grid.size(1 + i), 0, 0}) : Dim(kNone));
  }
  out.grid.emplace_back(kNone);
  return out;
}

Operand kept(Dims dims) {
  Operand out(std::move(dims));
  out.kept_cut = true;
  return out;
}

// If sampled() returns nothing: only the batch may be cut.
Rule by_batch(const Call& call, const char* images, const char* volumes) {
  return linear(batched(call, call.tensors[0].dim() == 4 ? images : volumes), {0}); // a gradient has its input's dims
}

Rule sample(const Call& call) {
  Rule rule;
  const auto &input = call.tensors[0], &grid = call.tensors[1];
  const auto dims = sampled(call, rule, input, grid);
  if (!dims) {
    return by_batch(call, "NC..,N...->NC..", "NC...,N....->NC...");
  }
  rule.operands = {kept(dims->input), Operand(dims->grid)};
  auto sizes = input.sym_sizes();
  for (int64_t d = kLead; d < input.dim(); ++d) {
    sizes[d] = grid.sym_size(d - 1);
  }
  rule.results = {Result(dims->result, sizes)};
  rule.linear_in({0});
  rule.always(sample_kernel);
  return rule;
}

Rule sample_backward(const Call& call) {
  Rule rule;
  const auto &input = call.tensors[1], &grid = call.tensors[2];
  const auto dims = sampled(call, rule, input, grid);
  if (!dims) {
    return by_batch(call, "N...,N...,N...->N...,N...", "N....,N....,N....->N....,N....");
  }
  rule.operands = {Operand(dims->result), kept(dims->input), Operand(dims->grid)};
  rule.results = {Result(dims->input, input.sym_sizes()), Result(dims->grid, grid.sym_sizes())};
  rule.linear_in({0});
  rule.always(sample_backward_kernel);
  return rule;
}

} // namespace

void register_sampling(Registry& r) {
  const Options two{.takes = kReals, .one_dtype = 0b11}, three{.takes = kReals, .one_dtype = 0b111};
  r.add("sampling", {"_grid_sampler_2d_cpu_fallback", "grid_sampler_2d", "grid_sampler_3d"}, sample, two);
  r.add("sampling", {"grid_sampler_2d_backward", "grid_sampler_3d_backward"}, sample_backward, three);
}

} // namespace shardtensor::rules
