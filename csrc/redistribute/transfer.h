// From any layout to any other, on any two meshes: which boxes go from whom to whom, and the going. Every element that a rank
// lacks comes once, from one holder; what it holds already is copied. Ranks agree on it all without asking each other.
#pragma once

#include "comm/comm.h"
#include "layout/layout.h"

#include <ATen/core/Tensor.h>

namespace shardtensor {

struct Transfer {
  struct Message {
    int64_t rank; // global
    int64_t numel;
  };
  // At most one message to and from each rank, by ascending rank.
  std::vector<Message> sent, received;
  // The messages' boxes one after the other: of this rank's piece before, and of its piece after.
  std::vector<Box> packed, unpacked;
  // What it keeps.
  std::vector<Box> kept_from, kept_to;
};

// What any rank does, without communication, in time proportional to the ranks it deals with plus those of both meshes.
// Where there is Partial, it is on the same mesh dims of both sides, on one mesh: the summands move, each among its own kind.
Transfer transfer_of(const Layout& from, const Layout& to, c10::ArrayRef<int64_t> sizes, int64_t rank);

// This rank's piece; with `rest`, its sizes and its place are known, and its data is there when `rest` has been called.
struct Moving {
  at::Tensor local;
  comm::Completion rest = nullptr;
  std::vector<at::Tensor> buffers = {}; // that `rest` reads or writes
};

// `local`: this rank's piece under `from`, anything where the mesh does not hold it. Called by every rank of either mesh.
// `later`: the going is only started.
Moving transfer(const at::Tensor& local, const Layout& from, const Layout& to, c10::ArrayRef<int64_t> sizes, bool later);

} // namespace shardtensor
