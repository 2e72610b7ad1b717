#include "comm/range.h"

#include "comm/error_context.h"

namespace shardtensor::comm {

namespace {

const char* torchs_name(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::AllReduce:
      return "_c10d_functional::all_reduce";
    case CollectiveKind::AllGather:
      return "_c10d_functional::all_gather_into_tensor";
    case CollectiveKind::AllToAll:
      return "_c10d_functional::all_to_all_single";
    case CollectiveKind::ReduceScatter:
      return "_c10d_functional::reduce_scatter_tensor";
    case CollectiveKind::Broadcast:
      return "_c10d_functional::broadcast";
    default:
      return "c10d::scatter_";
  }
}

} // namespace

void Range::begin(at::StepCallbacks&& profiler, CollectiveKind kind, int64_t bytes) {
  if (range_name) {
    ours_.emplace(std::move(profiler)).before(range_name(name_of(kind), moving_now(), bytes));
    torchs_.emplace(at::RecordScope::FUNCTION).before(bytes < 0 ? "_c10d_functional::wait_tensor" : torchs_name(kind));
  }
}

} // namespace shardtensor::comm
