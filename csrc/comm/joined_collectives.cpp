// Makes one collective of several that were queued together.
#include "comm/bytes.h"
#include "comm/coalescing.h"
#include "comm/comm.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace shardtensor::comm {

namespace {

using Collectives = std::vector<Collective>;

// Parts of several buffers, one after the other in one; each starts at a multiple of `start` bytes.
class PackedBuffer {
 public:
  explicit PackedBuffer(int64_t start) : start_(start) {}
  void add(const at::Tensor& bytes, int64_t at, int64_t count) {
    if (count) {
      parts_.push_back({bytes, at, count, total_});
      total_ += rounded_up(count, start_);
    }
  }
  int64_t total() const {
    return total_;
  }
  void pack(const at::Tensor& flat) const {
    copy(flat, true);
  }
  void unpack(const at::Tensor& flat) const {
    copy(flat, false);
  }

 private:
  struct PackedPart {
    at::Tensor bytes;
    int64_t at, count, in_flat;
  };

  void copy(const at::Tensor& flat, bool into_flat) const {
    if (parts_.empty()) {
      return;
    }
    if (flat.is_cpu()) {
      for (const auto& part : parts_) {
        auto* at = static_cast<char*>(flat.mutable_data_ptr()) + part.in_flat;
        auto* other = static_cast<char*>(part.bytes.mutable_data_ptr()) + part.at;
        std::memcpy(into_flat ? at : other, into_flat ? other : at, static_cast<size_t>(part.count));
      }
      return;
    }
    std::vector<at::Tensor> in_flat, others;
    for (const auto& part : parts_) {
      in_flat.push_back(flat.narrow(0, part.in_flat, part.count));
      others.push_back(part.bytes.narrow(0, part.at, part.count));
    }
    into_flat ? at::_foreach_copy_(in_flat, others) : at::_foreach_copy_(others, in_flat);
  }

  std::vector<PackedPart> parts_;
  int64_t start_, total_ = 0;
};

// The peers of any of the collectives, in ascending order; if they have none, all coordinates.
std::vector<int64_t> peers_of(const Collectives& all) {
  std::vector<int64_t> out;
  for (const auto& c : all) {
    out.insert(out.end(), c.peers.begin(), c.peers.end());
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

// Orders the collectives' parts by peer: all parts for (or from) the first peer, then those of the next one. Sets `peer_sizes` to
// the bytes per peer.
PackedBuffer by_peer(
    const Collectives& all,
    at::Tensor Collective::*buffer,
    std::vector<int64_t> Collective::*sizes,
    const std::vector<int64_t>& peers,
    int64_t start,
    std::vector<int64_t>& peer_sizes) {
  PackedBuffer out(start);
  std::vector<at::Tensor> bytes;
  for (const auto& c : all) {
    bytes.push_back(as_bytes(c.*buffer));
  }
  const auto n = peers.empty() ? (all[0].*sizes).size() : peers.size();
  std::vector<size_t> next(all.size(), 0);
  std::vector<int64_t> at(all.size(), 0);
  for (size_t p = 0; p < n; ++p) {
    const auto before = out.total();
    for (size_t i = 0; i < all.size(); ++i) {
      const auto& c = all[i];
      if (next[i] == (c.*sizes).size() || (!peers.empty() && c.peers[next[i]] != peers[p])) {
        continue;
      }
      const auto count = (c.*sizes)[next[i]++] * static_cast<int64_t>((c.*buffer).element_size());
      out.add(bytes[i], std::exchange(at[i], at[i] + count), count);
    }
    peer_sizes.push_back(out.total() - before);
  }
  return out;
}

// The output buffers of the collectives, one after the other. There are no gaps, since they would be reduced too.
PackedBuffer outputs_of(const Collectives& all) {
  PackedBuffer out(1);
  for (const auto& c : all) {
    out.add(as_bytes(c.out), 0, static_cast<int64_t>(c.out.nbytes()));
  }
  return out;
}

// Several collectives as one. Its `out` holds what they receive.
struct MergedCollective {
  Collective one;
  PackedBuffer received;
};

at::Tensor empty_for(const PackedBuffer& parts, const at::Tensor& like) {
  return at::empty({parts.total() / static_cast<int64_t>(like.element_size())}, like.options());
}

MergedCollective merged_reduces(const Collectives& all) {
  MergedCollective out{all[0], outputs_of(all)};
  out.one.out = empty_for(out.received, all[0].out);
  out.received.pack(as_bytes(out.one.out));
  return out;
}

MergedCollective merged_gathers(const Collectives& all) {
  const auto& first = all[0];
  PackedBuffer parts(kStart), mine(kStart);
  std::vector<int64_t> sizes;
  for (size_t i = 0; i < first.pieces.size(); ++i) {
    const auto before = parts.total();
    for (const auto& c : all) {
      parts.add(c.pieces[i], 0, c.pieces[i].numel());
    }
    sizes.push_back(parts.total() - before);
  }
  for (const auto& c : all) {
    mine.add(c.in, 0, c.in.numel());
  }
  MergedCollective out{first, std::move(parts)};
  out.one.out = empty_for(out.received, first.in);
  out.one.pieces = out.one.out.split_with_sizes(sizes);
  out.one.in = out.one.pieces[first.me()];
  mine.pack(out.one.in);
  return out;
}

// Between the coordinates of a mesh dim, or between peers.
MergedCollective merged_exchanges(const Collectives& all) {
  MergedCollective out{all[0], PackedBuffer(kStart)};
  auto& one = out.one;
  one.peers = peers_of(all);
  one.in_sizes.clear();
  one.out_sizes.clear();
  const auto sent = by_peer(all, &Collective::in, &Collective::in_sizes, one.peers, kStart, one.in_sizes);
  out.received = by_peer(all, &Collective::out, &Collective::out_sizes, one.peers, kStart, one.out_sizes);
  one.in = empty_for(sent, one.in);
  one.out = empty_for(out.received, one.out);
  sent.pack(one.in);
  return out;
}

MergedCollective merged_reduce_scatters(const Collectives& all) {
  MergedCollective out{all[0], outputs_of(all)};
  auto& one = out.one;
  one.in_sizes.clear();
  const auto sent = by_peer(all, &Collective::in, &Collective::in_sizes, {}, 1, one.in_sizes);
  for (auto& size : one.in_sizes) {
    size /= static_cast<int64_t>(one.in.element_size());
  }
  one.in = empty_for(sent, one.in);
  one.out = empty_for(out.received, one.out);
  sent.pack(as_bytes(one.in));
  return out;
}

MergedCollective merged(const Collectives& all) {
  switch (all[0].kind) {
    case CollectiveKind::AllReduce:
      return merged_reduces(all);
    case CollectiveKind::AllGather:
      return merged_gathers(all);
    case CollectiveKind::ReduceScatter:
      return merged_reduce_scatters(all);
    default:
      return merged_exchanges(all);
  }
}

InFlight start_as_one(const Collectives& all) {
  if (all.size() == 1) {
    return start(all[0]);
  }
  auto both = merged(all);
  const auto flat = as_bytes(both.one.out);
  auto moving = start(std::move(both.one));
  moving.then([parts = std::move(both.received), flat] { parts.unpack(flat); }, {flat});
  return moving;
}

} // namespace

void CoalescedCalls::go() {
  close();
  for (auto& noted : noted_) {
    begin(*noted.joint, start_as_one(noted.all));
    noted.all.clear();
  }
}

} // namespace shardtensor::comm
