// What a tensor shares with its views, in their storage: how often it was written, and what it has been added up to.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

namespace shardtensor {

struct Writes;

// The sums of the summands of one storage (sums.h).
class Sums {
 public:
  static void forget(Writes& writes);
  static void never(Writes& writes); // nor later
  // Taken only where a summand is added up, or written while it has sums.
  static std::mutex& mutex();
  struct Sum;

  std::vector<std::shared_ptr<const Sum>> all;
  bool none = false;
};

// Counts the writes to a tensor and its views, in the storage that they share. Made when a view op has to copy, so that the
// copy can find out that it is out of date; and when a summand is added up, to keep the sum until a write.
struct Writes final : c10::intrusive_ptr_target {
  Writes();
  ~Writes() override;
  std::atomic<uint32_t> count{0};
  std::shared_ptr<Sums> sums;
  static inline std::atomic<int64_t> alive{0}; // while it is 0, writes are not counted
};

} // namespace shardtensor
