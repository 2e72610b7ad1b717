#include "redistribute/steps.h"

#include "comm/comm.h"
#include "comm/epoch.h"
#include "comm/traced.h"
#include "comm/values.h"
#include "kernels/boxes.h"
#include "kernels/traced.h"
#include "redistribute/agreed.h"
#include "redistribute/identity.h"

#include <ATen/ATen.h>
#include <ATen/ScalarOps.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <utility>

namespace shardtensor {

namespace {

using c10::IntArrayRef;

// The intervals of each coordinate of mesh dim `m`, within the part that the earlier mesh dims leave to this rank.
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

bool of_one_length(const std::vector<Intervals>& pieces) {
  return std::all_of(pieces.begin(), pieces.end(), [&](const auto& p) { return length_of(p) == length_of(pieces[0]); });
}

// The runs of a piece, in the piece's own indices.
Intervals side_by_side(const Intervals& runs) {
  Intervals out;
  int64_t at = 0;
  for (const auto& run : runs) {
    out.push_back({at, run.length});
    at += run.length;
  }
  return out;
}

// Does the second half of a step, now or later.
void complete(State& s, comm::Completion completion, std::vector<at::Tensor> buffers) {
  if (s.later) {
    s.rest = std::move(completion);
    s.buffers = std::move(buffers);
  } else {
    completion();
  }
}

// Makes `out` this rank's piece. `next` finishes it, as soon as its data has arrived.
template <typename F>
void then(State& s, at::Tensor out, F next) {
  if (s.rest) {
    s.rest = [before = std::move(s.rest), next = std::move(next)]() mutable {
      before();
      next();
    };
    s.buffers.push_back(out);
  } else {
    next();
  }
  s.local = std::move(out);
}

// For at most one run.
at::Tensor run_of(const at::Tensor& t, int64_t dim, const Intervals& runs) {
  return runs.empty() ? t.narrow(dim, 0, 0) : t.narrow(dim, runs[0].start, runs[0].length);
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

// One box for each of the `runs` along tensor dim `dim`.
std::vector<Box> boxes_along(IntArrayRef sizes, int64_t dim, const Intervals& runs) {
  std::vector<Box> out;
  for (const auto& run : runs) {
    out.push_back(box_in(sizes));
    out.back().offsets[dim] = run.start;
    out.back().sizes[dim] = run.length;
  }
  return out;
}

// Whether the boxes, one after the other, cover the tensor's memory in order: then nothing needs packing or unpacking.
bool tiles(const at::Tensor& t, const std::vector<Box>& boxes) {
  if (!t.is_contiguous()) {
    return false;
  }
  const auto strides = c10::contiguous_strides(t.sizes());
  int64_t at = 0;
  for (const auto& box : boxes) {
    const auto numel = c10::multiply_integers(box.sizes);
    if (numel == 0) {
      continue;
    }
    int64_t offset = 0;
    bool full = true;
    for (int64_t d = t.dim() - 1; d >= 0; --d) {
      if (!full && box.sizes[d] != 1) {
        return false;
      }
      full &= box.sizes[d] == t.size(d);
      offset += box.offsets[d] * strides[d];
    }
    if (offset != at) {
      return false;
    }
    at += numel;
  }
  return at == t.numel();
}

// The same elements on both sides, box by box.
struct Pairs {
  std::vector<Box> from, to;

  int64_t numel() const {
    int64_t n = 0;
    for (const auto& box : from) {
      n += c10::multiply_integers(box.sizes);
    }
    return n;
  }
};

// The elements that go from a piece with the runs `held` of dim `src` to one with the runs `wanted` of dim `dst`. `sizes`:
// those of all other dims, which are equal.
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

void take_root(State& s, double order, const at::TensorOptions& options) {
  auto out = at::empty(s.local.sizes(), options);
  then(s, out, [sum = s.local, out, order]() mutable { out.copy_(norm_root(sum, order, out.scalar_type())); });
}

void reduce_everywhere(State& s, int64_t m) {
  const auto p = s.layout->placement(m);
  const auto summand = s.local;
  const bool norm = p.reduce == ReduceOp::Norm;
  s.local = norm ? norm_power(summand, p.norm_order) : summand.clone(at::MemoryFormat::Contiguous);
  s.layout = s.layout->with(m, Placement::replicate());
  complete(s, comm::start_all_reduce(s.local, s.mesh(), m, p.reduce), {s.local});
  if (norm) {
    take_root(s, p.norm_order, summand.options());
  }
}

// This rank's side of a reduce-scatter.
struct Scattering {
  at::Tensor source;      // this rank's summand of the whole
  std::vector<Box> boxes; // of all coordinates' pieces
  std::vector<Box> own, others;
  std::vector<int64_t> numels; // of the pieces
  std::vector<Box> places;     // of this rank's boxes in its piece
  Sizes sizes;                 // of this rank's piece
  bool in_place;               // `source` is sent without packing
};

Scattering scattering_of(const State& s, int64_t m, int64_t dim, at::Tensor source) {
  Scattering out;
  const auto me = s.mesh().coordinate()[m];
  const auto pieces = pieces_along(*s.layout, m, source.size(dim));
  const auto rest = source.size(dim) ? source.numel() / source.size(dim) : 0;
  for (int64_t c = 0; c < s.mesh().size(m); ++c) {
    const auto boxes = boxes_along(source.sizes(), dim, pieces[c]);
    out.boxes.insert(out.boxes.end(), boxes.begin(), boxes.end());
    auto& side = c == me ? out.own : out.others;
    side.insert(side.end(), boxes.begin(), boxes.end());
    out.numels.push_back(length_of(pieces[c]) * rest);
  }
  out.sizes = with_size(source, dim, length_of(pieces[me]));
  out.places = boxes_along(out.sizes, dim, side_by_side(pieces[me]));
  out.in_place = !s.later && tiles(source, out.boxes); // if sent later, it may have been written
  out.source = std::move(source);
  return out;
}

at::Tensor packed(const at::Tensor& source, const std::vector<Box>& boxes, int64_t numel) {
  if (is_traced(source)) {
    return kernels::traced::packed(source, boxes);
  }
  auto out = at::empty({numel}, source.options());
  kernels::pack(source, boxes, out);
  return out;
}

// The backend reduces.
void reduce_on_the_way(State& s, int64_t m, const Scattering& x, at::Tensor& out, ReduceOp op) {
  const auto in = x.in_place ? x.source : packed(x.source, x.boxes, x.source.numel());
  const bool direct = x.places.size() <= 1;
  auto flat = direct ? out.view(-1) : at::empty({out.numel()}, out.options());
  auto reduced = comm::start_reduce_scatter(flat, in, x.numels, s.mesh(), m, op);
  auto finish = [reduced = std::move(reduced), flat, out, direct, places = x.places]() mutable {
    reduced();
    if (!direct) {
      kernels::unpack(flat, places, out);
    }
  };
  complete(s, std::move(finish), {flat, out});
}

// All ranks' summands of this rank's piece arrive and are added here, in the order of the coordinates on every rank. This
// rank's own summand waits in `out` meanwhile, so that only data that is sent is packed.
void reduce_on_arrival(State& s, int64_t m, const Scattering& x, at::Tensor& out, ReduceOp op) {
  const auto n = s.mesh().size(m);
  const auto me = s.mesh().coordinate()[m];
  const auto numel = out.numel();
  auto sent = x.numels;
  std::vector<int64_t> received(n, numel);
  at::Tensor in = x.source;
  if (!x.in_place) {
    sent[me] = received[me] = 0;
    in = packed(x.source, x.others, x.source.numel() - numel);
    auto flat = out.view(-1);
    kernels::pack(x.source, x.own, flat);
  }
  auto summands = at::empty({numel * n}, out.options());
  auto arriving = x.in_place ? summands : summands.narrow(0, numel, numel * (n - 1));
  auto arrived = comm::start_all_to_all(arriving, received, in, sent, s.mesh(), m, /*of_summands=*/true);
  auto finish = [arrived = std::move(arrived), summands, out, places = x.places, in_place = x.in_place, n, me, numel,
                 op]() mutable {
    arrived();
    if (!in_place) {
      for (int64_t c = 0; c <= me; ++c) {
        summands.narrow(0, c * numel, numel).copy_(c < me ? summands.narrow(0, (c + 1) * numel, numel) : out.view(-1));
      }
    }
    kernels::unpack_reduce(summands, n, places, op, out);
  };
  complete(s, std::move(finish), {in, summands, out});
}

void reduce_into_pieces(State& s, int64_t m, const Layout& to) {
  const auto p = s.layout->placement(m);
  const auto dim = to.placement(m).dim;
  const auto summand = s.local;
  const bool norm = p.reduce == ReduceOp::Norm;
  s.layout = s.layout->with(m, to.placement(m), to.cut(m));
  const auto x = scattering_of(s, m, dim, norm ? norm_power(summand, p.norm_order) : summand);
  s.local = at::empty(x.sizes, x.source.options());
  const bool on_the_way = comm::adds_up(s.local, s.mesh(), m, p.reduce);
  (on_the_way ? reduce_on_the_way : reduce_on_arrival)(s, m, x, s.local, p.reduce);
  if (norm) {
    take_root(s, p.norm_order, summand.options());
  }
}

void gather(State& s, int64_t m) {
  const auto dim = s.layout->placement(m).dim;
  const auto extent = s.layout->extent_before(m, dim, s.sizes[dim], s.mesh().coordinate());
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
      received[c] = run_of(whole, dim, pieces[c]);
    }
    complete(s, comm::start_all_gather(received, s.local, s.mesh(), m, /*as_one=*/true), {whole});
  } else {
    // Pieces travel run after run. This rank's piece is sent without staging, unless it is not contiguous, may be written too
    // soon, or the backend gathers adjacent pieces faster.
    const bool as_one = of_one_length(pieces) && comm::gathers_as_one(s.local, s.mesh(), m);
    const bool stage_own = as_one || s.later || !s.local.is_contiguous() || pieces[me].size() > 1;
    const auto rest = extent ? whole.numel() / extent : 0;
    auto flat = at::empty({rest * (extent - (stage_own ? 0 : length_of(pieces[me])))}, s.local.options());
    std::vector<Box> boxes;
    int64_t at = 0;
    for (int64_t c = 0; c < n; ++c) {
      const bool staged = c != me || stage_own;
      const auto numel = rest * length_of(pieces[c]);
      received[c] = staged ? flat.narrow(0, at, numel) : s.local;
      if (staged) {
        at += numel;
        const auto of_piece = boxes_along(whole.sizes(), dim, pieces[c]);
        boxes.insert(boxes.end(), of_piece.begin(), of_piece.end());
      }
    }
    if (stage_own) {
      kernels::pack(s.local, boxes_along(s.local.sizes(), dim, side_by_side(pieces[me])), received[me]);
    } else {
      const auto own = pairs_between(s.local.sizes(), dim, pieces[me], dim, {{0, extent}});
      kernels::copy(s.local, own.from, whole, own.to);
    }
    auto arrived = comm::start_all_gather(received, received[me], s.mesh(), m, as_one);
    auto finish = [arrived = std::move(arrived), flat, boxes, whole]() mutable {
      arrived();
      kernels::unpack(flat, boxes, whole);
    };
    complete(s, std::move(finish), {flat, whole});
  }
  s.local = std::move(whole);
  s.layout = s.layout->with(m, Placement::replicate());
}

void slice(State& s, int64_t m, const Layout& to) {
  const auto dim = to.placement(m).dim;
  s.layout = s.layout->with(m, to.placement(m), to.cut(m));
  const auto runs = s.layout->split(m, s.local.size(dim), s.mesh().coordinate());
  if (runs.size() <= 1) {
    s.local = run_of(s.local, dim, runs);
    return;
  }
  auto out = at::empty(with_size(s.local, dim, length_of(runs)), s.local.options());
  then(s, out, [whole = s.local, out, dim, runs]() mutable {
    kernels::copy(whole, boxes_along(whole.sizes(), dim, runs), out, boxes_along(out.sizes(), dim, side_by_side(runs)));
  });
}

// The boxes that an exchange moves, for all coordinates in their order.
struct Exchange {
  std::vector<Pairs> to, from; // from the piece before to the piece after
  std::vector<int64_t> sent, received;
  Sizes sizes; // of the piece after

  static std::vector<Box> boxes(const std::vector<Pairs>& all, std::vector<Box> Pairs::*side, int64_t without = -1) {
    std::vector<Box> out;
    for (size_t c = 0; c < all.size(); ++c) {
      if (static_cast<int64_t>(c) != without) {
        out.insert(out.end(), (all[c].*side).begin(), (all[c].*side).end());
      }
    }
    return out;
  }
};

Exchange exchange_of(const State& s, int64_t m, const Layout& next) {
  const auto src = s.layout->placement(m).dim;
  const auto dst = next.placement(m).dim;
  const auto extent = s.layout->extent_before(m, src, s.sizes[src], s.mesh().coordinate());
  const auto me = s.mesh().coordinate()[m];
  const auto held = pieces_along(*s.layout, m, extent);
  const auto wanted = pieces_along(next, m, src == dst ? extent : s.local.size(dst));
  Exchange x;
  x.sizes = with_size(s.local, src, extent);
  x.sizes[dst] = length_of(wanted[me]);
  for (int64_t c = 0; c < s.mesh().size(m); ++c) {
    x.to.push_back(pairs_between(s.local.sizes(), src, held[me], dst, wanted[c]));
    x.from.push_back(pairs_between(s.local.sizes(), src, held[c], dst, wanted[me]));
    x.sent.push_back(x.to.back().numel());
    x.received.push_back(x.from.back().numel());
  }
  return x;
}

// One mesh dim changes its cut, on the same tensor dim or on another: every element goes directly to its new owner.
void exchange(State& s, int64_t m, const Layout& to) {
  const auto next = s.layout->with(m, to.placement(m), to.cut(m));
  auto x = exchange_of(s, m, *next);
  const auto me = s.mesh().coordinate()[m];
  const auto source = s.local;
  const auto numel = c10::multiply_integers(x.sizes);
  s.layout = next;
  if (!s.later && tiles(source, Exchange::boxes(x.to, &Pairs::from))) {
    if (auto result = at::empty(x.sizes, source.options()); tiles(result, Exchange::boxes(x.from, &Pairs::to))) {
      comm::start_all_to_all(result, x.received, source, x.sent, s.mesh(), m)();
      s.local = std::move(result);
      return;
    }
  }
  // The send buffer is freed before the result is made, unless the step is only started here.
  auto arrived = at::empty({numel - x.received[me]}, source.options());
  x.sent[me] = x.received[me] = 0;
  auto move = comm::start_all_to_all(
      arrived, x.received, packed(source, Exchange::boxes(x.to, &Pairs::from, me), c10::sum_integers(x.sent)), x.sent, s.mesh(),
      m);
  if (!s.later) {
    std::exchange(move, [] {})();
  }
  auto result = at::empty(x.sizes, source.options());
  kernels::copy(source, x.to[me].from, result, x.to[me].to);
  auto finish = [move = std::move(move), arrived, result, boxes = Exchange::boxes(x.from, &Pairs::to, me)]() mutable {
    move();
    kernels::unpack(arrived, boxes, result);
  };
  s.local = result;
  complete(s, std::move(finish), {arrived, result});
}

// Turns a replicated value into summands. If the reduction allows repeats, all ranks keep the value; else coordinate 0 keeps
// it and the others get the neutral value.
void make_partial(State& s, int64_t m, const Placement& p) {
  if (p.reduce == ReduceOp::Norm) { // all ranks see the same value, so all raise or none does
    at::_assert_async(
        s.local.lt(0).any().logical_not(),
        "a negative value cannot be kept as summands of a norm; redistribute() the norm first");
  }
  const bool repeats =
      p.reduce == ReduceOp::Avg || p.reduce == ReduceOp::Min || p.reduce == ReduceOp::Max || p.reduce == ReduceOp::Band;
  if (!repeats && s.mesh().coordinate()[m] != 0) {
    const auto nothing = identity(p.reduce, s.local.scalar_type(), p.norm_order);
    if (s.local.unsafeGetTensorImpl()->is_wrapped_number()) { // type promotion must be the same on all ranks
      s.local = at::detail::scalar_tensor_static(nothing, s.local.scalar_type(), at::kCPU); // a number under a fake mode too
      s.local.unsafeGetTensorImpl()->set_wrapped_number(true);
    } else {
      s.local = comm::traced::after(at::full_like(s.local, nothing), s.local);
    }
  }
  s.layout = s.layout->with(m, p);
}

// Turns a piece into a summand of the whole, padded with the neutral value.
void pad(State& s, int64_t m, const Placement& p) {
  const auto dim = s.layout->placement(m).dim;
  const auto& me = s.mesh().coordinate();
  const auto extent = s.layout->extent_before(m, dim, s.sizes[dim], me);
  const auto nothing = identity(p.reduce, s.local.scalar_type(), p.norm_order);
  auto out = at::full(with_size(s.local, dim, extent), nothing, s.local.options());
  then(s, out, [piece = s.local, out, dim, runs = s.layout->split(m, extent, me)]() mutable {
    kernels::copy(piece, boxes_along(piece.sizes(), dim, side_by_side(runs)), out, boxes_along(out.sizes(), dim, runs));
  });
  s.layout = s.layout->with(m, p);
}

void go_at_once(State& s, const Layout& to) {
  auto next = transfer_target(*s.layout, to);
  auto moving = transfer(s.local, *s.layout, *next, s.sizes, s.later);
  s.local = moving.local;
  s.layout = std::move(next);
  if (moving.rest) {
    complete(s, std::move(moving.rest), std::move(moving.buffers));
  }
}

} // namespace

void check_mean(const Layout& from, const Layout& to, at::ScalarType dtype) {
  for (int64_t m = 0; from.has_partial() && m < from.ndim(); ++m) {
    const auto& p = from.placement(m);
    TORCH_CHECK_TYPE(
        !p.is_partial() || p.reduce != ReduceOp::Avg || !c10::isIntegralType(dtype, true), "redistribute: from ", from.str(),
        " to ", to.str(), ": the mean of a tensor of dtype ", dtype, " over ranks is not a value of ", dtype,
        "; convert it to a floating-point dtype first, or use Partial(\"sum\") (rank ", from.mesh().rank(), ")");
  }
}

uint64_t dims_of(c10::ArrayRef<Step> steps) {
  uint64_t out = 0;
  for (const auto& step : steps) {
    out |= communicates(step) && step.mesh_dim >= 0 ? uint64_t{1} << step.mesh_dim : 0;
  }
  return out;
}

void agree(const Plan& plan, const Layout& from, const Layout& to, IntArrayRef sizes, at::ScalarType dtype) {
  if (const auto now = comm::epoch(); plan.communicates() && std::exchange(plan.agreed, now) != now) {
    in_step(
        from, to, plan.steps.front(), [&] { check_agreed(from, to, sizes, dtype); }, [&] { return dims_of(plan.steps); });
  }
}

void take_step(State& s, const Step& step, const Layout& to) {
  const auto m = step.mesh_dim;
  // A rank alone along the mesh dim holds everything, for any placement. Exception: a norm's summand may be negative.
  if (m >= 0 && comm::is_alone(s.mesh(), m) && s.layout->placement(m).reduce != ReduceOp::Norm) {
    s.layout = layout_after(step, *s.layout, to);
    return;
  }
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
      return pad(s, m, to.placement(m));
    case StepKind::Transfer:
      return go_at_once(s, to);
  }
}

} // namespace shardtensor
