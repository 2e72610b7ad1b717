#include "redistribute/exchange.h"

#include "comm/comm.h"
#include "kernels/boxes.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <map>

namespace shardtensor {

namespace {

int64_t numel_of(const Box& box) {
  return c10::multiply_integers(box.sizes);
}

Box intersection(const Box& a, const Box& b) {
  Box out;
  for (const auto d : c10::irange(a.sizes.size())) {
    const auto start = std::max(a.offsets[d], b.offsets[d]);
    const auto end = std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d]);
    out.offsets.push_back(start);
    out.sizes.push_back(std::max<int64_t>(end - start, 0));
  }
  return out;
}

// Appends what of `box` is not in `hole`: a slab before and one after the hole along each dim.
void subtract(Box box, const Box& hole, std::vector<Box>& out) {
  const auto common = intersection(box, hole);
  if (numel_of(common) == 0) {
    out.push_back(std::move(box));
    return;
  }
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

std::string str(const Placed& p) {
  std::ostringstream out;
  out << "offsets " << c10::IntArrayRef(p.box.offsets) << ", sizes " << c10::IntArrayRef(p.box.sizes) << " on rank " << p.rank;
  return out.str();
}

// Part `box`, in global indices, goes from held[from] to wanted[to].
struct Part {
  size_t from, to;
  Box box;
};

// Parts of one wanted box. What the rank has itself comes first; then each holder in turn, the first another for every box, so
// that of several holders of the same elements all serve.
std::vector<Part> match_one(const std::vector<Placed>& held, const Placed& wanted, size_t to) {
  std::vector<Part> parts;
  auto missing = numel_of(wanted.box);
  const auto take = [&](size_t from) {
    std::vector<Box> news{intersection(held[from].box, wanted.box)};
    if (numel_of(news[0]) == 0) {
      return;
    }
    for (const auto& taken : parts) {
      std::vector<Box> rest;
      for (auto& box : news) {
        subtract(std::move(box), taken.box, rest);
      }
      news = std::move(rest);
    }
    for (auto& box : news) {
      missing -= numel_of(box);
      parts.push_back({from, to, std::move(box)});
    }
  };
  for (const auto own : {true, false}) {
    for (size_t i = 0; missing > 0 && i < held.size(); ++i) {
      const auto from = (i + to) % held.size();
      if ((held[from].rank == wanted.rank) == own) {
        take(from);
      }
    }
  }
  TORCH_CHECK(missing == 0, "shardtensor: no rank holds ", missing, " elements of ", str(wanted));
  return parts;
}

// Every element of every wanted box, once: from the rank itself where it holds it, else from one of those that do. Sorted by
// `from`, then `to`. Throws where nobody holds an element.
std::vector<Part> match(const std::vector<Placed>& held, const std::vector<Placed>& wanted) {
  std::vector<Part> parts;
  for (const auto to : c10::irange(wanted.size())) {
    auto of_one = match_one(held, wanted[to], to);
    std::move(of_one.begin(), of_one.end(), std::back_inserter(parts));
  }
  std::stable_sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.from < b.from; });
  return parts;
}

Box within(Box box, const Box& outer) {
  for (const auto d : c10::irange(box.offsets.size())) {
    box.offsets[d] -= outer.offsets[d];
  }
  return box;
}

// The tensors of this rank among `placed`, by their numbers there.
std::vector<at::Tensor> numbered(const std::vector<at::Tensor>& mine, const std::vector<Placed>& placed, int64_t rank) {
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

void check(const std::vector<Placed>& list, const char* name, const Mesh& mesh) {
  for (const auto& p : list) {
    TORCH_CHECK(
        mesh.index_of_rank(p.rank) >= 0, "shardtensor: ", name, ": ", str(p), ", a rank that is not of ", mesh.str(), " (rank ",
        mesh.rank(), ")");
    TORCH_CHECK(
        p.box.offsets.size() == p.box.sizes.size() && p.box.sizes.size() == list[0].box.sizes.size(), "shardtensor: ", name, ": ",
        str(p), ": boxes of one tensor have as many offsets and sizes as it has dims (rank ", mesh.rank(), ")");
  }
}

struct Peer {
  std::vector<const Part*> sent, received;
};

int64_t numel_of(const std::vector<const Part*>& parts) {
  int64_t n = 0;
  for (const auto* part : parts) {
    n += numel_of(part->box);
  }
  return n;
}

} // namespace

std::vector<at::Tensor> exchange(
    const std::vector<at::Tensor>& pieces,
    const std::vector<Placed>& held,
    const std::vector<Placed>& wanted,
    const Mesh& mesh,
    const at::TensorOptions& options) {
  check(held, "held", mesh);
  check(wanted, "wanted", mesh);
  const auto parts = match(held, wanted);
  const auto me = mesh.rank();
  const auto sources = numbered(pieces, held, me);
  std::vector<at::Tensor> results;
  for (const auto& p : wanted) {
    if (p.rank == me) {
      results.push_back(at::empty(p.box.sizes, options));
    }
  }
  auto targets = numbered(results, wanted, me);

  std::map<int64_t, Peer> peers;
  for (const auto& part : parts) {
    const auto from = held[part.from].rank, to = wanted[part.to].rank;
    if (from == me && to == me) {
      kernels::copy(
          sources[part.from], {within(part.box, held[part.from].box)}, targets[part.to], {within(part.box, wanted[part.to].box)});
    } else if (from == me) {
      peers[to].sent.push_back(&part);
    } else if (to == me) {
      peers[from].received.push_back(&part);
    }
  }
  std::vector<int64_t> ranks, sent, received;
  for (const auto& [rank, peer] : peers) {
    ranks.push_back(rank);
    sent.push_back(numel_of(peer.sent));
    received.push_back(numel_of(peer.received));
  }
  auto packed = at::empty({c10::sum_integers(sent)}, options), arrived = at::empty({c10::sum_integers(received)}, options);
  int64_t at = 0;
  for (const auto& [rank, peer] : peers) {
    for (const auto* part : peer.sent) {
      const auto n = numel_of(part->box);
      auto slot = packed.narrow(0, at, n);
      kernels::pack(sources[part->from], {within(part->box, held[part->from].box)}, slot);
      at += n;
    }
  }
  comm::start_send_receive(arrived, received, packed, sent, ranks, mesh, mesh.size())();
  at = 0;
  for (const auto& [rank, peer] : peers) {
    for (const auto* part : peer.received) {
      const auto n = numel_of(part->box);
      kernels::unpack(arrived.narrow(0, at, n), {within(part->box, wanted[part->to].box)}, targets[part->to]);
      at += n;
    }
  }
  return results;
}

} // namespace shardtensor
