// How much CPU memory tensors hold, and the most they have held: for tests and benchmarks of the memory rule.
#pragma once

#include <cstdint>

namespace shardtensor::kernels {

// While on, tensors made on the CPU, by any thread, are counted from their birth to their end.
void count_memory(bool on);

struct Held {
  int64_t now, most; // bytes
};
Held held_memory();
void reset_most_held();

} // namespace shardtensor::kernels
