#include "redistribute/redistribute.h"

#include "comm/comm.h"
#include "kernels/boxes.h"
#include "redistribute/pad.h"
#include "redistribute/plan.h"
#include "redistribute/route.h"
#include "redistribute/transfer.h"

#include <ATen/ATen.h>

#include <limits>

namespace shardtensor {

namespace {

using c10::IntArrayRef;

struct State {
  at::Tensor local;
  LayoutPtr layout;
  IntArrayRef sizes;

  const Mesh& mesh() const {
    return layout->mesh();
  }
};

// What mesh dim `m` finds along tensor dim `dim` on this rank before it cuts: what the earlier mesh dims leave.
int64_t extent_before(const Layout& layout, int64_t m, int64_t dim, IntArrayRef sizes) {
  int64_t extent = sizes[dim];
  for (int64_t i = 0; i < m; ++i) {
    if (layout.placement(i).is_shard(dim)) {
      extent = layout.split_size(i, extent, layout.mesh().coordinate());
    }
  }
  return extent;
}

// The intervals that each coordinate of mesh dim `m` holds of what the earlier mesh dims leave on this rank.
std::vector<Intervals> pieces_along(const Layout& layout, int64_t m, int64_t extent) {
  auto coordinate = layout.mesh().coordinate();
  std::vector<Intervals> out;
  for (int64_t c = 0; c < layout.mesh().size(m); ++c) {
    coordinate[m] = c;
    out.push_back(layout.split(m, extent, coordinate));
  }
  return out;
}

int64_t length_of(const Intervals& runs) {
  int64_t n = 0;
  for (const auto& run : runs) {
    n += run.length;
  }
  return n;
}

at::Tensor take(const at::Tensor& t, int64_t dim, const Intervals& runs) {
  if (runs.empty()) {
    return t.narrow(dim, 0, 0);
  }
  if (runs.size() == 1) {
    return t.narrow(dim, runs[0].start, runs[0].length);
  }
  std::vector<at::Tensor> parts;
  for (const auto& run : runs) {
    parts.push_back(t.narrow(dim, run.start, run.length));
  }
  return at::cat(parts, dim);
}

Sizes with_size(const at::Tensor& t, int64_t dim, int64_t size) {
  Sizes out(t.sizes().begin(), t.sizes().end());
  out[dim] = size;
  return out;
}

Box box_in(IntArrayRef sizes) {
  Box box;
  box.offsets.assign(sizes.size(), 0);
  box.sizes.assign(sizes.begin(), sizes.end());
  return box;
}

// What `runs` pick of tensor dim `dim`: one box each.
std::vector<Box> boxes_along(IntArrayRef sizes, int64_t dim, const Intervals& runs) {
  std::vector<Box> out;
  for (const auto& run : runs) {
    out.push_back(box_in(sizes));
    out.back().offsets[dim] = run.start;
    out.back().sizes[dim] = run.length;
  }
  return out;
}

// The same elements on both sides, box by box.
struct Pairs {
  std::vector<Box> from, to;

  void append(const Pairs& o) {
    from.insert(from.end(), o.from.begin(), o.from.end());
    to.insert(to.end(), o.to.begin(), o.to.end());
  }
  int64_t numel() const {
    int64_t n = 0;
    for (const auto& box : from) {
      n += c10::multiply_integers(box.sizes);
    }
    return n;
  }
};

// What goes from a piece that holds the runs `held` of dim `src` to one that holds the runs `wanted` of dim `dst`. `sizes`: all
// other dims, which are alike.
Pairs pairs_between(IntArrayRef sizes, int64_t src, const Intervals& held, int64_t dst, const Intervals& wanted) {
  Pairs out;
  int64_t held_at = 0;
  for (const auto& a : held) {
    int64_t wanted_at = 0;
    for (const auto& b : wanted) {
      auto from = box_in(sizes), to = box_in(sizes);
      if (src == dst) {
        const auto start = std::max(a.start, b.start);
        const auto length = std::max<int64_t>(0, std::min(a.start + a.length, b.start + b.length) - start);
        from.offsets[src] = held_at + (length ? start - a.start : 0);
        to.offsets[src] = wanted_at + (length ? start - b.start : 0);
        from.sizes[src] = to.sizes[src] = length;
      } else {
        from.offsets[src] = held_at;
        from.offsets[dst] = b.start;
        to.offsets[src] = a.start;
        to.offsets[dst] = wanted_at;
        from.sizes[src] = to.sizes[src] = a.length;
        from.sizes[dst] = to.sizes[dst] = b.length;
      }
      out.from.push_back(std::move(from));
      out.to.push_back(std::move(to));
      wanted_at += b.length;
    }
    held_at += a.length;
  }
  return out;
}

// Half precision is widened: the square of a norm that fits need not.
at::Tensor norm_power(const at::Tensor& t, double order) {
  const bool half = t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16;
  const auto x = (half ? t.to(at::kFloat) : t).contiguous();
  return order == 2.0 ? x * x : at::pow(at::abs(x), order);
}
at::Tensor norm_root(const at::Tensor& t, double order, at::ScalarType dtype) {
  return (order == 2.0 ? at::sqrt(t) : at::pow(t, 1.0 / order)).to(dtype);
}

void reduce_everywhere(State& s, int64_t m) {
  const auto p = s.layout->placement(m);
  auto next = p.reduce == ReduceOp::Norm ? norm_power(s.local, p.norm_order) : s.local.clone(at::MemoryFormat::Contiguous);
  comm::all_reduce(next, s.mesh(), m, p.reduce);
  s.local = p.reduce == ReduceOp::Norm ? norm_root(next, p.norm_order, s.local.scalar_type()) : next;
  s.layout = s.layout->with(m, Placement::replicate());
}

void reduce_into_pieces(State& s, int64_t m, const Layout& to) {
  const auto p = s.layout->placement(m);
  const auto dim = to.placement(m).dim;
  const auto n = s.mesh().size(m);
  s.layout = s.layout->with(m, to.placement(m), to.cut(m));
  const auto source = p.reduce == ReduceOp::Norm ? norm_power(s.local, p.norm_order) : s.local;
  const auto pieces = pieces_along(*s.layout, m, source.size(dim));
  const auto rest = source.size(dim) ? source.numel() / source.size(dim) : 0;
  std::vector<Box> boxes;
  std::vector<int64_t> sent;
  for (const auto& piece : pieces) {
    const auto of_piece = boxes_along(source.sizes(), dim, piece);
    boxes.insert(boxes.end(), of_piece.begin(), of_piece.end());
    sent.push_back(length_of(piece) * rest);
  }
  auto packed = at::empty({source.numel()}, source.options());
  kernels::pack(source, boxes, packed);
  const auto& mine = pieces[s.mesh().coordinate()[m]];
  auto out = at::empty(with_size(source, dim, length_of(mine)), source.options());
  auto summands = at::empty({out.numel() * n}, source.options());
  comm::exchange_summands(summands, packed, sent, s.mesh(), m);
  Intervals runs; // of the piece, where they are in it
  int64_t at = 0;
  for (const auto& run : mine) {
    runs.push_back({at, run.length});
    at += run.length;
  }
  kernels::unpack_reduce(summands, n, boxes_along(out.sizes(), dim, runs), p.reduce, out);
  s.local = p.reduce == ReduceOp::Norm ? norm_root(out, p.norm_order, s.local.scalar_type()) : out;
}

void gather(State& s, int64_t m) {
  const auto dim = s.layout->placement(m).dim;
  const auto extent = extent_before(*s.layout, m, dim, s.sizes);
  const auto pieces = pieces_along(*s.layout, m, extent);
  const auto n = s.mesh().size(m);
  const auto me = s.mesh().coordinate()[m];
  auto whole = at::empty(with_size(s.local, dim, extent), s.local.options());
  // Cut on the outermost dim that has more than one index: every piece is one contiguous run of the result.
  bool direct = true;
  for (int64_t d = 0; d < dim; ++d) {
    direct &= whole.size(d) == 1;
  }
  for (int64_t c = 0; c < n; ++c) {
    direct &= pieces[c].size() <= 1;
  }
  std::vector<at::Tensor> received(n);
  if (direct) {
    for (int64_t c = 0; c < n; ++c) {
      received[c] = take(whole, dim, pieces[c]);
    }
    comm::all_gather(received, s.local.contiguous(), s.mesh(), m);
  } else {
    const auto mine = s.local.contiguous();
    const auto rest = extent ? whole.numel() / extent : 0;
    auto flat = at::empty({rest * (extent - length_of(pieces[me]))}, s.local.options());
    std::vector<Box> boxes;
    int64_t at = 0;
    for (int64_t c = 0; c < n; ++c) {
      if (c == me) {
        received[c] = mine;
        continue;
      }
      const auto numel = rest * length_of(pieces[c]);
      received[c] = flat.narrow(0, at, numel);
      at += numel;
      const auto of_piece = boxes_along(whole.sizes(), dim, pieces[c]);
      boxes.insert(boxes.end(), of_piece.begin(), of_piece.end());
    }
    comm::all_gather(received, mine, s.mesh(), m);
    kernels::unpack(flat, boxes, whole);
    const auto own = pairs_between(mine.sizes(), dim, pieces[me], dim, {{0, extent}});
    kernels::copy(mine, own.from, whole, own.to);
  }
  s.local = std::move(whole);
  s.layout = s.layout->with(m, Placement::replicate());
}

void slice(State& s, int64_t m, const Layout& to) {
  const auto dim = to.placement(m).dim;
  s.layout = s.layout->with(m, to.placement(m), to.cut(m));
  s.local = take(s.local, dim, s.layout->split(m, s.local.size(dim), s.mesh().coordinate()));
}

// One mesh dim changes from one cut to another, on the same tensor dim or not: every element goes straight to its new owner.
void exchange(State& s, int64_t m, const Layout& to) {
  const auto src = s.layout->placement(m).dim;
  const auto dst = to.placement(m).dim;
  const auto next = s.layout->with(m, to.placement(m), to.cut(m));
  const auto extent = extent_before(*s.layout, m, src, s.sizes);
  const auto me = s.mesh().coordinate()[m];
  const auto n = s.mesh().size(m);
  const auto held = pieces_along(*s.layout, m, extent);
  const auto wanted = pieces_along(*next, m, src == dst ? extent : s.local.size(dst));
  auto sizes = with_size(s.local, src, extent);
  sizes[dst] = length_of(wanted[me]);
  auto result = at::empty(sizes, s.local.options());
  Pairs out, in;
  std::vector<int64_t> sent(n, 0), received(n, 0);
  for (int64_t c = 0; c < n; ++c) {
    if (c != me) {
      const auto to_c = pairs_between(s.local.sizes(), src, held[me], dst, wanted[c]);
      const auto from_c = pairs_between(s.local.sizes(), src, held[c], dst, wanted[me]);
      sent[c] = to_c.numel();
      received[c] = from_c.numel();
      out.append(to_c);
      in.append(from_c);
    }
  }
  auto packed = at::empty({out.numel()}, s.local.options());
  auto arrived = at::empty({in.numel()}, s.local.options());
  kernels::pack(s.local, out.from, packed);
  comm::all_to_all(arrived, received, packed, sent, s.mesh(), m);
  kernels::unpack(arrived, in.to, result);
  const auto own = pairs_between(s.local.sizes(), src, held[me], dst, wanted[me]);
  kernels::copy(s.local, own.from, result, own.to);
  s.local = std::move(result);
  s.layout = next;
}

// A replicated value as summands: coordinate 0 keeps it, the others hold what changes nothing.
void make_partial(State& s, int64_t m, const Placement& p) {
  const bool first = s.mesh().coordinate()[m] == 0;
  switch (p.reduce) {
    case ReduceOp::Norm:
      if (!first && p.norm_order < 0) {
        s.local = at::full_like(s.local, std::numeric_limits<double>::infinity());
        break;
      }
      [[fallthrough]];
    case ReduceOp::Sum:
    case ReduceOp::Bor:
    case ReduceOp::Bxor:
      if (!first) {
        const bool number = s.local.unsafeGetTensorImpl()->is_wrapped_number();
        s.local = at::zeros_like(s.local);
        if (number) { // type promotion must not tell the ranks apart
          s.local.unsafeGetTensorImpl()->set_wrapped_number(true);
        }
      }
      break;
    case ReduceOp::Product:
      if (!first) {
        s.local = at::ones_like(s.local);
      }
      break;
    case ReduceOp::Avg:
    case ReduceOp::Min:
    case ReduceOp::Max:
    case ReduceOp::Band:
      break;
  }
  s.layout = s.layout->with(m, p);
}

void take_step(State& s, const Step& step, const Layout& to) {
  const auto m = step.mesh_dim;
  switch (step.kind) {
    case StepKind::AllReduce:
      return reduce_everywhere(s, m);
    case StepKind::ReduceScatter:
      return reduce_into_pieces(s, m, to);
    case StepKind::AllGather:
      return gather(s, m);
    case StepKind::AllToAll:
      return exchange(s, m, to);
    case StepKind::Slice:
      return slice(s, m, to);
    case StepKind::MakePartial:
      return make_partial(s, m, to.placement(m));
    case StepKind::Pad:
      s.local = pad(s.local, *s.layout, m, to.placement(m), s.sizes);
      s.layout = layout_after(step, *s.layout, to);
      return;
    case StepKind::Transfer: {
      auto next = layout_after(step, *s.layout, to);
      s.local = transfer(s.local, *s.layout, *next, s.sizes);
      s.layout = std::move(next);
      return;
    }
  }
}

} // namespace

at::Tensor redistribute(const at::Tensor& local, const Layout& from, const Layout& to, IntArrayRef sizes) {
  if (&from == &to) {
    return local;
  }
  if (&from.mesh() != &to.mesh()) {
    return redistribute_across(local, from, to, sizes);
  }
  if (!from.mesh().has_me()) {
    return local;
  }
  // Bytes travel: what a lazily conjugated or negated piece stands for is computed first.
  State s{local.resolve_conj().resolve_neg(), LayoutPtr::reclaim_copy(&from), sizes};
  const auto bytes = static_cast<double>(c10::multiply_integers(sizes)) * static_cast<double>(local.element_size());
  for (const auto& step : plan_for(from, to, bytes).steps) {
    take_step(s, step, to);
  }
  TORCH_INTERNAL_ASSERT(
      s.layout.get() == &to, "redistribute: from ", from.str(), " ended at ", s.layout->str(), ", not ", to.str());
  return s.local;
}

} // namespace shardtensor
