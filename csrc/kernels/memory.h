// The CPU memory that tensors hold now, and its peak: for tests and benchmarks of the memory rule.
#pragma once

#include <cstdint>

namespace shardtensor::kernels {

// While on, counts the CPU memory of tensors that any thread allocates, until it is freed.
void count_memory(bool on);

struct AllocatedBytes {
  int64_t now, peak; // bytes
};
AllocatedBytes allocated_memory();
void reset_peak_memory();

} // namespace shardtensor::kernels
