// What comm/ knows about torch's backends: one row each. Only comm/ includes this.
#pragma once

#include "layout/placement.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace shardtensor::comm {

// All differences between backends. The defaults hold for any backend, a group written in Python for example: of what it may
// lack comm/ asks nothing, and what it may not do for us comm/ does.
struct Backend {
  const char* name = "";
  // What it can do. If a flag is false, a method is used that every backend supports.
  bool gathers = false;  // all-gathers of one buffer, and of lists whose pieces have any sizes, each in one launch
  bool bitwise = false;  // all-reduces by and, or, xor of bits
  bool sends = false;    // between two ranks, and the others need not call
  bool batches = false;  // several sends and receives can be made as one, and the others need not call
  uint64_t reduces = 0;  // dtypes (bits) that it can reduce; with `scatters`
  bool scatters = false; // reduce-scatters of pieces of any size
  bool aligned = false;  // is faster if what it is given starts at multiples of kStart (bytes.h)
  int64_t latency = 0;   // up to this many bytes in all, gathering them is faster than reducing them
  // What it does not do.
  bool blocks = false;  // a work's wait() blocks the thread, may time out, and may then be called again
  bool by_host = false; // sends only from main memory
  // What it may mistake.
  bool by_address = false; // a list of outputs, the first two at one address, is one buffer to it; empty tensors have no address
  bool at_once = false;    // its first call makes the communicator of all ranks, so it may not be one among some of them
};

Backend backend_of(c10d::ProcessGroup& group, c10::Device device);

// Whether it can reduce-scatter such a tensor.
bool scatters(const Backend& rules, at::ScalarType dtype, ReduceOp op);

// Whether it may be called by some ranks alone now: those that have messages for each other.
bool ready_for_some(const Backend& rules, c10d::ProcessGroup& group, c10::Device device);

} // namespace shardtensor::comm
