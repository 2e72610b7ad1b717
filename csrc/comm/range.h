// Ranges in torch's profiler, one for each collective and one for the wait for it. Only comm/ makes them.
#pragma once

#include "comm/collective_kind.h"
#include "layout/observer.h"

#include <ATen/record_function.h>

#include <optional>
#include <string>

namespace shardtensor::comm {

// While one is alive, the profiler shows "shardtensor: all_gather S(0)->R 12.0 MiB at train.py:31 (Model.Attention)", and in it
// the name that torch has for the collective. If no profiler runs, it does nothing else.
class Range {
 public:
  // `bytes`: what this rank sends; -1 if it waits.
  Range(CollectiveKind kind, int64_t bytes) {
    if (auto profiler = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE); C10_UNLIKELY(profiler.has_value())) {
      begin(std::move(*profiler), kind, bytes);
    }
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  void begin(at::StepCallbacks&& profiler, CollectiveKind kind, int64_t bytes);
  std::optional<at::RecordFunction> ours_, torchs_;
};

// Makes the name of a range from name_of(kind), moving_now() and bytes. Set at import.
inline Observer<std::string(const char* kind, const std::string& move, int64_t bytes)> range_name;

} // namespace shardtensor::comm
