// What random numbers are drawn from.
#pragma once

#include <cstdint>

namespace shardtensor::kernels {

struct Distribution {
  enum class Family : uint8_t { Uniform, Normal, LogNormal, Exponential, Cauchy, Geometric, Bernoulli, Integer };
  Family kind = Family::Uniform;
  // Uniform: in [a, b). Normal, LogNormal: mean a, deviation b. Exponential: rate a. Cauchy: median a, scale b.
  // Geometric, Bernoulli: probability a.
  double a = 0;
  double b = 1;
  // Integer: low, ..., low + range - 1; range 0 is 2^64.
  int64_t low = 0;
  uint64_t range = 0;
};

} // namespace shardtensor::kernels
