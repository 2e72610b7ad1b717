#include "comm/comm.h"

#include <ATen/ATen.h>
#include <torch/headeronly/version.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace shardtensor::comm {

namespace {

void wait(const c10::intrusive_ptr<c10d::Work>& work) {
  if (work) {
    work->wait();
  }
}

// Backends move some dtypes only. `flat` is contiguous.
at::Tensor as_bytes(const at::Tensor& flat) {
  return flat.numel() ? at::detach(flat).view(at::kByte) : at::empty({0}, flat.options().dtype(at::kByte));
}

// As many bytes to and from each peer as said, along all ranks of the group.
void exchange_with_all(
    c10d::ProcessGroup& group,
    at::Tensor& out,
    at::IntArrayRef out_bytes,
    at::Tensor& in,
    at::IntArrayRef in_bytes,
    at::IntArrayRef peers) {
  std::vector<int64_t> out_cut(group.getSize(), 0), in_cut(group.getSize(), 0);
  for (size_t i = 0; i < peers.size(); ++i) {
    out_cut[peers[i]] = out_bytes[i];
    in_cut[peers[i]] = in_bytes[i];
  }
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 15
  wait(group.alltoall_base(out, in, out_cut, in_cut));
#else
  wait(group.all_to_all_single(out, in, out_cut, in_cut));
#endif
}

// Message by message, in an order that cannot lock up where a backend does them one after the other: pairs of ranks ascending,
// the lower rank sends first. Not coalesced: NCCL would make a communicator of the whole group, for which all ranks must come.
void exchange_with_peers(
    c10d::ProcessGroup& group,
    at::Tensor& out,
    at::IntArrayRef out_bytes,
    at::Tensor& in,
    at::IntArrayRef in_bytes,
    at::IntArrayRef peers) {
  constexpr int kTag = 0x5354; // not the default, which users' own messages have
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::vector<std::vector<at::Tensor>> holders;
  holders.reserve(2 * peers.size());
  int64_t out_at = 0, in_at = 0;
  for (size_t i = 0; i < peers.size(); ++i) {
    const auto peer = static_cast<int>(peers[i]);
    const auto send = [&, length = in_bytes[i]] {
      if (length) {
        holders.push_back({in.narrow(0, in_at, length)});
        works.push_back(group.send(holders.back(), peer, kTag));
      }
    };
    const auto receive = [&, length = out_bytes[i]] {
      if (length) {
        holders.push_back({out.narrow(0, out_at, length)});
        works.push_back(group.recv(holders.back(), peer, kTag));
      }
    };
    if (group.getRank() < peer) {
      send();
      receive();
    } else {
      receive();
      send();
    }
    in_at += in_bytes[i];
    out_at += out_bytes[i];
  }
  for (const auto& work : works) {
    wait(work);
  }
}

} // namespace

void send_receive(
    at::Tensor& out,
    at::IntArrayRef out_sizes,
    const at::Tensor& in,
    at::IntArrayRef in_sizes,
    at::IntArrayRef peers,
    const Mesh& mesh,
    int64_t callers) {
  if (callers == 1) {
    return;
  }
  const auto& name = mesh.description().world;
  TORCH_CHECK(
      !name.empty(), "shardtensor: pieces move between ranks of ", mesh.str(), ", but rank ", mesh.rank(),
      " knew no default process group when the mesh was made; call init_process_group first");
  auto group = c10d::resolve_process_group(name);
  const bool all = callers == group->getSize();
  if (!all && peers.empty()) {
    return;
  }
  const auto in_bytes = [item = in.element_size()](at::IntArrayRef sizes) {
    auto bytes = sizes.vec();
    for (auto& b : bytes) {
      b *= item;
    }
    return bytes;
  };
  auto output = as_bytes(out), input = as_bytes(in);
  count(Kind::AllToAll, input.numel());
  if (all) {
    return exchange_with_all(*group, output, in_bytes(out_sizes), input, in_bytes(in_sizes), peers);
  }
  // Gloo sends from main memory alone.
  const bool staged = out.is_cuda() && group->getBackend(c10::DeviceType::CUDA)->getBackendName() == "gloo";
  auto landing = staged ? output.cpu() : output;
  auto source = staged ? input.cpu() : input;
  exchange_with_peers(*group, landing, in_bytes(out_sizes), source, in_bytes(in_sizes), peers);
  if (staged) {
    output.copy_(landing);
  }
}

} // namespace shardtensor::comm
