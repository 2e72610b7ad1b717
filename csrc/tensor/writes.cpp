#include "tensor/writes.h"

namespace shardtensor {

Writes::Writes() {
  ++alive;
}
Writes::~Writes() {
  --alive;
}

std::mutex& Writes::mutex() {
  static auto* m = new std::mutex();
  return *m;
}

void Writes::forget_sums() {
  std::vector<std::shared_ptr<const KeptSum>> dropped; // outside of the lock
  const std::lock_guard<std::mutex> lock(mutex());
  dropped.swap(sums);
}

void Writes::keep_no_sums() {
  forget_sums();
  const std::lock_guard<std::mutex> lock(mutex());
  keeps_no_sums = true;
}

} // namespace shardtensor
