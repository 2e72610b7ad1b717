// From any layout to any other, on any two meshes: finds which boxes go from which rank to which, and sends them. Every element
// that a rank lacks arrives once, from one holder; elements that it already holds are copied. All ranks compute the same
// result, without communication.
#pragma once

#include "comm/in_flight.h"
#include "layout/layout.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace shardtensor {

// The boxes that one piece shares with the pieces of other ranks, message after message, one or several boxes for each. Boxes
// for thousands of ranks differ only by a run of indices along a dim or two, so only the runs are stored until all() is called.
class Boxes {
 public:
  // The indices of one dim that each of the other pieces shares.
  struct DimRuns {
    std::vector<Interval> runs;
    std::vector<size_t> ends; // where each piece's runs end in `runs`; empty: each piece has one run

    size_t pieces() const {
      return ends.empty() ? runs.size() : ends.size();
    }
    c10::ArrayRef<Interval> of(size_t piece) const {
      if (ends.empty()) {
        return runs[piece];
      }
      const auto first = piece ? ends[piece - 1] : 0;
      return c10::ArrayRef<Interval>(runs).slice(first, ends[piece] - first);
    }
    int64_t length(size_t piece) const;
  };
  using RunsByDim = c10::SmallVector<DimRuns, 4>;

  Boxes() = default;
  // `picked`: numbers of combinations of the dims' pieces, counted with the last dim fastest.
  Boxes(RunsByDim dims, std::vector<uint32_t> picked);

  bool empty() const {
    return picked_.empty();
  }
  // About the number of boxes.
  size_t weight() const {
    return picked_.size();
  }
  // Made by the first call, on whichever thread.
  const std::vector<Box>& all() const;

 private:
  struct LazyList;
  RunsByDim dims_;
  std::vector<uint32_t> picked_;
  std::shared_ptr<LazyList> all_;
};

struct Transfer {
  struct Message {
    int64_t rank; // global
    int64_t numel;
  };
  // At most one message to and from each rank, by ascending rank.
  std::vector<Message> sent, received;
  // The messages' boxes one after the other: in this rank's old piece, and in its new piece.
  Boxes packed, unpacked;
  // The boxes that the rank keeps.
  std::vector<Box> kept_from, kept_to;
};

// The messages of any rank, found without communication, in time proportional to its peers and to the ranks that hold or want
// copies of its elements. (With strided placements: to the ranks of both meshes.) If there is Partial, it is on the same mesh
// dims of both layouts, on one mesh: summands move only between ranks with the same coordinates along those mesh dims.
Transfer transfer_of(const Layout& from, const Layout& to, c10::ArrayRef<int64_t> sizes, int64_t rank);
// The elements that a rank sends and receives.
struct Traffic {
  int64_t sent = 0, received = 0;
};
// Those of transfer_of(), without its boxes.
Traffic traffic_of_transfer(const Layout& from, const Layout& to, c10::ArrayRef<int64_t> sizes, int64_t rank);

// The number of indices that are in both.
int64_t common_length(const Intervals& a, const Intervals& b);

// This rank's part, by peer, found once for each pair of layouts and size (plan_cache.h).
struct RankTransfer {
  Transfer part;
  std::vector<int64_t> ranks, sent, received; // by peer: elements
  int64_t callers = 0;                        // the ranks that make the call
  bool all_held = false;                      // no rank lacks an element

  size_t weight() const {
    return part.packed.weight() + part.unpacked.weight() + part.kept_from.size() + ranks.size() / 4;
  }
};
std::shared_ptr<const RankTransfer> cached_transfer(const Layout& from, const Layout& to, c10::ArrayRef<int64_t> sizes);

// This rank's piece. If `rest` is set, the piece has its sizes and memory, and its data after rest.wait().
struct PendingPiece {
  at::Tensor local;
  comm::InFlight rest = {};
};

// `local`: this rank's piece under `from`; ignored if the mesh does not hold this rank. Every rank of either mesh calls it.
// `later`: only starts the messages.
PendingPiece transfer(const at::Tensor& local, const Layout& from, const Layout& to, c10::ArrayRef<int64_t> sizes, bool later);

} // namespace shardtensor
