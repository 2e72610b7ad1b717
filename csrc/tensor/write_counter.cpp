#include "tensor/write_counter.h"

namespace shardtensor {

WriteCounter::WriteCounter() {
  ++alive;
}
WriteCounter::~WriteCounter() {
  --alive;
}

std::mutex& WriteCounter::mutex() {
  static auto* m = new std::mutex();
  return *m;
}

void WriteCounter::forget_sums() {
  std::vector<std::shared_ptr<const ReducedPartial>> dropped; // outside of the lock
  const std::lock_guard<std::mutex> lock(mutex());
  dropped.swap(sums);
}

void WriteCounter::keep_no_sums() {
  forget_sums();
  const std::lock_guard<std::mutex> lock(mutex());
  keeps_no_sums = true;
}

} // namespace shardtensor
