// Several collectives of one kind as one call, for tensors so small that a call costs more than their bytes.
#pragma once

#include "comm/in_flight.h"
#include "layout/mesh.h"
#include "layout/placement.h"

#include <memory>
#include <vector>

namespace shardtensor::comm {

// While it is open, this thread's start_...() calls (comm.h) only note what they would send. go() closes it and makes one call
// for all that have the same kind, mesh and mesh dim; for reductions also the same op and dtype. After that, what they return may
// be waited for, in any order, on any threads and streams; or dropped. All ranks note the same collectives in the same order.
//
// What several collectives send and receive is copied into and out of one buffer each, at multiples of 16 bytes (kStart in
// bytes.h) unless it is reduced. One that is alone is called as if Together were not there.
class Together {
 public:
  Together();
  ~Together();
  Together(const Together&) = delete;
  Together& operator=(const Together&) = delete;
  void go();

  // A call of comm.h. Which fields are used depends on `what`. The tensors of all except Reduce and Scatter are bytes, and so are
  // their sizes.
  struct Call {
    enum class What : uint8_t { Reduce, Gather, Exchange, Scatter, Send };
    What what;
    MeshPtr mesh;
    int64_t mesh_dim = -1;
    ReduceOp op = ReduceOp::Sum;
    bool of_summands = false;
    bool as_one = false;
    int64_t callers = 0;
    at::Tensor in, out; // Reduce: only `out`
    std::vector<int64_t> in_sizes, out_sizes, peers;
    std::vector<at::Tensor> pieces;
  };
  // The one that this thread has open, or null.
  static Together* open();
  InFlight note(Call call);

 private:
  struct Joint;
  struct Noted { // calls that are made as one
    std::vector<Call> calls;
    std::shared_ptr<Joint> joint;
  };
  static void begin(Joint& joint, InFlight rest);
  void close();

  std::vector<Noted> noted_;
  Together* outer_;
};

} // namespace shardtensor::comm
