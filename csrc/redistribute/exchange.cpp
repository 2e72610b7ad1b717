#include "redistribute/exchange.h"

#include "redistribute/messages.h"
#include "redistribute/transfer.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <unordered_set>

namespace shardtensor {

bool meet(const Box& a, const Box& b) {
  for (const auto d : c10::irange(a.sizes.size())) {
    if (std::max(a.offsets[d], b.offsets[d]) >= std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d])) {
      return false;
    }
  }
  return true;
}

Box intersection(const Box& a, const Box& b) {
  Box out;
  for (const auto d : c10::irange(a.sizes.size())) {
    const auto start = std::max(a.offsets[d], b.offsets[d]);
    const auto end = std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d]);
    out.offsets.push_back(start);
    out.sizes.push_back(end - start);
  }
  return out;
}

void subtract(Box box, const Box& hole, std::vector<Box>& out) {
  if (!meet(box, hole)) {
    out.push_back(std::move(box));
    return;
  }
  const auto common = intersection(box, hole);
  for (const auto d : c10::irange(box.sizes.size())) {
    const auto start = box.offsets[d], end = start + box.sizes[d];
    const auto hole_start = common.offsets[d], hole_end = hole_start + common.sizes[d];
    for (const auto& [from, to] : {std::pair(start, hole_start), std::pair(hole_end, end)}) {
      if (from < to) {
        box.offsets[d] = from;
        box.sizes[d] = to - from;
        out.push_back(box);
      }
    }
    box.offsets[d] = hole_start;
    box.sizes[d] = common.sizes[d];
  }
}

Box within(Box box, c10::IntArrayRef origin) {
  for (const auto d : c10::irange(origin.size())) {
    box.offsets[d] -= origin[d];
  }
  return box;
}

namespace {

std::string str(const RankBox& p) {
  std::ostringstream out;
  out << "offsets " << c10::IntArrayRef(p.box.offsets) << ", sizes " << c10::IntArrayRef(p.box.sizes) << " on rank " << p.rank;
  return out.str();
}

// Boxes sorted by their starts along the dim with the most different starts, so that boxes that may meet a box are found fast.
class SortedBoxes {
 public:
  explicit SortedBoxes(const std::vector<RankBox>& held) : held_(held), order_(held.size()), reach_(held.size()) {
    const size_t ndim = held.empty() ? 0 : held[0].box.offsets.size();
    for (size_t d = 0, most = 0; d < ndim; ++d) {
      std::unordered_set<int64_t> starts;
      for (const auto& h : held) {
        starts.insert(h.box.offsets[d]);
      }
      dim_ = starts.size() > most ? d : dim_;
      most = std::max(most, starts.size());
    }
    std::iota(order_.begin(), order_.end(), size_t{0});
    if (ndim == 0) {
      return;
    }
    std::stable_sort(order_.begin(), order_.end(), [&](size_t a, size_t b) { return start_of(a) < start_of(b); });
    int64_t reach = 0;
    for (const auto i : c10::irange(order_.size())) {
      const auto& box = held[order_[i]].box;
      reach_[i] = reach = std::max(reach, box.offsets[dim_] + box.sizes[dim_]);
    }
  }

  // The numbers in `held` of boxes that may meet `box`; a few of them may not.
  std::vector<size_t> near(const Box& box) const {
    if (box.offsets.empty()) {
      return order_;
    }
    const auto start = box.offsets[dim_], end = start + box.sizes[dim_];
    auto it = std::partition_point(order_.begin(), order_.end(), [&](size_t i) { return start_of(i) < end; });
    std::vector<size_t> out;
    while (it != order_.begin() && reach_[it - order_.begin() - 1] > start) {
      out.push_back(*--it);
    }
    return out;
  }

 private:
  int64_t start_of(size_t i) const {
    return held_[i].box.offsets[dim_];
  }

  const std::vector<RankBox>& held_;
  size_t dim_ = 0;
  std::vector<size_t> order_;
  std::vector<int64_t> reach_; // the furthest end of all boxes up to here
};

// Parts of one wanted box. Elements that the rank holds itself come first; then those of each holder in turn. The first holder
// differs from box to box, so that several holders of the same elements share the work.
std::vector<BoxMove> match_one(const std::vector<RankBox>& held, const SortedBoxes& sorted, const RankBox& wanted, size_t to) {
  std::vector<BoxMove> parts;
  auto missing = wanted.box.numel();
  const auto take = [&](size_t from) {
    if (!meet(held[from].box, wanted.box)) {
      return;
    }
    std::vector<Box> news{intersection(held[from].box, wanted.box)};
    for (const auto& taken : parts) {
      if (std::none_of(news.begin(), news.end(), [&](const Box& box) { return meet(box, taken.box); })) {
        continue;
      }
      std::vector<Box> rest;
      for (auto& box : news) {
        subtract(std::move(box), taken.box, rest);
      }
      news = std::move(rest);
    }
    for (auto& box : news) {
      missing -= box.numel();
      parts.push_back({from, to, std::move(box)});
    }
  };
  auto holders = sorted.near(wanted.box);
  const auto turn = [&](size_t from) {
    return std::pair(held[from].rank != wanted.rank, (from + held.size() - to % held.size()) % held.size());
  };
  std::sort(holders.begin(), holders.end(), [&](size_t a, size_t b) { return turn(a) < turn(b); });
  for (size_t i = 0; missing > 0 && i < holders.size(); ++i) {
    take(holders[i]);
  }
  TORCH_CHECK(missing == 0, "shardtensor: no rank holds ", missing, " elements of ", str(wanted));
  return parts;
}

} // namespace

std::vector<BoxMove> match(const std::vector<RankBox>& held, const std::vector<RankBox>& wanted) {
  std::vector<BoxMove> parts;
  const SortedBoxes sorted(held);
  for (const auto to : c10::irange(wanted.size())) {
    auto of_one = match_one(held, sorted, wanted[to], to);
    std::move(of_one.begin(), of_one.end(), std::back_inserter(parts));
  }
  std::stable_sort(parts.begin(), parts.end(), [](const BoxMove& a, const BoxMove& b) { return a.from < b.from; });
  return parts;
}

namespace {

// This rank's tensors by their numbers in `placed`.
std::vector<at::Tensor> numbered(const std::vector<at::Tensor>& mine, const std::vector<RankBox>& placed, int64_t rank) {
  std::vector<at::Tensor> out(placed.size());
  size_t next = 0;
  for (const auto i : c10::irange(placed.size())) {
    if (placed[i].rank == rank) {
      TORCH_CHECK(
          next < mine.size() && mine[next].sizes() == c10::IntArrayRef(placed[i].box.sizes), "shardtensor: piece ", next,
          " of rank ", rank, " should be of ", str(placed[i]), "; it ",
          next < mine.size() ? "has sizes " + c10::str(mine[next].sizes()) : "is missing");
      out[i] = mine[next++];
    }
  }
  TORCH_CHECK(next == mine.size(), "shardtensor: rank ", rank, " holds ", next, " pieces, and was given ", mine.size());
  return out;
}

// `ndim`: of the tensor.
void check(const std::vector<RankBox>& list, const char* name, size_t ndim, const Mesh& mesh) {
  for (const auto& p : list) {
    TORCH_CHECK(
        mesh.index_of_rank(p.rank) >= 0, "shardtensor: ", name, ": ", str(p), ", a rank that is not in ", mesh.str(), " (rank ",
        mesh.rank(), ")");
    TORCH_CHECK(
        p.box.offsets.size() == ndim && p.box.sizes.size() == ndim, "shardtensor: ", name, ": ", str(p),
        ": boxes of one tensor have as many offsets and sizes as it has dims (rank ", mesh.rank(), ")");
  }
}

// Consecutive parts of one message that belong to one piece; they are copied in one launch.
struct CopyBatch {
  size_t piece;
  std::vector<Box> boxes; // in the piece's indices
  at::Tensor flat;
};

// `parts`: message after message.
std::vector<CopyBatch> runs_of(
    const std::vector<BoxMove>& parts,
    size_t BoxMove::*side,
    const std::vector<RankBox>& placed,
    const at::Tensor& flat,
    const kernels::Spacing& messages) {
  std::vector<CopyBatch> out;
  size_t i = 0;
  for (const auto& message : kernels::parts_of(flat, messages)) {
    for (int64_t at = 0; at < message.numel();) {
      CopyBatch run{parts[i].*side, {}, {}};
      const auto start = at;
      for (; at < message.numel() && parts[i].*side == run.piece; ++i) {
        at += parts[i].box.numel();
        run.boxes.push_back(within(parts[i].box, placed[run.piece].box.offsets));
      }
      run.flat = message.narrow(0, start, at - start);
      out.push_back(std::move(run));
    }
  }
  return out;
}

} // namespace

std::vector<at::Tensor> exchange(
    const std::vector<at::Tensor>& pieces,
    const std::vector<RankBox>& held,
    const std::vector<RankBox>& wanted,
    const Mesh& mesh,
    const at::TensorOptions& options) {
  const auto& some = held.empty() ? wanted : held;
  const auto ndim = some.empty() ? 0 : some[0].box.sizes.size();
  check(held, "held", ndim, mesh);
  check(wanted, "wanted", ndim, mesh);
  const auto me = mesh.rank();
  std::vector<BoxMove> kept, sent, received;
  std::map<int64_t, Traffic> traffic; // with each other rank
  for (auto& part : match(held, wanted)) {
    const auto from = held[part.from].rank, to = wanted[part.to].rank;
    if (from == me && to == me) {
      kept.push_back(std::move(part));
    } else if (from == me) {
      traffic[to].sent += part.box.numel();
      sent.push_back(std::move(part));
    } else if (to == me) {
      traffic[from].received += part.box.numel();
      received.push_back(std::move(part));
    }
  }
  const auto sources = numbered(pieces, held, me);
  // Messages go rank by rank, in an order that both ends know.
  std::stable_sort(
      sent.begin(), sent.end(), [&](const BoxMove& a, const BoxMove& b) { return wanted[a.to].rank < wanted[b.to].rank; });
  std::stable_sort(received.begin(), received.end(), [&](const BoxMove& a, const BoxMove& b) {
    return held[a.from].rank < held[b.from].rank;
  });
  std::vector<int64_t> ranks, to_each, of_each;
  for (const auto& [rank, numels] : traffic) {
    ranks.push_back(rank);
    to_each.push_back(numels.sent);
    of_each.push_back(numels.received);
  }
  auto parts = messages(at::empty({0}, options), ranks, to_each, of_each, mesh, mesh.size());
  const auto arrived = parts.out;
  const kernels::Spacing arriving{of_each, parts.spacing};
  for (auto& run : runs_of(sent, &BoxMove::from, held, parts.in, message_spacing(parts))) {
    kernels::pack(sources[run.piece], run.boxes, run.flat);
  }
  comm::start(std::move(parts)).wait();
  // The send buffer is freed before the results are made.
  std::vector<at::Tensor> results;
  for (const auto& p : wanted) {
    if (p.rank == me) {
      results.push_back(at::empty(p.box.sizes, options));
    }
  }
  auto targets = numbered(results, wanted, me);
  for (const auto& [from, to, box] : kept) {
    kernels::copy(sources[from], {within(box, held[from].box.offsets)}, targets[to], {within(box, wanted[to].box.offsets)});
  }
  for (auto& run : runs_of(received, &BoxMove::to, wanted, arrived, arriving)) {
    kernels::unpack(run.flat, run.boxes, targets[run.piece]);
  }
  return results;
}

} // namespace shardtensor
