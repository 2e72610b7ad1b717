// State that a tensor shares with its views, in their storage: the number of writes, and the kept sums of its summands.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

namespace shardtensor {

struct ReducedPartial; // reduced_partials.h

// Counts the writes to a tensor and its views, in the storage that they share. Made when a view op has to copy, so that the
// copy can find out that it is out of date; and when a summand is added up, to keep the sum until a write.
struct WriteCounter final : c10::intrusive_ptr_target {
  WriteCounter();
  ~WriteCounter() override;
  void forget_sums();
  void keep_no_sums(); // drops those kept so far, too

  std::atomic<uint32_t> count{0};
  std::vector<std::shared_ptr<const ReducedPartial>> sums;
  bool keeps_no_sums = false;

  static inline std::atomic<int64_t> alive{0}; // while it is 0, writes are not counted
  // For `sums` and `keeps_no_sums`. Taken only where a summand is added up, or written while it has sums.
  static std::mutex& mutex();
};

} // namespace shardtensor
