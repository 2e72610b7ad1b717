#include "comm/range.h"

#include "comm/doing.h"

namespace shardtensor::comm {

namespace {

const char* torchs_name(Kind kind) {
  switch (kind) {
    case Kind::AllReduce:
      return "_c10d_functional::all_reduce";
    case Kind::AllGather:
      return "_c10d_functional::all_gather_into_tensor";
    case Kind::AllToAll:
      return "_c10d_functional::all_to_all_single";
    case Kind::ReduceScatter:
      return "_c10d_functional::reduce_scatter_tensor";
    case Kind::Broadcast:
      return "_c10d_functional::broadcast";
    default:
      return "c10d::scatter_";
  }
}

} // namespace

void Range::begin(at::StepCallbacks&& profiler, Kind kind, int64_t bytes) {
  if (range_name) {
    ours_.emplace(std::move(profiler)).before(range_name(name_of(kind), moving_now(), bytes));
    torchs_.emplace(at::RecordScope::FUNCTION).before(bytes < 0 ? "_c10d_functional::wait_tensor" : torchs_name(kind));
  }
}

} // namespace shardtensor::comm
