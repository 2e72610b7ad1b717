#include "redistribute/transfer.h"

#include "comm/values.h"
#include "kernels/boxes.h"
#include "kernels/traced.h"

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

// Calls f(coordinate, overlaps per dim) for every piece of `other` that overlaps the piece with the intervals `mine`. Only the
// mesh dims that cut are set in the coordinate.
template <typename F>
void each_overlapping(const std::vector<Intervals>& mine, const Side& other, IntArrayRef sizes, F f) {
  struct Candidate {
    Coordinate at;
    Overlaps overlaps;
  };
  const auto ndim = sizes.size();
  std::vector<std::vector<Candidate>> candidates(ndim);
  c10::SmallVector<MeshDims, 5> cutting(ndim);
  for (size_t d = 0; d < ndim; ++d) {
    const auto dim = static_cast<int64_t>(d);
    cutting[d] = other.cutting(dim);
    Coordinate c(other.mesh.ndim(), 0);
    do {
      auto overlaps = overlaps_of(mine[d], other.layout.intervals(dim, sizes[d], c));
      if (!overlaps.empty()) {
        candidates[d].push_back({c, std::move(overlaps)});
      }
    } while (advance(c, cutting[d], other.mesh));
    if (candidates[d].empty()) {
      return;
    }
  }
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

// Appends the product of the overlaps as boxes of both pieces, the last dim fastest. Returns the number of elements.
int64_t append_boxes(c10::ArrayRef<const Overlaps*> overlaps, std::vector<Box>* mine, std::vector<Box>* theirs) {
  const auto ndim = overlaps.size();
  c10::SmallVector<size_t, 5> pick(ndim, 0);
  int64_t numel = 0;
  for (;;) {
    Box a, b;
    int64_t n = 1;
    for (size_t d = 0; d < ndim; ++d) {
      const auto& o = (*overlaps[d])[pick[d]];
      a.offsets.push_back(o.mine);
      b.offsets.push_back(o.theirs);
      a.sizes.push_back(o.length);
      n *= o.length;
    }
    b.sizes = a.sizes;
    numel += n;
    if (mine) {
      mine->push_back(std::move(a));
    }
    if (theirs) {
      theirs->push_back(std::move(b));
    }
    auto d = ndim;
    while (d > 0 && ++pick[d - 1] == overlaps[d - 1]->size()) {
      pick[--d] = 0;
    }
    if (d == 0) {
      return numel;
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
    std::vector<Part> sent, received;
    const auto before = from_.mesh.index_of_rank(rank), after = to_.mesh.index_of_rank(rank);
    if (before >= 0) {
      sent = sends(rank, from_.mesh.coordinate_at(before));
    }
    if (after >= 0) {
      const auto holds = before >= 0 ? std::optional(from_.mesh.coordinate_at(before)) : std::nullopt;
      received = receives(to_.mesh.coordinate_at(after), holds, out);
    }
    flatten(sent, out.sent, out.packed);
    flatten(received, out.received, out.unpacked);
    return out;
  }

 private:
  struct Part {
    Transfer::Message message;
    std::vector<Box> boxes;
  };

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

  std::vector<Part> receives(const Coordinate& me, const std::optional<Coordinate>& holds, Transfer& out) const {
    std::vector<Part> parts;
    each_overlapping(intervals(to_, me), from_, sizes_, [&](const Coordinate& piece, c10::ArrayRef<const Overlaps*> overlaps) {
      if (holds && agree(piece, *holds, from_.cuts)) {
        append_boxes(overlaps, &out.kept_to, &out.kept_from);
        return;
      }
      auto holder = piece;
      set_server(holder, me, holds);
      Part part{{from_.mesh.rank_at(holder), 0}, {}};
      part.message.numel = append_boxes(overlaps, &part.boxes, nullptr);
      parts.push_back(std::move(part));
    });
    return parts;
  }

  std::vector<Part> sends(int64_t rank, const Coordinate& me) const {
    std::vector<Part> parts;
    each_overlapping(intervals(from_, me), to_, sizes_, [&](const Coordinate& piece, c10::ArrayRef<const Overlaps*> overlaps) {
      auto receiver = piece;
      for (auto m : to_.summands) {
        receiver[m] = me[m];
      }
      do {
        const auto to_rank = to_.mesh.rank_at(receiver);
        if (to_rank != rank && serves(me, receiver, to_rank)) {
          Part part{{to_rank, 0}, {}};
          part.message.numel = append_boxes(overlaps, &part.boxes, nullptr);
          parts.push_back(std::move(part));
        }
      } while (advance(receiver, to_.copies, to_.mesh));
    });
    return parts;
  }

  bool serves(const Coordinate& me, const Coordinate& receiver, int64_t to_rank) const {
    const auto index = from_.mesh.index_of_rank(to_rank);
    const auto holds = index >= 0 ? std::optional(from_.mesh.coordinate_at(index)) : std::nullopt;
    if (holds && agree(me, *holds, from_.cuts)) {
      return false; // it has the piece
    }
    auto holder = me;
    set_server(holder, receiver, holds);
    return holder == me;
  }

  static void flatten(std::vector<Part>& parts, std::vector<Transfer::Message>& messages, std::vector<Box>& boxes) {
    std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.message.rank < b.message.rank; });
    for (auto& part : parts) {
      messages.push_back(part.message);
      std::move(part.boxes.begin(), part.boxes.end(), std::back_inserter(boxes));
    }
  }

  Side from_, to_;
  IntArrayRef sizes_;
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

// The messages by rank. For a rank that is in only one of the lists, the other direction is empty.
struct Peers {
  std::vector<int64_t> ranks, sent, received;

  explicit Peers(const Transfer& t) {
    size_t i = 0, j = 0;
    while (i < t.sent.size() || j < t.received.size()) {
      const bool out = j == t.received.size() || (i < t.sent.size() && t.sent[i].rank <= t.received[j].rank);
      const bool in = i == t.sent.size() || (j < t.received.size() && t.received[j].rank <= t.sent[i].rank);
      ranks.push_back(out ? t.sent[i].rank : t.received[j].rank);
      sent.push_back(out ? t.sent[i++].numel : 0);
      received.push_back(in ? t.received[j++].numel : 0);
    }
  }
};

} // namespace

Transfer transfer_of(const Layout& from, const Layout& to, IntArrayRef sizes, int64_t rank) {
  return Match(from, to, sizes).of(rank);
}

Moving transfer(const at::Tensor& local, const Layout& from, const Layout& to, IntArrayRef sizes, bool later) {
  const auto t = transfer_of(from, to, sizes, to.mesh().rank());
  const Peers peers(t);
  const auto options = local.options();
  const auto newcomers = ranks_without(to.mesh(), from.mesh());
  const bool all_held = newcomers == 0 && !from.is_sharded();
  auto arrived = at::empty({c10::sum_integers(peers.received)}, options);
  comm::Completion move = [] {};
  {
    auto packed =
        is_traced(local) ? kernels::traced::packed(local, t.packed) : at::empty({c10::sum_integers(peers.sent)}, options);
    if (!t.packed.empty() && !is_traced(local)) {
      kernels::pack(local, t.packed, packed);
    }
    if (!all_held) {
      const auto callers = from.mesh().size() + newcomers;
      move = comm::start_send_receive(arrived, peers.received, packed, peers.sent, peers.ranks, to.mesh(), callers);
    }
  }
  // The send buffer is freed before the result is made, unless the transfer is only started here.
  if (!later) {
    std::exchange(move, [] {})();
  }
  auto result = at::empty(to.local_sizes(sizes), options);
  if (!t.kept_to.empty()) {
    kernels::copy(local, t.kept_from, result, t.kept_to);
  }
  auto finish = [move = std::move(move), arrived, result, boxes = t.unpacked]() mutable {
    move();
    if (!boxes.empty()) {
      kernels::unpack(arrived, boxes, result);
    }
  };
  if (later) {
    return {result, std::move(finish), {arrived, result}};
  }
  finish();
  return {result};
}

} // namespace shardtensor
