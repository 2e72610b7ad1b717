#include "redistribute/steps.h"

#include "comm/comm.h"
#include "comm/group_generation.h"
#include "comm/reducible.h"
#include "comm/tensor_kind.h"
#include "comm/traced.h"
#include "kernels/boxes.h"
#include "kernels/traced.h"
#include "redistribute/chunk_packing.h"
#include "redistribute/metadata_check.h"
#include "redistribute/neutral_value.h"
#include "redistribute/plan_cache.h"

#include <ATen/ATen.h>
#include <ATen/ScalarOps.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace shardtensor {

namespace {

using c10::IntArrayRef;

// How many elements are sent to each coordinate, or received from it. It is stored as a formula or a short list where possible,
// so that the time for a new size does not grow with the number of ranks; only all(), for calls that need a list, grows.
class ElementCounts {
 public:
  ElementCounts() = default;
  // No elements, until add().
  explicit ElementCounts(int64_t n) : n_(n) {}
  // Even pieces: `each` elements per index; pieces have `full` indices up to the end of `extent`.
  ElementCounts(int64_t n, int64_t each, int64_t full, int64_t extent) : n_(n), each_(each), full_(full), extent_(extent) {}
  // The same for the lengths that a cut lists from `row` on.
  ElementCounts(int64_t n, int64_t each, Cut cut, int64_t row) : n_(n), each_(each), cut_(std::move(cut)), row_(row) {}

  void add(int64_t c, int64_t numel) {
    few_.emplace_back(c, numel);
  }
  std::vector<int64_t> all() const {
    std::vector<int64_t> out(n_);
    if (cut_) {
      std::transform(
          cut_->begin() + row_, cut_->begin() + row_ + n_, out.begin(), [&](int64_t length) { return each_ * length; });
    }
    for (int64_t c = 0, left = extent_; left > 0 && c < n_; ++c, left -= full_) {
      out[c] = each_ * std::min(full_, left);
    }
    for (const auto& [c, numel] : few_) {
      out[c] = numel;
    }
    return out;
  }
  size_t weight() const {
    return 1 + few_.size() / 8;
  }

 private:
  int64_t n_ = 0, each_ = 0, full_ = 0, extent_ = 0;
  Cut cut_;
  int64_t row_ = 0;
  std::vector<std::pair<int64_t, int64_t>> few_; // by coordinate
};

// How mesh dim `m` cuts the indices that the earlier mesh dims leave to this rank.
class MeshDimSplit {
 public:
  MeshDimSplit(const Layout& layout, int64_t m, int64_t extent)
      : layout_(layout),
        m_(m),
        extent_(extent),
        n_(layout.mesh().size(m)),
        strided_(layout.placement(m).split_factor > 1),
        at_(layout.mesh().coordinate()) {
    if (!strided_ && !layout.cut(m)) {
      full_ = (extent + n_ - 1) / n_;
    } else if (!strided_) { // the row of sizes for this rank's coordinates along the earlier mesh dims
      for (int64_t i = 0; i < m; ++i) {
        row_ = layout.placement(i).is_shard(layout.placement(m).dim) ? row_ * layout.mesh().size(i) + at_[i] : row_;
      }
      row_ *= n_;
      sizes_ = layout.cut(m)->data() + row_;
    }
  }

  bool strided() const {
    return strided_;
  }
  int64_t extent() const {
    return extent_;
  }
  // The piece of coordinate c, within that part.
  Intervals runs(int64_t c) const {
    at_[m_] = c;
    return layout_.split(m_, extent_, at_);
  }
  // The same without a stride.
  Interval run(int64_t c) const {
    if (full_ >= 0) {
      const auto start = std::min(extent_, full_ * c);
      return {start, std::min(full_, extent_ - start)};
    }
    at_[m_] = c;
    return layout_.piece(m_, extent_, at_);
  }
  // The lengths of all pieces, times `each`.
  std::vector<int64_t> numels(int64_t each) const {
    std::vector<int64_t> out(n_);
    for (int64_t c = 0; c < n_; ++c) {
      out[c] = each * (sizes_ ? sizes_[c] : strided_ ? length(c) : run(c).length);
    }
    return out;
  }
  ElementCounts counts(int64_t each) const {
    if (sizes_) {
      return {n_, each, layout_.cut(m_), row_};
    }
    if (!strided_) {
      return {n_, each, full_, extent_};
    }
    ElementCounts out(n_);
    for (int64_t c = 0; c < n_; ++c) {
      out.add(c, each * length(c));
    }
    return out;
  }
  // The coordinates [first, last) whose pieces may meet `run`.
  std::pair<int64_t, int64_t> meeting(const Interval& run) const {
    return layout_.meeting(m_, extent_, at_, run);
  }
  int64_t length(int64_t c) const {
    return length_of(runs(c));
  }
  // The pieces of all coordinates except `without`, in a tensor of these sizes.
  PackedChunks parts(IntArrayRef sizes, int64_t dim, int64_t without = -1) const {
    if (sizes_) {
      return {sizes, dim, cached<ChunkRuns>(layout_, layout_, CachedKind::ChunkRuns, {m_, row_, without}, [&] {
                return rows(without);
              })};
    }
    return {sizes, dim, std::make_shared<ChunkRuns>(rows(without))};
  }
  // Whether the pieces lie one after the other in a contiguous tensor: dims before `dim` have one index.
  bool in_order(IntArrayRef sizes, int64_t dim) const {
    return !strided_ && std::all_of(sizes.begin(), sizes.begin() + dim, [](int64_t n) { return n == 1; });
  }

 private:
  ChunkRuns rows(int64_t without) const {
    ChunkRuns out;
    if (full_ > 0) { // even: whole pieces up to the last that is not empty
      const auto whole = extent_ / full_;
      const auto add = [&](int64_t first, int64_t last) { out.add(first * full_, full_, std::max<int64_t>(0, last - first)); };
      const bool among = without >= 0 && without < whole;
      add(0, among ? without : whole);
      if (among) {
        add(without + 1, whole);
      }
      if (whole < n_ && whole != without) {
        out.add(run(whole));
      }
    } else if (sizes_) {
      out.reserve(n_);
      for (int64_t c = 0, at = 0; c < n_; at += sizes_[c++]) {
        if (c != without) {
          out.add({at, sizes_[c]});
        }
      }
    } else if (strided_) {
      for (int64_t c = 0; c < n_; ++c) {
        for (const auto& r : c == without ? Intervals() : runs(c)) {
          out.add(r);
        }
      }
    }
    return out;
  }

  const Layout& layout_;
  int64_t m_, extent_, n_;
  bool strided_;
  int64_t full_ = -1;              // of an even cut
  const int64_t* sizes_ = nullptr; // of an uneven one
  int64_t row_ = 0;                // where they begin in the cut
  mutable Coordinate at_;
};

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

// Does the second half of a step, now or later: waits, then calls next(), which reads or writes `used`.
template <typename F>
void complete(StepState& s, comm::InFlight moving, F next, const std::vector<at::Tensor>& used) {
  if (s.later && moving) {
    moving.then(std::move(next), used);
    s.rest = std::move(moving);
  } else {
    moving.wait();
    next();
  }
}

// Makes `out` this rank's piece. `next` finishes it, as soon as its data has arrived.
template <typename F>
void then(StepState& s, at::Tensor out, F next) {
  if (s.rest) {
    s.rest.then(std::move(next), {out});
  } else {
    next();
  }
  s.local = std::move(out);
}

// For at most one run.
at::Tensor run_of(const at::Tensor& t, int64_t dim, const Intervals& runs) {
  return runs.empty() ? t.narrow(dim, 0, 0) : t.narrow(dim, runs[0].start, runs[0].length);
}

Sizes with_size(IntArrayRef sizes, int64_t dim, int64_t size) {
  Sizes out(sizes.begin(), sizes.end());
  out[dim] = size;
  return out;
}

void append(std::vector<Box>& all, const std::vector<Box>& more) {
  all.insert(all.end(), more.begin(), more.end());
}

// The same elements on both sides, box by box.
struct BoxPairs {
  std::vector<Box> from, to;

  int64_t numel() const {
    return numel_of(from);
  }
};

// The elements that go from a piece with the runs `held` of dim `src` to one with the runs `wanted` of dim `dst`. `sizes`:
// those of all other dims, which are equal.
BoxPairs pairs_between(IntArrayRef sizes, int64_t src, const Intervals& held, int64_t dst, const Intervals& wanted) {
  BoxPairs out;
  int64_t held_at = 0;
  for (const auto& a : held) {
    int64_t wanted_at = 0;
    for (const auto& b : wanted) {
      auto from = box_in(sizes), to = box_in(sizes);
      if (src == dst) {
        const auto both = intersection(a, b);
        from.offsets[src] = held_at + (both.length ? both.start - a.start : 0);
        to.offsets[src] = wanted_at + (both.length ? both.start - b.start : 0);
        from.sizes[src] = to.sizes[src] = both.length;
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

bool of_one_size(const std::vector<int64_t>& numels) {
  return std::equal(numels.begin() + 1, numels.end(), numels.begin());
}

void take_root(StepState& s, double order, const at::TensorOptions& options) {
  auto out = at::empty(s.local.sizes(), options);
  then(s, out, [sum = s.local, out, order]() mutable { out.copy_(norm_root(sum, order, out.scalar_type())); });
}

void reduce_everywhere(StepState& s, int64_t m, const LayoutPtr& next) {
  const auto p = s.layout->placement(m);
  const auto summand = s.local;
  const bool norm = p.reduce == ReduceOp::Norm;
  s.local = norm ? norm_power(summand, p.norm_order) : summand.clone(at::MemoryFormat::Contiguous);
  s.layout = next;
  auto reduced = comm::start(
      {.kind = comm::CollectiveKind::AllReduce, .mesh = next->mesh_ptr(), .mesh_dim = m, .op = p.reduce, .out = s.local});
  if (s.later) {
    s.rest = std::move(reduced);
  } else {
    reduced.wait();
  }
  if (norm) {
    take_root(s, p.norm_order, summand.options());
  }
}

// How mesh dim m of a layout divides what this rank would hold without it: a reduce-scatter goes from the whole of that to the
// pieces, an all-gather back.
struct DividedPiece {
  Sizes whole, piece;           // sizes, the latter of this rank's piece
  std::vector<int64_t> numels;  // of all coordinates' pieces
  PackedChunks all, others;     // these pieces in the whole, and without this rank's
  std::vector<Box> own, places; // this rank's piece: its boxes in the whole, and in the piece itself
  int64_t peers = 0;            // ranks whose piece is not empty
  bool in_order = false;        // each piece is one run of a contiguous whole
  bool of_one_size = true;

  size_t weight() const {
    return all.weight() + others.weight() + own.size() + numels.size() / 16;
  }
};

DividedPiece divide(const Layout& layout, int64_t m, IntArrayRef sizes) {
  DividedPiece out;
  const auto dim = layout.placement(m).dim;
  const auto& at = layout.mesh().coordinate();
  const MeshDimSplit cutting(layout, m, layout.extent_before(m, dim, sizes[dim], at));
  const auto runs = cutting.runs(at[m]);
  out.piece = layout.local_sizes(sizes);
  out.whole = with_size(out.piece, dim, cutting.extent());
  out.numels = cutting.numels(c10::multiply_integers(with_size(out.piece, dim, 1)));
  out.all = cutting.parts(out.whole, dim);
  out.others = cutting.parts(out.whole, dim, at[m]);
  out.own = boxes_along(out.whole, dim, runs);
  out.places = boxes_along(out.piece, dim, side_by_side(runs));
  out.peers = std::count_if(out.numels.begin(), out.numels.end(), [](int64_t n) { return n > 0; });
  out.in_order = cutting.in_order(out.whole, dim);
  out.of_one_size = of_one_size(out.numels);
  return out;
}

// `before` and `next`: the layouts of the step, one of which has no cut along mesh dim m.
std::shared_ptr<const DividedPiece> divided(const Layout& before, const Layout& next, int64_t m, IntArrayRef sizes) {
  const auto& layout = next.placement(m).is_shard() ? next : before;
  return cached<DividedPiece>(before, next, CachedKind::DividedPiece, sizes, [&] { return divide(layout, m, sizes); });
}

// The backend reduces.
void reduce_on_the_way(
    StepState& s, int64_t m, const DividedPiece& x, const at::Tensor& source, bool in_place, at::Tensor& out, ReduceOp op) {
  const auto spacing = in_place || x.of_one_size ? 1 : comm::spacing(source, s.mesh(), m, comm::StagingKind::List);
  const auto in = in_place ? source : x.all.pack(source, {x.numels, spacing});
  const bool direct = x.places.size() <= 1;
  auto flat = direct ? out.view(-1) : at::empty({out.numel()}, out.options());
  auto reduced = comm::start({
      .kind = comm::CollectiveKind::ReduceScatter,
      .mesh = s.layout->mesh_ptr(),
      .mesh_dim = m,
      .op = op,
      .in = in,
      .out = flat,
      .in_sizes = x.numels,
      .spacing = spacing,
  });
  const auto finish = [flat, out, direct, places = x.places]() mutable {
    if (!direct) {
      kernels::unpack(flat, places, out);
    }
  };
  complete(s, std::move(reduced), finish, {flat, out});
}

// `flat` begins with an empty place, followed by the other ranks' buffers in order. Moves the first `me` of these down by one
// place, and copies `own` behind them.
void put_between(at::Tensor& flat, const at::Tensor& own, int64_t me) {
  const auto numel = own.numel();
  if (numel == 0) {
    return;
  }
  if (flat.is_cpu() && !is_traced(flat)) {
    const auto bytes = static_cast<size_t>(own.nbytes());
    auto* at = static_cast<char*>(flat.mutable_data_ptr());
    std::memmove(at, at + bytes, bytes * static_cast<size_t>(me));
  } else {
    for (int64_t c = 0; c < me; ++c) {
      flat.narrow(0, c * numel, numel).copy_(flat.narrow(0, (c + 1) * numel, numel));
    }
  }
  flat.narrow(0, me * numel, numel).copy_(own);
}

// All ranks' summands of this rank's piece arrive and are added here, in the order of the coordinates on every rank. This
// rank's own summand waits in `out` meanwhile, so that only data that is sent is packed.
void reduce_on_arrival(
    StepState& s, int64_t m, const DividedPiece& x, const at::Tensor& source, bool in_place, at::Tensor& out, ReduceOp op) {
  const auto n = s.mesh().size(m);
  const auto me = s.mesh().coordinate()[m];
  const auto numel = out.numel();
  auto sent = x.numels;
  std::vector<int64_t> received(n, numel);
  at::Tensor in = source;
  if (!in_place) {
    sent[me] = received[me] = 0;
    in = x.others.pack(source, {sent});
    auto flat = out.view(-1);
    kernels::pack(source, x.own, flat);
  }
  auto summands = at::empty({numel * n}, out.options());
  auto arriving = in_place ? summands : summands.narrow(0, numel, numel * (n - 1));
  auto arrived = comm::start({
      .kind = comm::CollectiveKind::AllToAll,
      .mesh = s.layout->mesh_ptr(),
      .mesh_dim = m,
      .in = in,
      .out = arriving,
      .in_sizes = std::move(sent),
      .out_sizes = std::move(received),
      .of_summands = true,
  });
  const auto finish = [summands, out, places = x.places, in_place, n, me, op]() mutable {
    if (!in_place) {
      put_between(summands, out.view(-1), me);
    }
    kernels::unpack_reduce(summands, n, places, op, out);
  };
  complete(s, std::move(arrived), finish, {summands, out});
}

void reduce_into_pieces(StepState& s, int64_t m, const LayoutPtr& next) {
  const auto p = s.layout->placement(m);
  const auto summand = s.local;
  const bool norm = p.reduce == ReduceOp::Norm;
  const bool in_8_bits = c10::isFloat8Type(summand.scalar_type()); // the sum is rounded once
  const auto x = divided(*s.layout, *next, m, s.sizes);
  const auto source = norm ? norm_power(summand, p.norm_order) : in_8_bits ? summand.to(at::kFloat) : summand;
  const bool in_place = !s.later && x->in_order && source.is_contiguous(); // if sent later, it may have been written
  s.layout = next;
  s.local = at::empty(x->piece, source.options());
  const bool on_the_way = comm::can_reduce_scatter(s.local, s.mesh(), m, p.reduce);
  (on_the_way ? reduce_on_the_way : reduce_on_arrival)(s, m, *x, source, in_place, s.local, p.reduce);
  if (norm) {
    take_root(s, p.norm_order, summand.options());
  } else if (in_8_bits) {
    auto out = at::empty(s.local.sizes(), summand.options());
    then(s, out, [sum = s.local, out]() mutable { out.copy_(sum); });
  }
}

void gather(StepState& s, int64_t m, const LayoutPtr& next) {
  const auto me = s.mesh().coordinate()[m];
  const auto x = divided(*s.layout, *next, m, s.sizes);
  auto whole = at::empty(x->whole, s.local.options());
  comm::Collective all{.kind = comm::CollectiveKind::AllGather, .mesh = next->mesh_ptr(), .mesh_dim = m};
  if (x->in_order) {
    all.in = s.local;
    all.out = whole;
    all.out_sizes = x->numels;
    complete(s, comm::start(std::move(all)), [] {}, {whole});
  } else {
    // Pieces travel run after run. This rank's piece is sent without staging, unless it is not contiguous, may be written too
    // soon, or the backend gathers adjacent pieces faster.
    const bool as_one = x->of_one_size && comm::gathers_as_one(s.local, s.mesh(), m);
    const bool stage_own = as_one || s.later || !s.local.is_contiguous() || x->places.size() > 1;
    auto numels = x->numels;
    numels[me] = stage_own ? numels[me] : 0;
    const auto spacing = as_one ? 1 : comm::spacing(s.local, s.mesh(), m, comm::StagingKind::List);
    auto flat = at::empty({kernels::length_of({numels, spacing})}, s.local.options());
    auto pieces = kernels::parts_of(flat, {numels, spacing});
    if (stage_own) {
      kernels::pack(s.local, x->places, pieces[me]);
    } else {
      kernels::copy(s.local, x->places, whole, x->own);
      pieces[me] = s.local;
    }
    all.in = pieces[me];
    if (as_one) {
      all.out = flat;
      all.out_sizes = numels;
    } else {
      all.pieces = std::move(pieces);
    }
    const auto finish = [flat, x, stage_own, whole, numels, spacing]() mutable {
      (stage_own ? x->all : x->others).unpack(flat, whole, {numels, spacing});
    };
    complete(s, comm::start(std::move(all)), finish, {flat, whole});
  }
  s.local = std::move(whole);
  s.layout = next;
}

void slice(StepState& s, int64_t m, const LayoutPtr& next) {
  const auto dim = next->placement(m).dim;
  s.layout = next;
  const auto runs = s.layout->split(m, s.local.size(dim), s.mesh().coordinate());
  if (runs.size() <= 1) {
    s.local = run_of(s.local, dim, runs);
    return;
  }
  auto out = at::empty(with_size(s.local.sizes(), dim, length_of(runs)), s.local.options());
  then(s, out, [whole = s.local, out, dim, runs]() mutable {
    kernels::copy(whole, boxes_along(whole.sizes(), dim, runs), out, boxes_along(out.sizes(), dim, side_by_side(runs)));
  });
}

// What this rank sends and receives in an exchange.
struct ExchangePart {
  PackedChunks out, in; // for all other coordinates, and from them; or boxes, in their order
  std::vector<Box> packed, unpacked;
  bool by_boxes = false;
  BoxPairs own;                 // the elements that this rank keeps
  ElementCounts sent, received; // numbers of elements, including those that it keeps
  Sizes sizes;                  // of the piece after
  int64_t peers = 0;            // ranks that it sends to, or receives from, whichever are more
  bool in_order = false;        // contiguous pieces need no packing and no unpacking

  size_t weight() const {
    return out.weight() + in.weight() + packed.size() + unpacked.size() + own.from.size() + sent.weight() + received.weight();
  }
  at::Tensor pack(const at::Tensor& source, const kernels::Spacing& spacing) const {
    if (!by_boxes) {
      return out.pack(source, spacing);
    }
    if (is_traced(source)) {
      return kernels::traced::packed(source, this->packed);
    }
    auto flat = at::empty({kernels::length_of(spacing)}, source.options());
    kernels::pack(source, packed, flat, spacing);
    return flat;
  }
  void unpack(const at::Tensor& flat, at::Tensor& target, const kernels::Spacing& spacing) const {
    by_boxes ? kernels::unpack(flat, unpacked, target, spacing) : in.unpack(flat, target, spacing);
  }
};

// A step that cuts another tensor dim: each rank sends every other rank a slab of its piece.
void exchange_slabs(
    ExchangePart& x,
    IntArrayRef local,
    int64_t src,
    const MeshDimSplit& held,
    int64_t dst,
    const MeshDimSplit& wanted,
    int64_t me) {
  const auto rest = c10::multiply_integers(with_size(with_size(local, src, 1), dst, 1));
  x.sent = wanted.counts(rest * local[src]);
  x.received = held.counts(rest * x.sizes[dst]);
  x.out = wanted.parts(local, dst, me);
  x.in = held.parts(x.sizes, src, me);
  x.peers = std::max(x.out.count(), x.in.count());
  x.own.from = boxes_along(local, dst, wanted.runs(me));
  x.own.to = boxes_along(x.sizes, src, held.runs(me));
  x.in_order = wanted.in_order(local, dst) && held.in_order(x.sizes, src);
}

// A step that cuts the same tensor dim in another way, or in strides.
void exchange_boxes(
    ExchangePart& x,
    IntArrayRef local,
    int64_t src,
    const MeshDimSplit& held,
    int64_t dst,
    const MeshDimSplit& wanted,
    int64_t me,
    int64_t n) {
  x.by_boxes = true;
  x.sent = x.received = ElementCounts(n);
  const auto mine = held.runs(me), asked = wanted.runs(me);
  const auto add = [&](int64_t c, BoxPairs pairs, ElementCounts& counts, std::vector<Box>& boxes,
                       std::vector<Box> BoxPairs::*side) {
    const auto numel = pairs.numel();
    if (numel) {
      counts.add(c, numel);
    }
    if (c == me) {
      x.own = std::move(pairs);
    } else if (numel) {
      append(boxes, pairs.*side);
    }
  };
  const bool near = src == dst && !held.strided() && !wanted.strided(); // then only neighbours meet
  const auto [first_out, last_out] = near ? wanted.meeting(mine[0]) : std::pair<int64_t, int64_t>(0, n);
  for (auto c = first_out; c < last_out; ++c) {
    add(c, pairs_between(local, src, mine, dst, wanted.runs(c)), x.sent, x.packed, &BoxPairs::from);
  }
  const auto [first_in, last_in] = near ? held.meeting(asked[0]) : std::pair<int64_t, int64_t>(0, n);
  for (auto c = first_in; c < last_in; ++c) {
    add(c, pairs_between(local, src, held.runs(c), dst, asked), x.received, x.unpacked, &BoxPairs::to);
  }
  x.peers = static_cast<int64_t>(std::max(x.packed.size(), x.unpacked.size()));
  x.in_order = near && held.in_order(local, src);
}

ExchangePart make_exchange(const Layout& before, const Layout& next, int64_t m, IntArrayRef sizes) {
  const auto src = before.placement(m).dim, dst = next.placement(m).dim;
  const auto n = before.mesh().size(m), me = before.mesh().coordinate()[m];
  const auto local = before.local_sizes(sizes);
  const auto extent = before.extent_before(m, src, sizes[src], before.mesh().coordinate());
  const MeshDimSplit held(before, m, extent), wanted(next, m, src == dst ? extent : local[dst]);
  ExchangePart x;
  x.sizes = with_size(local, src, extent);
  x.sizes[dst] = wanted.length(me);
  if (src == dst || held.strided() || wanted.strided()) {
    exchange_boxes(x, local, src, held, dst, wanted, me, n);
  } else {
    exchange_slabs(x, local, src, held, dst, wanted, me);
  }
  return x;
}

std::shared_ptr<const ExchangePart> exchange_of(const Layout& before, const Layout& next, int64_t m, IntArrayRef sizes) {
  return cached<ExchangePart>(
      before, next, CachedKind::ExchangePart, sizes, [&] { return make_exchange(before, next, m, sizes); });
}

// One mesh dim changes its cut, on the same tensor dim or on another: every element goes directly to its new owner.
void exchange(StepState& s, int64_t m, const LayoutPtr& next) {
  const auto x = exchange_of(*s.layout, *next, m, s.sizes);
  const auto me = s.mesh().coordinate()[m];
  const auto source = s.local;
  s.layout = next;
  comm::Collective all{.kind = comm::CollectiveKind::AllToAll, .mesh = next->mesh_ptr(), .mesh_dim = m};
  if (!s.later && x->in_order && source.is_contiguous()) {
    all.in = source;
    all.out = s.local = at::empty(x->sizes, source.options());
    all.in_sizes = x->sent.all();
    all.out_sizes = x->received.all();
    return comm::start(std::move(all)).wait();
  }
  // The send buffer is freed before the result is made, unless the step is only started here.
  auto sent = x->sent.all(), received = x->received.all();
  sent[me] = received[me] = 0;
  const auto spacing = comm::spacing(source, s.mesh(), m, comm::StagingKind::AllToAll);
  auto arrived = at::empty({kernels::length_of({received, spacing})}, source.options());
  all.in = x->pack(source, {sent, spacing});
  all.out = arrived;
  all.in_sizes = std::move(sent);
  all.out_sizes = received;
  all.spacing = spacing;
  auto move = comm::start(std::move(all));
  if (!s.later) {
    move.wait();
  }
  auto result = at::empty(x->sizes, source.options());
  kernels::copy(source, x->own.from, result, x->own.to);
  s.local = result;
  complete(
      s, std::move(move),
      [arrived, result, x, received, spacing]() mutable {
        x->unpack(arrived, result, {received, spacing});
      },
      {arrived, result});
}

// Turns a replicated value into summands. If the reduction allows repeats, all ranks keep the value; else coordinate 0 keeps
// it and the others get the neutral value.
void make_partial(StepState& s, int64_t m, const LayoutPtr& next) {
  const auto& p = next->placement(m);
  if (s.layout->placement(m).serves_as(p)) {
    s.layout = next;
    return;
  }
  if (p.reduce == ReduceOp::Norm) { // all ranks have the same value, so all raise or none does
    at::_assert_async(
        s.local.lt(0).any().logical_not(),
        "a negative value cannot be kept as summands of a norm; redistribute() the norm first");
  }
  const bool repeats =
      p.reduce == ReduceOp::Avg || p.reduce == ReduceOp::Min || p.reduce == ReduceOp::Max || p.reduce == ReduceOp::Band;
  if (!repeats && s.mesh().coordinate()[m] != 0) {
    const auto nothing = neutral_summand(p.reduce, s.local.scalar_type(), p.norm_order);
    if (s.local.unsafeGetTensorImpl()->is_wrapped_number()) { // type promotion must be the same on all ranks
      s.local = at::detail::scalar_tensor_static(nothing, s.local.scalar_type(), at::kCPU); // a number even under a fake mode
      s.local.unsafeGetTensorImpl()->set_wrapped_number(true);
    } else {
      s.local = comm::traced::after(at::full_like(s.local, nothing), s.local);
    }
  }
  s.layout = next;
}

// Turns a piece into a summand of the whole, padded with the neutral value.
void pad(StepState& s, int64_t m, const LayoutPtr& next) {
  const auto& p = next->placement(m);
  const auto dim = s.layout->placement(m).dim;
  const auto& me = s.mesh().coordinate();
  const auto extent = s.layout->extent_before(m, dim, s.sizes[dim], me);
  const auto nothing = neutral_summand(p.reduce, s.local.scalar_type(), p.norm_order);
  auto out = at::full(with_size(s.local.sizes(), dim, extent), nothing, s.local.options());
  then(s, out, [piece = s.local, out, dim, runs = s.layout->split(m, extent, me)]() mutable {
    kernels::copy(piece, boxes_along(piece.sizes(), dim, side_by_side(runs)), out, boxes_along(out.sizes(), dim, runs));
  });
  s.layout = next;
}

void go_at_once(StepState& s, const LayoutPtr& next) {
  auto moving = transfer(s.local, *s.layout, *next, s.sizes, s.later);
  s.local = moving.local;
  s.layout = next;
  s.rest = std::move(moving.rest);
}

} // namespace

void check_reducible(const Layout& from, const Layout& to, at::ScalarType dtype) {
  for (int64_t m = 0; from.has_partial() && m < from.ndim(); ++m) {
    const auto& p = from.placement(m);
    TORCH_CHECK_TYPE(
        !p.is_partial() || p.reduce != ReduceOp::Avg || !c10::isIntegralType(dtype, true), "redistribute: from ", from.str(),
        " to ", to.str(), ": the mean of a tensor of dtype ", dtype, " over ranks is not a value of ", dtype,
        "; convert it to a floating-point dtype first, or use Partial(\"sum\") (rank ", from.mesh().rank(), ")");
    const bool stays = from.mesh().size(m) == 1 || (&from.mesh() == &to.mesh() && p == to.placement(m));
    TORCH_CHECK(
        !p.is_partial() || stays || comm::can_reduce(dtype, p.reduce), "redistribute: from ", from.str(), " to ", to.str(),
        ": a complex tensor can be reduced over ranks only by sum or avg, not by ", shardtensor::name_of(p.reduce), " (rank ",
        from.mesh().rank(), ")");
  }
}

comm::InFlight with_step_context(comm::InFlight rest, const Layout& from, const Layout& to, const Step& step) {
  rest.within([from = LayoutPtr::reclaim_copy(&from), to = LayoutPtr::reclaim_copy(&to), step](c10::function_ref<void()> run) {
    with_step_context(*from, *to, step, run, nothing_due);
  });
  return rest;
}

uint64_t communicating_dims(c10::ArrayRef<Step> steps) {
  uint64_t out = 0;
  for (const auto& step : steps) {
    out |= communicates(step) && step.mesh_dim >= 0 ? uint64_t{1} << step.mesh_dim : 0;
  }
  return out;
}

void agree(const Plan& plan, const Layout& from, const Layout& to, IntArrayRef sizes, at::ScalarType dtype) {
  // A rank may have dropped a plan that other ranks still have. So this only skips a check that check_metadata() would skip too.
  const auto kind = (comm::group_generation() << 16) + (static_cast<int64_t>(sizes.size()) << 8) + static_cast<int64_t>(dtype);
  if (plan.communicates() && std::exchange(plan.agreed, kind) != kind) {
    with_step_context(
        from, to, plan.steps.front(), [&] { check_metadata(from, to, sizes, dtype); },
        [&] { return communicating_dims(plan.steps); });
  }
}

void take_step(StepState& s, const Step& step, const LayoutPtr& next) {
  const auto m = step.mesh_dim;
  // A rank alone along the mesh dim holds everything, for any placement. Exception: a norm's summand may be negative.
  if (m >= 0 && comm::is_alone(s.mesh(), m) && s.layout->placement(m).reduce != ReduceOp::Norm) {
    s.layout = next;
    return;
  }
  switch (step.kind) {
    case StepKind::AllReduce:
      return reduce_everywhere(s, m, next);
    case StepKind::ReduceScatter:
      return reduce_into_pieces(s, m, next);
    case StepKind::AllGather:
      return gather(s, m, next);
    case StepKind::AllToAll:
      return exchange(s, m, next);
    case StepKind::Slice:
      return slice(s, m, next);
    case StepKind::MakePartial:
      return make_partial(s, m, next);
    case StepKind::Pad:
      return pad(s, m, next);
    case StepKind::Transfer:
      return go_at_once(s, next);
  }
}

int64_t prepare_step(const Step& step, const Layout& before, const Layout& next, IntArrayRef sizes) {
  const auto m = step.mesh_dim;
  switch (step.kind) {
    case StepKind::ReduceScatter:
    case StepKind::AllGather:
      return divided(before, next, m, sizes)->peers;
    case StepKind::AllToAll:
      return exchange_of(before, next, m, sizes)->peers;
    case StepKind::Transfer:
      return static_cast<int64_t>(cached_transfer(before, next, sizes)->ranks.size());
    default:
      return 0;
  }
}

} // namespace shardtensor
