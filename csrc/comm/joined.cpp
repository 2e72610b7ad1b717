// The one call that several collectives become which were noted together.
#include "comm/bytes.h"
#include "comm/comm.h"
#include "comm/together.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace shardtensor::comm {

namespace {

using Call = Together::Call;
using Calls = std::vector<Call>;

// Parts of several buffers, one after the other in one; each starts at a multiple of `start` bytes.
class Packed {
 public:
  explicit Packed(int64_t start) : start_(start) {}
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
  struct Part {
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

  std::vector<Part> parts_;
  int64_t start_, total_ = 0;
};

at::Tensor bytes_like(const at::Tensor& t, int64_t count) {
  return at::empty({count}, t.options().dtype(at::kByte));
}

// The ranks that any of the calls names, in ascending order; without peers, all coordinates.
std::vector<int64_t> peers_of(const Calls& calls) {
  std::vector<int64_t> out;
  for (const auto& call : calls) {
    out.insert(out.end(), call.peers.begin(), call.peers.end());
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

// The parts of all calls for (or from) one peer, then those for the next.
struct Sided {
  Packed parts;
  std::vector<int64_t> sizes; // of each peer's, in bytes
};

Sided by_peer(
    const Calls& calls,
    const std::vector<int64_t>& peers,
    at::Tensor Call::*buffer,
    std::vector<int64_t> Call::*sizes,
    const std::vector<at::Tensor>* buffers = nullptr,
    int64_t item = 1) {
  Sided out{Packed(buffers ? 1 : kStart), {}};
  const auto count = peers.empty() ? (calls[0].*sizes).size() : peers.size();
  out.sizes.assign(count, 0);
  std::vector<size_t> next(calls.size(), 0);
  std::vector<int64_t> at(calls.size(), 0);
  for (size_t p = 0; p < count; ++p) {
    for (size_t i = 0; i < calls.size(); ++i) {
      const auto& call = calls[i];
      const auto& of_call = call.*sizes;
      if (next[i] == of_call.size() || (!peers.empty() && call.peers[next[i]] != peers[p])) {
        continue;
      }
      const auto bytes = of_call[next[i]++] * item;
      const auto before = out.parts.total();
      out.parts.add(buffers ? (*buffers)[i] : call.*buffer, std::exchange(at[i], at[i] + bytes), bytes);
      out.sizes[p] += out.parts.total() - before;
    }
  }
  return out;
}

InFlight reduce(const Calls& calls) {
  const auto& first = calls[0];
  Packed parts(1); // without gaps, which would be reduced too
  int64_t numel = 0;
  for (const auto& call : calls) {
    parts.add(as_bytes(call.out), 0, static_cast<int64_t>(call.out.nbytes()));
    numel += call.out.numel();
  }
  const auto flat = at::empty({numel}, first.out.options());
  const auto bytes = as_bytes(flat);
  parts.pack(bytes);
  auto reduced = start_all_reduce(flat, *first.mesh, first.mesh_dim, first.op);
  reduced.then([parts = std::move(parts), bytes] { parts.unpack(bytes); }, {bytes});
  return reduced;
}

InFlight gather(const Calls& calls) {
  const auto& first = calls[0];
  const auto me = static_cast<size_t>(first.mesh->coordinate()[first.mesh_dim]);
  Packed all(kStart), mine(kStart);
  std::vector<int64_t> sizes;
  for (size_t c = 0; c < first.pieces.size(); ++c) {
    const auto before = all.total();
    for (const auto& call : calls) {
      all.add(call.pieces[c], 0, call.pieces[c].numel());
      if (c == me) {
        mine.add(call.pieces[c], 0, call.pieces[c].numel());
      }
    }
    sizes.push_back(all.total() - before);
  }
  const auto flat = bytes_like(first.pieces[0], all.total());
  auto pieces = flat.split_with_sizes(sizes);
  mine.pack(pieces[me]);
  auto gathered = start_all_gather(pieces, pieces[me], *first.mesh, first.mesh_dim, /*as_one=*/true);
  gathered.then([all = std::move(all), flat] { all.unpack(flat); }, {flat});
  return gathered;
}

// Between the coordinates of a mesh dim, or between peers.
InFlight exchange(const Calls& calls) {
  const auto& first = calls[0];
  const bool sends = first.what == Call::What::Send;
  const auto peers = peers_of(calls);
  const auto sent = by_peer(calls, peers, &Call::in, &Call::in_sizes);
  auto received = by_peer(calls, peers, &Call::out, &Call::out_sizes);
  const auto in = bytes_like(first.in, sent.parts.total());
  auto out = bytes_like(first.out, received.parts.total());
  sent.parts.pack(in);
  auto arrived = sends ? start_send_receive(out, received.sizes, in, sent.sizes, peers, *first.mesh, first.callers)
                       : start_all_to_all(out, received.sizes, in, sent.sizes, *first.mesh, first.mesh_dim, first.of_summands);
  arrived.then([parts = std::move(received.parts), out] { parts.unpack(out); }, {out});
  return arrived;
}

InFlight scatter(const Calls& calls) {
  const auto& first = calls[0];
  const auto item = static_cast<int64_t>(first.in.element_size());
  std::vector<at::Tensor> inputs;
  Packed outs(1);
  for (const auto& call : calls) {
    inputs.push_back(as_bytes(call.in));
    outs.add(as_bytes(call.out), 0, static_cast<int64_t>(call.out.nbytes()));
  }
  auto sent = by_peer(calls, {}, &Call::in, &Call::in_sizes, &inputs, item);
  const auto in = at::empty({sent.parts.total() / item}, first.in.options());
  const auto out = at::empty({outs.total() / item}, first.out.options());
  sent.parts.pack(as_bytes(in));
  for (auto& size : sent.sizes) {
    size /= item;
  }
  auto reduced = start_reduce_scatter(out, in, sent.sizes, *first.mesh, first.mesh_dim, first.op);
  reduced.then([outs = std::move(outs), bytes = as_bytes(out)] { outs.unpack(bytes); }, {out});
  return reduced;
}

InFlight alone(Call& call) {
  switch (call.what) {
    case Call::What::Reduce:
      return start_all_reduce(call.out, *call.mesh, call.mesh_dim, call.op);
    case Call::What::Gather:
      return start_all_gather(
          call.pieces, call.pieces[call.mesh->coordinate()[call.mesh_dim]], *call.mesh, call.mesh_dim, call.as_one);
    case Call::What::Exchange:
      return start_all_to_all(call.out, call.out_sizes, call.in, call.in_sizes, *call.mesh, call.mesh_dim, call.of_summands);
    case Call::What::Scatter:
      return start_reduce_scatter(call.out, call.in, call.in_sizes, *call.mesh, call.mesh_dim, call.op);
    case Call::What::Send:
      return start_send_receive(call.out, call.out_sizes, call.in, call.in_sizes, call.peers, *call.mesh, call.callers);
  }
  return {};
}

InFlight start(Calls& calls) {
  if (calls.size() == 1) {
    return alone(calls[0]);
  }
  switch (calls[0].what) {
    case Call::What::Reduce:
      return reduce(calls);
    case Call::What::Gather:
      return gather(calls);
    case Call::What::Exchange:
    case Call::What::Send:
      return exchange(calls);
    case Call::What::Scatter:
      return scatter(calls);
  }
  return {};
}

} // namespace

void Together::go() {
  close();
  for (auto& noted : noted_) {
    begin(*noted.joint, start(noted.calls));
    noted.calls.clear();
  }
}

} // namespace shardtensor::comm
