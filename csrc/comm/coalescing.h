// Several collectives of one kind as one call, for tensors so small that a call costs more than their bytes.
#pragma once

#include "comm/collective.h"
#include "comm/in_flight.h"

#include <memory>
#include <vector>

namespace shardtensor::comm {

// While it is open, this thread's collectives (start() in comm.h) are only queued. go() closes it and makes one call for all that
// have the same kind, mesh and mesh dim; for reductions also the same op and dtype. After that, the results of start() may be
// waited for, in any order, on any threads and streams; or dropped. All ranks queue the same collectives in the same order.
//
// The data of several collectives is copied into one send buffer and out of one receive buffer, at multiples of 16 bytes
// (kStart in bytes.h) unless it is reduced. A collective with no partner is called as usual.
class CoalescedCalls {
 public:
  CoalescedCalls();
  ~CoalescedCalls();
  CoalescedCalls(const CoalescedCalls&) = delete;
  CoalescedCalls& operator=(const CoalescedCalls&) = delete;
  void go();

  // This thread's open CoalescedCalls, or null.
  static CoalescedCalls* open();
  InFlight note(Collective c);

 private:
  struct SharedCall;
  struct JoinedGroup { // collectives that are made as one
    std::vector<Collective> all;
    std::shared_ptr<SharedCall> joint;
  };
  static void begin(SharedCall& joint, InFlight rest);
  void close();

  std::vector<JoinedGroup> noted_;
  CoalescedCalls* outer_;
};

} // namespace shardtensor::comm
