// Several collectives of one kind as one call, for tensors so small that a call costs more than their bytes.
#pragma once

#include "comm/collective.h"
#include "comm/in_flight.h"

#include <memory>
#include <vector>

namespace shardtensor::comm {

// While it is open, this thread's collectives (start() in comm.h) are only noted. go() closes it and makes one call
// for all that have the same kind, mesh and mesh dim; for reductions also the same op and dtype. After that, what they return may
// be waited for, in any order, on any threads and streams; or dropped. All ranks note the same collectives in the same order.
//
// The data of several collectives is copied into one send buffer and out of one receive buffer, at multiples of 16 bytes
// (kStart in bytes.h) unless it is reduced. A collective with no partner is called as usual.
class Together {
 public:
  Together();
  ~Together();
  Together(const Together&) = delete;
  Together& operator=(const Together&) = delete;
  void go();

  // The one that this thread has open, or null.
  static Together* open();
  InFlight note(Collective c);

 private:
  struct Joint;
  struct Noted { // collectives that are made as one
    std::vector<Collective> all;
    std::shared_ptr<Joint> joint;
  };
  static void begin(Joint& joint, InFlight rest);
  void close();

  std::vector<Noted> noted_;
  Together* outer_;
};

} // namespace shardtensor::comm
