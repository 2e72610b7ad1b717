#include "redistribute/transfer.h"

#include "comm/values.h"
#include "kernels/boxes.h"
#include "kernels/traced.h"
#include "redistribute/kept.h"

#include <ATen/ATen.h>

#include <c10/util/accumulate.h>

#include <algorithm>
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
    const auto start = std::max(a.start, b.start);
    const auto a_end = a.start + a.length, b_end = b.start + b.length;
    const auto length = std::min(a_end, b_end) - start;
    if (length > 0) {
      out.push_back({mine_at + start - a.start, theirs_at + start - b.start, length});
    }
    if (a_end <= b_end) {
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

struct Side {
  explicit Side(const Layout& l) : layout(l), mesh(l.mesh()) {
    for (int64_t m = 0; m < l.ndim(); ++m) {
      (l.placement(m).is_shard() ? cuts : l.placement(m).is_partial() ? summands : copies).push_back(m);
    }
  }
  MeshDims cutting(int64_t dim) const {
    MeshDims out;
    std::copy_if(cuts.begin(), cuts.end(), std::back_inserter(out), [&](int64_t m) { return layout.placement(m).is_shard(dim); });
    return out;
  }

  const Layout& layout;
  const Mesh& mesh;
  MeshDims cuts, copies, summands;
};

// Pieces of one dim that overlap `mine`, in the order of their coordinates. Only the mesh dims that cut the dim are set.
struct Candidate {
  Coordinate at;
  Overlaps overlaps;
};
class Candidates {
 public:
  Candidates(const Intervals& mine, const Side& other, int64_t dim, int64_t size, const MeshDims& cutting)
      : mine_(mine), other_(other), cutting_(cutting), at_(other.mesh.ndim(), 0) {
    const auto strided = [&](int64_t m) { return other.layout.placement(m).split_factor > 1; };
    if (std::any_of(cutting.begin(), cutting.end(), strided)) {
      do {
        add(other.layout.intervals(dim, size, at_));
      } while (advance(at_, cutting, other.mesh));
    } else if (!mine.empty()) {
      start_ = mine.front().start;
      end_ = start_;
      for (const auto& run : mine) {
        start_ = std::min(start_, run.start);
        end_ = std::max(end_, run.start + run.length);
      }
      descend(0, {0, size});
    }
  }

  std::vector<Candidate> found;

 private:
  // Only the coordinates whose pieces of `piece` may meet `mine`, mesh dim by mesh dim.
  void descend(size_t level, const Interval& piece) {
    if (level == cutting_.size()) {
      return add({piece});
    }
    const auto m = cutting_[level];
    const auto start = std::max(start_, piece.start), end = std::min(end_, piece.start + piece.length);
    if (start >= end) {
      return;
    }
    const auto [first, last] = other_.layout.meeting(m, piece.length, at_, {start - piece.start, end - start});
    if (level + 1 == cutting_.size()) {
      found.reserve(found.size() + static_cast<size_t>(last - first));
    }
    for (auto c = first; c < last; ++c) {
      at_[m] = c;
      const auto part = other_.layout.piece(m, piece.length, at_);
      descend(level + 1, {piece.start + part.start, part.length});
    }
    at_[m] = 0;
  }
  void add(const Intervals& theirs) {
    auto overlaps = overlaps_of(mine_, theirs);
    if (!overlaps.empty()) {
      found.push_back({at_, std::move(overlaps)});
    }
  }

  const Intervals& mine_;
  const Side& other_;
  const MeshDims& cutting_;
  Coordinate at_;
  int64_t start_ = 0, end_ = 0; // of `mine` as a whole
};

// Calls f(coordinate, overlaps per dim) for every piece of `other` that overlaps the piece with the intervals `mine`. Only the
// mesh dims that cut are set in the coordinate. Before that, expect() is told how many they are.
template <typename Expect, typename F>
void each_overlapping(
    const std::vector<Intervals>& mine, const Side& other, IntArrayRef sizes, const Expect& expect, const F& f) {
  const auto ndim = sizes.size();
  std::vector<std::vector<Candidate>> candidates(ndim);
  c10::SmallVector<MeshDims, 5> cutting(ndim);
  size_t count = 1;
  for (size_t d = 0; d < ndim; ++d) {
    const auto dim = static_cast<int64_t>(d);
    cutting[d] = other.cutting(dim);
    candidates[d] = Candidates(mine[d], other, dim, sizes[d], cutting[d]).found;
    if (candidates[d].empty()) {
      return;
    }
    count *= candidates[d].size();
  }
  expect(count);
  c10::SmallVector<size_t, 5> pick(ndim, 0);
  c10::SmallVector<const Overlaps*, 5> overlaps(ndim);
  Coordinate at(other.mesh.ndim(), 0);
  for (;;) {
    for (size_t d = 0; d < ndim; ++d) {
      const auto& candidate = candidates[d][pick[d]];
      overlaps[d] = &candidate.overlaps;
      for (auto m : cutting[d]) {
        at[m] = candidate.at[m];
      }
    }
    f(at, overlaps);
    auto d = ndim;
    while (d > 0 && ++pick[d - 1] == candidates[d - 1].size()) {
      pick[--d] = 0;
    }
    if (d == 0) {
      return;
    }
  }
}

int64_t numel_of(c10::ArrayRef<const Overlaps*> overlaps) {
  int64_t n = 1;
  for (const auto* of_dim : overlaps) {
    int64_t length = 0;
    for (const auto& o : *of_dim) {
      length += o.length;
    }
    n *= length;
  }
  return n;
}

// Appends the product of the overlaps as boxes of both pieces, the last dim fastest.
void append_boxes(c10::ArrayRef<const Overlaps*> overlaps, std::vector<Box>* mine, std::vector<Box>* theirs) {
  const auto ndim = overlaps.size();
  c10::SmallVector<size_t, 5> pick(ndim, 0);
  const auto add = [&](std::vector<Box>* boxes, int64_t Overlap::*start) {
    if (boxes) {
      auto& box = boxes->emplace_back();
      for (size_t d = 0; d < ndim; ++d) {
        const auto& o = (*overlaps[d])[pick[d]];
        box.offsets.push_back(o.*start);
        box.sizes.push_back(o.length);
      }
    }
  };
  for (;;) {
    add(mine, &Overlap::mine);
    add(theirs, &Overlap::theirs);
    auto d = ndim;
    while (d > 0 && ++pick[d - 1] == overlaps[d - 1]->size()) {
      pick[--d] = 0;
    }
    if (d == 0) {
      return;
    }
  }
}

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
class Match {
 public:
  Match(const Layout& from, const Layout& to, IntArrayRef sizes) : from_(from), to_(to), sizes_(sizes) {
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
    std::vector<Part> parts;
    const auto add = [&](std::vector<Box>& boxes) {
      return [&](int64_t peer, c10::ArrayRef<const Overlaps*> overlaps) {
        parts.push_back({{peer, numel_of(overlaps)}, boxes.size(), 0});
        append_boxes(overlaps, &boxes, nullptr);
        parts.back().boxes = boxes.size() - parts.back().first;
      };
    };
    const auto room = [&](std::vector<Box>& boxes) {
      return [&](size_t count) {
        parts.reserve(count);
        boxes.reserve(count);
      };
    };
    if (before >= 0) {
      each_sent(rank, from_.mesh.coordinate_at(before), room(out.packed), add(out.packed));
      put_in_order(parts, out.sent, out.packed);
    }
    parts.clear();
    if (after >= 0) {
      const auto keep = [&](c10::ArrayRef<const Overlaps*> overlaps) { append_boxes(overlaps, &out.kept_to, &out.kept_from); };
      each_received(to_.mesh.coordinate_at(after), held_by(rank), room(out.unpacked), keep, add(out.unpacked));
      put_in_order(parts, out.received, out.unpacked);
    }
    return out;
  }

  Traffic traffic_of(int64_t rank) const {
    Traffic out;
    const auto before = from_.mesh.index_of_rank(rank), after = to_.mesh.index_of_rank(rank);
    if (before >= 0) {
      each_sent(
          rank, from_.mesh.coordinate_at(before), [](size_t) {},
          [&](int64_t, c10::ArrayRef<const Overlaps*> overlaps) { out.sent += numel_of(overlaps); });
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
  // A message and its boxes.
  struct Part {
    Transfer::Message message;
    size_t first, boxes;
  };

  std::optional<Coordinate> held_by(int64_t rank) const {
    const auto index = from_.mesh.index_of_rank(rank);
    return index >= 0 ? std::optional(from_.mesh.coordinate_at(index)) : std::nullopt;
  }

  std::vector<Intervals> intervals(const Side& side, const Coordinate& c) const {
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

  // Calls get(rank, overlaps) for what comes from each holder, and keep(overlaps) for what the rank holds itself.
  template <typename Expect, typename Keep, typename Get>
  void each_received(
      const Coordinate& me, const std::optional<Coordinate>& holds, const Expect& expect, const Keep& keep, const Get& get)
      const {
    each_overlapping(
        intervals(to_, me), from_, sizes_, expect, [&](const Coordinate& piece, c10::ArrayRef<const Overlaps*> overlaps) {
          if (holds && agree(piece, *holds, from_.cuts)) {
            return keep(overlaps);
          }
          auto holder = piece;
          set_server(holder, me, holds);
          get(from_.mesh.rank_at(holder), overlaps);
        });
  }

  // Calls send(rank, overlaps) for what goes to each receiver.
  template <typename Expect, typename Send>
  void each_sent(int64_t rank, const Coordinate& me, const Expect& expect, const Send& send) const {
    each_overlapping(
        intervals(from_, me), to_, sizes_, expect, [&](const Coordinate& piece, c10::ArrayRef<const Overlaps*> overlaps) {
          auto receiver = piece;
          for (auto m : to_.summands) {
            receiver[m] = me[m];
          }
          do {
            const auto to_rank = to_.mesh.rank_at(receiver);
            if (to_rank != rank && serves(me, receiver, to_rank)) {
              send(to_rank, overlaps);
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

  // By ascending rank.
  static void put_in_order(std::vector<Part>& parts, std::vector<Transfer::Message>& messages, std::vector<Box>& boxes) {
    const auto earlier = [](const Part& a, const Part& b) { return a.message.rank < b.message.rank; };
    if (!std::is_sorted(parts.begin(), parts.end(), earlier)) {
      std::sort(parts.begin(), parts.end(), earlier);
      std::vector<Box> sorted;
      sorted.reserve(boxes.size());
      for (const auto& part : parts) {
        const auto first = boxes.begin() + static_cast<int64_t>(part.first);
        sorted.insert(sorted.end(), first, first + static_cast<int64_t>(part.boxes));
      }
      boxes = std::move(sorted);
    }
    messages.reserve(parts.size());
    for (const auto& part : parts) {
      messages.push_back(part.message);
    }
  }

  Side from_, to_;
  IntArrayRef sizes_;
};

// Ranks of the second mesh that are not in the first.
struct Newcomers {
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

Transfer transfer_of(const Layout& from, const Layout& to, IntArrayRef sizes, int64_t rank) {
  return Match(from, to, sizes).of(rank);
}

int64_t common_length(const Intervals& a, const Intervals& b) {
  const auto overlaps = overlaps_of(a, b);
  return numel_of({&overlaps});
}

Traffic traffic_of_transfer(const Layout& from, const Layout& to, IntArrayRef sizes, int64_t rank) {
  return Match(from, to, sizes).traffic_of(rank);
}

namespace {

// For a rank that is in only one of the lists, the other direction is empty.
void list_peers(Exchanged& x) {
  const auto& t = x.part;
  size_t i = 0, j = 0;
  while (i < t.sent.size() || j < t.received.size()) {
    const bool out = j == t.received.size() || (i < t.sent.size() && t.sent[i].rank <= t.received[j].rank);
    const bool in = i == t.sent.size() || (j < t.received.size() && t.received[j].rank <= t.sent[i].rank);
    x.ranks.push_back(out ? t.sent[i].rank : t.received[j].rank);
    x.sent.push_back(out ? t.sent[i++].numel : 0);
    x.received.push_back(in ? t.received[j++].numel : 0);
  }
}

} // namespace

std::shared_ptr<const Exchanged> kept_transfer(const Layout& from, const Layout& to, IntArrayRef sizes) {
  return kept<Exchanged>(from, to, Found::Transfer, sizes, [&] {
    Exchanged x{transfer_of(from, to, sizes, to.mesh().rank())};
    list_peers(x);
    const auto newcomers =
        kept<Newcomers>(from, to, Found::Newcomers, {}, [&] { return Newcomers{ranks_without(to.mesh(), from.mesh())}; })->ranks;
    x.callers = from.mesh().size() + newcomers;
    x.all_held = newcomers == 0 && !from.is_sharded();
    return x;
  });
}

Moving transfer(const at::Tensor& local, const Layout& from, const Layout& to, IntArrayRef sizes, bool later) {
  const auto x = kept_transfer(from, to, sizes);
  const auto& t = x->part;
  const auto options = local.options();
  auto arrived = at::empty({c10::sum_integers(x->received)}, options);
  comm::InFlight move;
  {
    auto packed = is_traced(local) ? kernels::traced::packed(local, t.packed) : at::empty({c10::sum_integers(x->sent)}, options);
    if (!t.packed.empty() && !is_traced(local)) {
      kernels::pack(local, t.packed, packed);
    }
    if (!x->all_held) {
      move = comm::start_send_receive(arrived, x->received, packed, x->sent, x->ranks, to.mesh(), x->callers);
    }
  }
  // The send buffer is freed before the result is made, unless the transfer is only started here.
  if (!later) {
    move.wait();
  }
  auto result = at::empty(to.local_sizes(sizes), options);
  if (!t.kept_to.empty()) {
    kernels::copy(local, t.kept_from, result, t.kept_to);
  }
  auto finish = [arrived, result, x]() mutable {
    if (!x->part.unpacked.empty()) {
      kernels::unpack(arrived, x->part.unpacked, result);
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
