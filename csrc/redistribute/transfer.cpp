#include "redistribute/transfer.h"

#include "kernels/boxes.h"
#include "redistribute/messages.h"
#include "redistribute/plan_cache.h"

#include <ATen/ATen.h>

#include <c10/util/accumulate.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <tuple>
#include <utility>

namespace shardtensor {

namespace {

using c10::IntArrayRef;

// The same elements along one dim of two pieces.
struct Overlap {
  int64_t mine, theirs; // its start in each
  int64_t length;
};
using Overlaps = c10::SmallVector<Overlap, 2>;

// In ascending order of the global index, whichever side is `mine`.
Overlaps overlaps_of(const Intervals& mine, const Intervals& theirs) {
  Overlaps out;
  size_t i = 0, j = 0;
  int64_t mine_at = 0, theirs_at = 0;
  while (i < mine.size() && j < theirs.size()) {
    const auto &a = mine[i], &b = theirs[j];
    const auto both = intersection(a, b);
    if (both.length > 0) {
      out.push_back({mine_at + both.start - a.start, theirs_at + both.start - b.start, both.length});
    }
    if (a.end() <= b.end()) {
      mine_at += a.length;
      ++i;
    } else {
      theirs_at += b.length;
      ++j;
    }
  }
  return out;
}

using MeshDims = c10::SmallVector<int64_t, 4>;

// Advances the coordinate along `dims`, the last one fastest; false after the last coordinate.
bool advance(Coordinate& c, const MeshDims& dims, const Mesh& mesh) {
  for (auto it = dims.rbegin(); it != dims.rend(); ++it) {
    if (++c[*it] < mesh.size(*it)) {
      return true;
    }
    c[*it] = 0;
  }
  return false;
}

int64_t number_of(const Coordinate& c, const MeshDims& dims, const Mesh& mesh) {
  int64_t n = 0;
  for (auto m : dims) {
    n = n * mesh.size(m) + c[m];
  }
  return n;
}

int64_t count_of(const MeshDims& dims, const Mesh& mesh) {
  int64_t n = 1;
  for (auto m : dims) {
    n *= mesh.size(m);
  }
  return n;
}

bool agree(const Coordinate& a, const Coordinate& b, const MeshDims& dims) {
  return std::all_of(dims.begin(), dims.end(), [&](int64_t m) { return a[m] == b[m]; });
}

struct TransferSide {
  explicit TransferSide(const Layout& l) : layout(l), mesh(l.mesh()) {
    for (int64_t m = 0; m < l.ndim(); ++m) {
      (l.placement(m).is_shard() ? cuts : l.placement(m).is_partial() ? summands : copies).push_back(m);
    }
  }
  MeshDims cutting(int64_t dim) const {
    MeshDims out;
    std::copy_if(cuts.begin(), cuts.end(), std::back_inserter(out), [&](int64_t m) { return layout.placement(m).is_shard(dim); });
    return out;
  }

  bool all_cut() const {
    return copies.empty() && summands.empty();
  }
  // The distance in the mesh's row-major order between neighbours along mesh dim m.
  int64_t step(int64_t m) const {
    int64_t n = 1;
    for (auto i = m + 1; i < mesh.ndim(); ++i) {
      n *= mesh.size(i);
    }
    return n;
  }

  const Layout& layout;
  const Mesh& mesh;
  MeshDims cuts, copies, summands;
};

// The pieces of one dim that share indices with `mine`, in the order of their coordinates.
class MeetingPieces {
 public:
  MeetingPieces(const Intervals& mine, const TransferSide& other, int64_t dim, int64_t size)
      : mine_(mine), other_(other), cutting_(other.cutting(dim)), at_(other.mesh.ndim(), 0) {
    const auto strided = [&](int64_t m) { return other.layout.placement(m).split_factor > 1; };
    if (std::any_of(cutting_.begin(), cutting_.end(), strided)) {
      do {
        add(other.mesh.index_of(at_), other.layout.intervals(dim, size, at_));
      } while (advance(at_, cutting_, other.mesh));
    } else if (!mine.empty()) {
      start_ = end_ = mine[0].start;
      for (const auto& run : mine) {
        start_ = std::min(start_, run.start);
        end_ = std::max(end_, run.end());
      }
      descend(0, {0, size}, 0);
    }
  }

  std::vector<int64_t> index; // of the pieces in the mesh: their coordinates along the mesh dims that cut, zeros along others
  Boxes::DimRuns dim;         // the shared indices, counted in the piece `mine`

 private:
  // Only the coordinates whose pieces of `piece` may meet `mine`, mesh dim by mesh dim.
  void descend(size_t level, const Interval& piece, int64_t at) {
    const auto start = std::max(start_, piece.start), stop = std::min(end_, piece.end());
    if (start >= stop) {
      return;
    }
    if (level == cutting_.size()) {
      return add(at, {piece});
    }
    const auto m = cutting_[level];
    const auto [first, last] = other_.layout.meeting(m, piece.length, at_, {start - piece.start, stop - start});
    const auto step = other_.step(m);
    if (level + 1 < cutting_.size() || mine_.size() > 1) {
      each_piece(m, piece.length, first, last, [&](int64_t c, const Interval& part) {
        at_[m] = c;
        descend(level + 1, {piece.start + part.start, part.length}, at + c * step);
      });
    } else {
      auto n = index.size(); // written in place: there may be thousands
      index.resize(n + static_cast<size_t>(last - first));
      dim.runs.resize(index.size());
      auto* const indices = index.data();
      auto* const runs = dim.runs.data();
      each_piece(m, piece.length, first, last, [&](int64_t c, const Interval& part) {
        const auto from = std::max(start, piece.start + part.start);
        const auto to = std::min(stop, piece.start + part.end());
        indices[n] = at + c * step;
        runs[n] = {from - start_, to - from};
        n += from < to;
      });
      index.resize(n);
      dim.runs.resize(n);
    }
    at_[m] = 0;
  }
  // Calls f(c, part) for the parts of the coordinates [first, last) along mesh dim m.
  template <typename F>
  void each_piece(int64_t m, int64_t extent, int64_t first, int64_t last, const F& f) {
    const auto& cut = other_.layout.cut(m);
    at_[m] = first;
    auto part = other_.layout.piece(m, extent, at_);
    if (!cut) {
      const auto full = (extent + other_.mesh.size(m) - 1) / other_.mesh.size(m);
      for (auto c = first; c < last; ++c, part = {part.end(), std::min(full, extent - part.end())}) {
        f(c, part);
      }
    } else if (cut->follows()) {
      for (at_[m] = first; at_[m] < last; ++at_[m]) {
        f(at_[m], other_.layout.piece(m, extent, at_));
      }
    } else {
      const auto* lengths = cut->data() + other_.layout.row_of(m, at_) * other_.mesh.size(m);
      for (auto c = first; c < last; part.start += lengths[c++]) {
        f(c, Interval{part.start, lengths[c]});
      }
    }
  }
  void add(int64_t at, const Intervals& theirs) {
    const auto overlaps = overlaps_of(mine_, theirs);
    if (!overlaps.empty()) {
      index.push_back(at);
      for (const auto& o : overlaps) {
        dim.runs.push_back({o.mine, o.length});
      }
      dim.ends.push_back(dim.runs.size());
    }
  }

  const Intervals& mine_;
  const TransferSide& other_;
  const MeshDims cutting_;
  Coordinate at_;
  int64_t start_ = 0, end_ = 0; // of `mine` as a whole
};

// The pieces of `other` that share elements with the piece of these intervals: the product of those that meet it along each dim.
class OverlappingPieces {
 public:
  OverlappingPieces(const std::vector<Intervals>& mine, const TransferSide& other, IntArrayRef sizes) {
    for (size_t d = 0; d < sizes.size(); ++d) {
      met_.emplace_back(mine[d], other, static_cast<int64_t>(d), sizes[d]);
      count_ *= met_.back().index.size();
    }
    TORCH_CHECK(count_ <= std::numeric_limits<uint32_t>::max(), "transfer: a rank has ", count_, " messages");
  }

  size_t count() const {
    return count_;
  }
  // Calls f(index, numel, number) for each: where it is in the mesh (at 0 along mesh dims that cut nothing), the elements that
  // are shared, and its number in the product.
  template <typename F>
  void each(const F& f) const {
    if (count_ == 0) {
      return;
    }
    if (met_.empty()) {
      return f(0, 1, 0);
    }
    auto inner = met_.size() - 1; // the last dim with several
    int64_t index = 0, numel = 1;
    for (; inner > 0 && met_[inner].index.size() == 1; --inner) {
      index += met_[inner].index[0];
      numel *= met_[inner].dim.length(0);
    }
    const auto& last = met_[inner];
    const auto n = last.index.size();
    for (size_t outer = 0; outer < count_ / n; ++outer) {
      auto at = index, each = numel;
      auto rest = outer;
      for (auto d = inner; d-- > 0; rest /= met_[d].index.size()) {
        const auto piece = rest % met_[d].index.size();
        at += met_[d].index[piece];
        each *= met_[d].dim.length(piece);
      }
      for (size_t i = 0; i < n; ++i) {
        f(at + last.index[i], each * last.dim.length(i), static_cast<uint32_t>(outer * n + i));
      }
    }
  }
  Boxes boxes(std::vector<uint32_t> numbers) && {
    Boxes::RunsByDim dims;
    for (auto& met : met_) {
      dims.push_back(std::move(met.dim));
    }
    return {std::move(dims), std::move(numbers)};
  }

 private:
  std::vector<MeetingPieces> met_;
  size_t count_ = 1;
};

// Which of `copies` equal holders serves receiver number n: the sum of n's digits in base `copies`. So the load is even,
// whether neighbouring receivers want the same piece, or every `copies`-th receiver, and so on.
int64_t server_of(int64_t n, int64_t copies) {
  int64_t sum = 0;
  for (; copies > 1 && n > 0; n /= copies) {
    sum += n % copies;
  }
  return sum % copies;
}

// Which rank holds what before, which rank wants what after, and which holder serves which receiver. A receiver that is itself
// a holder is served along its own row of the mesh; for other receivers the holders of a piece take turns.
class HolderAssignment {
 public:
  HolderAssignment(const Layout& from, const Layout& to, IntArrayRef sizes) : from_(from), to_(to), sizes_(sizes) {
    for (const auto* side : {&from_, &to_}) {
      for (auto m : side->summands) {
        TORCH_INTERNAL_ASSERT(
            &from.mesh() == &to.mesh() && from.placement(m) == to.placement(m), "transfer: from ", from.str(), " to ", to.str(),
            ": summands on one side only");
      }
    }
  }

  Transfer of(int64_t rank) const {
    Transfer out;
    const auto before = from_.mesh.index_of_rank(rank), after = to_.mesh.index_of_rank(rank);
    if (before >= 0) {
      const auto me = from_.mesh.coordinate_at(before);
      OverlappingPieces sharing(intervals(from_, me), to_, sizes_);
      out.packed = list(std::move(sharing), out.sent, [&](const auto& add) { each_sent(sharing, rank, me, add); });
    }
    if (after >= 0) {
      const auto me = to_.mesh.coordinate_at(after);
      const auto mine = intervals(to_, me);
      OverlappingPieces sharing(mine, from_, sizes_);
      out.unpacked = list(std::move(sharing), out.received, [&](const auto& add) { each_received(sharing, rank, me, add); });
      if (before >= 0) {
        list_kept(mine, intervals(from_, from_.mesh.coordinate_at(before)), out);
      }
    }
    return out;
  }

  Traffic traffic_of(int64_t rank) const {
    Traffic out;
    const auto before = from_.mesh.index_of_rank(rank), after = to_.mesh.index_of_rank(rank);
    if (before >= 0) {
      const auto me = from_.mesh.coordinate_at(before);
      const OverlappingPieces sharing(intervals(from_, me), to_, sizes_);
      each_sent(sharing, rank, me, [&](int64_t, int64_t numel, uint32_t) { out.sent += numel; });
    }
    if (after >= 0) { // everything that it lacks, once
      const auto me = to_.mesh.coordinate_at(after);
      out.received = c10::multiply_integers(to_.layout.local_sizes(sizes_, me));
      if (const auto held = held_by(rank)) {
        int64_t kept = 1;
        const auto mine = intervals(to_, me), theirs = intervals(from_, *held);
        for (size_t d = 0; d < mine.size(); ++d) {
          kept *= common_length(mine[d], theirs[d]);
        }
        out.received -= kept;
      }
    }
    return out;
  }

 private:
  std::optional<Coordinate> held_by(int64_t rank) const {
    const auto index = from_.mesh.index_of_rank(rank);
    return index >= 0 ? std::optional(from_.mesh.coordinate_at(index)) : std::nullopt;
  }

  std::vector<Intervals> intervals(const TransferSide& side, const Coordinate& c) const {
    std::vector<Intervals> out;
    for (size_t d = 0; d < sizes_.size(); ++d) {
      out.push_back(side.layout.intervals(static_cast<int64_t>(d), sizes_[d], c));
    }
    return out;
  }

  int64_t receiver_number(const Coordinate& c) const {
    return number_of(c, to_.copies, to_.mesh) * count_of(to_.cuts, to_.mesh) + number_of(c, to_.cuts, to_.mesh);
  }

  // Chooses the holder of a piece that serves the rank with this coordinate: sets `holder` along the mesh dims that do not cut.
  void set_server(Coordinate& holder, const Coordinate& receiver, const std::optional<Coordinate>& receiver_holds) const {
    auto number = receiver_holds ? 0 : server_of(receiver_number(receiver), count_of(from_.copies, from_.mesh));
    for (auto it = from_.copies.rbegin(); it != from_.copies.rend(); ++it) {
      holder[*it] = receiver_holds ? (*receiver_holds)[*it] : number % from_.mesh.size(*it);
      number /= from_.mesh.size(*it);
    }
    for (auto m : from_.summands) {
      holder[m] = receiver[m];
    }
  }

  // Calls get(rank, numel, number) for the elements from each holder except the rank itself.
  template <typename Get>
  void each_received(const OverlappingPieces& sharing, int64_t rank, const Coordinate& me, const Get& get) const {
    const auto& ranks = from_.mesh.description().ranks;
    if (from_.all_cut()) {
      return sharing.each([&](int64_t index, int64_t numel, uint32_t number) {
        if (ranks[index] != rank) {
          get(ranks[index], numel, number);
        }
      });
    }
    const auto holds = held_by(rank);
    sharing.each([&](int64_t index, int64_t numel, uint32_t number) {
      auto holder = from_.mesh.coordinate_at(index);
      if (!holds || !agree(holder, *holds, from_.cuts)) {
        set_server(holder, me, holds);
        get(from_.mesh.rank_at(holder), numel, number);
      }
    });
  }

  // Calls send(rank, numel, number) for what goes to each receiver.
  template <typename Send>
  void each_sent(const OverlappingPieces& sharing, int64_t rank, const Coordinate& me, const Send& send) const {
    const auto& ranks = to_.mesh.description().ranks;
    if (from_.all_cut() && to_.all_cut()) { // each element has one holder and one receiver
      return sharing.each([&](int64_t index, int64_t numel, uint32_t number) {
        if (ranks[index] != rank) {
          send(ranks[index], numel, number);
        }
      });
    }
    sharing.each([&](int64_t index, int64_t numel, uint32_t number) {
      auto receiver = to_.mesh.coordinate_at(index);
      for (auto m : to_.summands) {
        receiver[m] = me[m];
      }
      do {
        const auto to_rank = to_.mesh.rank_at(receiver);
        if (to_rank != rank && serves(me, receiver, to_rank)) {
          send(to_rank, numel, number);
        }
      } while (advance(receiver, to_.copies, to_.mesh));
    });
  }

  bool serves(const Coordinate& me, const Coordinate& receiver, int64_t to_rank) const {
    const auto holds = held_by(to_rank);
    if (holds && agree(me, *holds, from_.cuts)) {
      return false; // it has the piece
    }
    auto holder = me;
    set_server(holder, receiver, holds);
    return holder == me;
  }

  // The messages that each(add) adds, by ascending rank, and their boxes.
  template <typename Each>
  static Boxes list(OverlappingPieces&& sharing, std::vector<Transfer::Message>& messages, const Each& each) {
    std::vector<uint32_t> numbers(sharing.count());
    messages.resize(sharing.count());
    size_t n = 0;
    int64_t before = -1;
    bool sorted = true;
    each([&](int64_t rank, int64_t numel, uint32_t number) {
      if (C10_UNLIKELY(n == messages.size())) { // several receivers of one piece
        messages.resize(2 * n);
        numbers.resize(2 * n);
      }
      messages[n] = {rank, numel};
      numbers[n++] = number;
      sorted &= std::exchange(before, rank) < rank;
    });
    messages.resize(n);
    numbers.resize(n);
    if (!sorted) {
      std::vector<std::pair<Transfer::Message, uint32_t>> both;
      for (size_t i = 0; i < messages.size(); ++i) {
        both.emplace_back(messages[i], numbers[i]);
      }
      std::sort(both.begin(), both.end(), [](const auto& a, const auto& b) { return a.first.rank < b.first.rank; });
      for (size_t i = 0; i < both.size(); ++i) {
        std::tie(messages[i], numbers[i]) = both[i];
      }
    }
    return std::move(sharing).boxes(std::move(numbers));
  }

  static void list_kept(const std::vector<Intervals>& mine, const std::vector<Intervals>& held, Transfer& out) {
    Boxes::RunsByDim to, from;
    for (size_t d = 0; d < mine.size(); ++d) {
      auto &there = to.emplace_back(), &here = from.emplace_back();
      for (const auto& o : overlaps_of(mine[d], held[d])) {
        there.runs.push_back({o.mine, o.length});
        here.runs.push_back({o.theirs, o.length});
      }
      if (there.runs.empty()) {
        return;
      }
      there.ends = here.ends = {there.runs.size()};
    }
    out.kept_to = Boxes(std::move(to), {0}).all();
    out.kept_from = Boxes(std::move(from), {0}).all();
  }

  TransferSide from_, to_;
  IntArrayRef sizes_;
};

// Ranks of the second mesh that are not in the first.
struct JoiningRanks {
  int64_t ranks;

  static size_t weight() {
    return 1;
  }
};

int64_t ranks_without(const Mesh& mesh, const Mesh& other) {
  int64_t n = 0;
  if (&mesh != &other) {
    for (auto rank : mesh.description().ranks) {
      n += other.index_of_rank(rank) < 0;
    }
  }
  return n;
}

} // namespace

struct Boxes::LazyList {
  std::once_flag once;
  std::vector<Box> boxes;
};

Boxes::Boxes(RunsByDim dims, std::vector<uint32_t> picked)
    : dims_(std::move(dims)), picked_(std::move(picked)), all_(std::make_shared<LazyList>()) {}

int64_t Boxes::DimRuns::length(size_t piece) const {
  if (C10_LIKELY(ends.empty())) {
    return runs[piece].length;
  }
  return length_of(of(piece));
}

const std::vector<Box>& Boxes::all() const {
  static const std::vector<Box> nothing;
  if (empty()) {
    return nothing;
  }
  std::call_once(all_->once, [&] {
    auto& out = all_->boxes;
    out.reserve(picked_.size());
    const auto ndim = dims_.size();
    c10::SmallVector<size_t, 5> piece(ndim), run(ndim, 0);
    for (size_t number : picked_) {
      for (auto d = ndim; d-- > 0;) {
        piece[d] = number % dims_[d].pieces();
        number /= dims_[d].pieces();
      }
      for (bool more = true; more;) { // the product of their runs, the last dim the fastest
        auto& box = out.emplace_back();
        for (size_t d = 0; d < ndim; ++d) {
          const auto& r = dims_[d].of(piece[d])[run[d]];
          box.offsets.push_back(r.start);
          box.sizes.push_back(r.length);
        }
        auto d = ndim;
        while (d > 0 && ++run[d - 1] == dims_[d - 1].of(piece[d - 1]).size()) {
          run[--d] = 0;
        }
        more = d > 0;
      }
    }
  });
  return all_->boxes;
}

Transfer transfer_of(const Layout& from, const Layout& to, IntArrayRef sizes, int64_t rank) {
  return HolderAssignment(from, to, sizes).of(rank);
}

int64_t common_length(const Intervals& a, const Intervals& b) {
  int64_t n = 0;
  for (const auto& o : overlaps_of(a, b)) {
    n += o.length;
  }
  return n;
}

Traffic traffic_of_transfer(const Layout& from, const Layout& to, IntArrayRef sizes, int64_t rank) {
  return HolderAssignment(from, to, sizes).traffic_of(rank);
}

namespace {

// Replaces the messages by lists of peers and counts. For a rank that only sends or only receives, the other count is 0.
void list_peers(RankTransfer& x) {
  auto& t = x.part;
  const auto most = t.sent.size() + t.received.size();
  x.ranks.reserve(most);
  x.sent.reserve(most);
  x.received.reserve(most);
  for (size_t i = 0, j = 0; i < t.sent.size() || j < t.received.size();) {
    const auto to = i < t.sent.size() ? t.sent[i].rank : std::numeric_limits<int64_t>::max();
    const auto from = j < t.received.size() ? t.received[j].rank : std::numeric_limits<int64_t>::max();
    x.ranks.push_back(std::min(to, from));
    x.sent.push_back(to <= from ? t.sent[i++].numel : 0);
    x.received.push_back(from <= to ? t.received[j++].numel : 0);
  }
  t.sent = t.received = {};
}

} // namespace

std::shared_ptr<const RankTransfer> cached_transfer(const Layout& from, const Layout& to, IntArrayRef sizes) {
  return cached<RankTransfer>(from, to, CachedKind::Transfer, sizes, [&] {
    RankTransfer x{transfer_of(from, to, sizes, to.mesh().rank())};
    list_peers(x);
    const auto joining = cached<JoiningRanks>(from, to, CachedKind::JoiningRanks, {}, [&] {
                           return JoiningRanks{ranks_without(to.mesh(), from.mesh())};
                         })->ranks;
    x.callers = from.mesh().size() + joining;
    x.all_held = joining == 0 && !from.is_sharded();
    return x;
  });
}

PendingPiece transfer(const at::Tensor& local, const Layout& from, const Layout& to, IntArrayRef sizes, bool later) {
  const auto x = cached_transfer(from, to, sizes);
  const auto& t = x->part;
  auto boxes = messages(local, x->ranks, x->sent, x->received, to.mesh(), x->callers);
  pack(boxes, local, t.packed.all());
  const auto arrived = boxes.out;
  const auto spacing = boxes.spacing;
  comm::InFlight move;
  if (!x->all_held) {
    move = comm::start(std::move(boxes));
  }
  // The send buffer is freed before the result is made, unless the transfer is only started here.
  if (!later) {
    move.wait();
  }
  auto result = at::empty(to.local_sizes(sizes), local.options());
  if (!to.mesh().has_this_rank()) {
    result.zero_(); // a number, of which nothing arrives
  }
  if (!t.kept_to.empty()) {
    kernels::copy(local, t.kept_from, result, t.kept_to);
  }
  auto finish = [arrived, result, x, spacing]() mutable {
    if (!x->part.unpacked.empty()) {
      kernels::unpack(arrived, x->part.unpacked.all(), result, {x->received, spacing});
    }
  };
  if (move) {
    move.then(finish, {arrived, result});
  } else {
    finish();
  }
  return {result, std::move(move)};
}

} // namespace shardtensor
