#include "tensor/writes.h"

namespace shardtensor {

std::mutex& Sums::mutex() {
  static auto* m = new std::mutex();
  return *m;
}

void Sums::forget(Writes& writes) {
  std::vector<std::shared_ptr<const Sum>> dropped; // outside of the lock
  const std::lock_guard<std::mutex> lock(mutex());
  if (writes.sums) {
    dropped = std::move(writes.sums->all);
    writes.sums->all.clear();
  }
}

void Sums::never(Writes& writes) {
  forget(writes);
  const std::lock_guard<std::mutex> lock(mutex());
  if (!writes.sums) {
    writes.sums = std::make_shared<Sums>();
  }
  writes.sums->none = true;
}

Writes::Writes() {
  ++alive;
}
Writes::~Writes() {
  --alive;
}

} // namespace shardtensor
