// What comm/ knows about torch's backends: one row each. Only comm/ includes this.
#pragma once

#include "layout/placement.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace shardtensor::comm {

// All differences between backends. The defaults use only methods that every backend has, a group written in Python too; comm/
// emulates the rest.
struct Backend {
  const char* name = "";
  // What the backend can do. If a flag is false, comm/ uses a method that every backend supports.
  bool gathers = false;  // all-gathers of one buffer, and of lists whose pieces have any sizes, each in one launch
  bool bitwise = false;  // all-reduces by and, or, xor of bits
  bool sends = false;    // messages between two ranks, which the other ranks need not call
  bool batches = false;  // several sends and receives can be made as one, and the others need not call
  uint64_t reduces = 0;  // dtypes (bits) that it can reduce; with `scatters`
  bool scatters = false; // reduce-scatters of pieces of any size
  bool aligned = false;  // faster if the buffers start at multiples of kStart (bytes.h)
  int64_t latency = 0;   // up to this many bytes in all, gathering them is faster than reducing them
  // Its limits.
  bool blocks = false;  // a work's wait() blocks the thread, may time out, and may then be called again
  bool by_host = false; // sends only from main memory
  // Its pitfalls.
  bool by_address = false; // takes a list of outputs for one buffer if the first two have one address, as empty tensors do
  bool at_once = false;    // its first call makes the communicator of all ranks, so all ranks must make that call
};

Backend backend_of(c10d::ProcessGroup& group, c10::Device device);

// Whether it can reduce-scatter such a tensor.
bool scatters(const Backend& rules, at::ScalarType dtype, ReduceOp op);

// Whether only the ranks that have messages for each other may call the group now, without the other ranks.
bool ready_for_some(const Backend& rules, c10d::ProcessGroup& group, c10::Device device);

} // namespace shardtensor::comm
