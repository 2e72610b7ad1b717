// The random value of a global index: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) and
// the maps from its bits to distributions. One source for host and device, so that both draw the same.
#pragma once

#include "kernels/distribution.h"

#include <ATen/Dispatch.h>
#include <ATen/Dispatch_v2.h>
#include <c10/macros/Macros.h>

#include <cmath>
#include <type_traits>

namespace shardtensor::kernels {

struct PhiloxWords {
  uint32_t w[4];

  C10_HOST_DEVICE uint32_t bits(int i, uint32_t) const {
    return w[i];
  }
  C10_HOST_DEVICE uint64_t bits(int i, uint64_t) const {
    return w[2 * i] | static_cast<uint64_t>(w[2 * i + 1]) << 32;
  }
};

C10_HOST_DEVICE inline PhiloxWords philox(uint64_t counter, uint64_t key) {
  uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c0;
    const uint64_t p1 = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return {{c0, c1, c2, c3}};
}

// In [0, 1).
C10_HOST_DEVICE inline float unit(uint32_t w) {
  return static_cast<float>(w >> 8) * 0x1p-24f;
}
C10_HOST_DEVICE inline double unit(uint64_t w) {
  return static_cast<double>(w >> 11) * 0x1p-53;
}
// In (0, 1), for logarithms: fine near 0, never 1.
C10_HOST_DEVICE inline float open_unit(uint32_t w) {
  const float u = (static_cast<float>(w) + 1.0f) * 0x1p-32f;
  return u < 1.0f ? u : 1.0f - 0x1p-24f;
}
C10_HOST_DEVICE inline double open_unit(uint64_t w) {
  return (static_cast<double>(w >> 12) + 0.5) * 0x1p-52;
}

// One call of a draw makes the values of a block, kWidth consecutive global indices, from one call of philox.
template <typename Real>
struct RealDraw {
  using Value = Real;
  using Bits = std::conditional_t<sizeof(Real) == 4, uint32_t, uint64_t>;
  static constexpr int kWidth = sizeof(Real) == 4 ? 4 : 2;

  uint64_t key;
  Distribution::Family kind;
  Real a, b;

  RealDraw(uint64_t k, const Distribution& d) : key(k), kind(d.kind), a(static_cast<Real>(d.a)), b(static_cast<Real>(d.b)) {}

  C10_HOST_DEVICE void operator()(uint64_t block, Real* out) const {
    const auto words = philox(block, key);
    if (kind == Distribution::Family::Normal || kind == Distribution::Family::LogNormal) {
      for (int i = 0; i < kWidth; i += 2) { // Box-Muller
        const Real radius = std::sqrt(Real(-2) * std::log(open_unit(words.bits(i, Bits{}))));
        const Real angle = Real(6.283185307179586) * unit(words.bits(i + 1, Bits{}));
        out[i] = radius * std::cos(angle) * b + a;
        out[i + 1] = radius * std::sin(angle) * b + a;
      }
      for (int i = 0; i < kWidth && kind == Distribution::Family::LogNormal; ++i) {
        out[i] = std::exp(out[i]);
      }
      return;
    }
    for (int i = 0; i < kWidth; ++i) {
      out[i] = from_bits(words.bits(i, Bits{}));
    }
  }

  C10_HOST_DEVICE Real from_bits(Bits bits) const {
    switch (kind) {
      case Distribution::Family::Exponential:
        return -std::log(open_unit(bits)) / a;
      case Distribution::Family::Cauchy:
        return a + b * std::tan(Real(3.141592653589793) * (open_unit(bits) - Real(0.5)));
      case Distribution::Family::Geometric:
        return std::ceil(std::log(open_unit(bits)) / std::log1p(-a));
      default:
        return a + unit(bits) * (b - a);
    }
  }

  // Rounding may give b, which [a, b) does not contain.
  template <typename Scalar>
  C10_HOST_DEVICE Scalar finish(Real x) const {
    const auto y = static_cast<Scalar>(x);
    const auto end = static_cast<Real>(static_cast<Scalar>(b));
    return kind == Distribution::Family::Uniform && static_cast<Real>(y) >= end ? static_cast<Scalar>(a) : y;
  }
};

struct IntegerDraw {
  using Value = int64_t;
  static constexpr int kWidth = 2;

  uint64_t key;
  uint64_t low;
  uint64_t range;

  IntegerDraw(uint64_t k, const Distribution& d) : key(k), low(static_cast<uint64_t>(d.low)), range(d.range) {}

  C10_HOST_DEVICE void operator()(uint64_t block, int64_t* out) const {
    const auto words = philox(block, key);
    for (int i = 0; i < kWidth; ++i) {
      const auto bits = words.bits(i, uint64_t{});
      const auto scaled = range ? static_cast<uint64_t>(static_cast<unsigned __int128>(bits) * range >> 64) : bits;
      out[i] = static_cast<int64_t>(low + scaled);
    }
  }
  template <typename Scalar>
  C10_HOST_DEVICE Scalar finish(int64_t x) const {
    return static_cast<Scalar>(x);
  }
};

struct BernoulliDraw {
  using Value = bool;
  static constexpr int kWidth = 4;

  uint64_t key;
  uint64_t below; // p in units of 2^-32; p = 1 is 2^32, above every word

  BernoulliDraw(uint64_t k, const Distribution& d) : key(k), below(static_cast<uint64_t>(std::llround(d.a * 0x1p32))) {}

  C10_HOST_DEVICE void operator()(uint64_t block, bool* out) const {
    const auto words = philox(block, key);
    for (int i = 0; i < kWidth; ++i) {
      out[i] = words.w[i] < below;
    }
  }
  template <typename Scalar>
  C10_HOST_DEVICE Scalar finish(bool x) const {
    return static_cast<Scalar>(x ? 1 : 0);
  }
};

// Calls launch.operator()<Scalar>(draw) with the draw for the distribution and the tensor's element type.
template <typename Launch>
void with_draw(at::ScalarType dtype, uint64_t key, const Distribution& d, const Launch& launch) {
  switch (d.kind) {
    case Distribution::Family::Bernoulli:
      AT_DISPATCH_ALL_TYPES_AND3(at::kHalf, at::kBFloat16, at::kBool, dtype, "bernoulli", [&] {
        launch.template operator()<scalar_t>(BernoulliDraw(key, d));
      });
      return;
    case Distribution::Family::Integer:
      AT_DISPATCH_V2(
          dtype, "random", AT_WRAP([&] { launch.template operator()<scalar_t>(IntegerDraw(key, d)); }), AT_EXPAND(AT_ALL_TYPES),
          AT_EXPAND(AT_BAREBONES_UNSIGNED_TYPES), at::kHalf, at::kBFloat16, at::kBool);
      return;
    case Distribution::Family::Geometric:
      AT_DISPATCH_ALL_TYPES_AND2(
          at::kHalf, at::kBFloat16, dtype, "geometric", [&] { launch.template operator()<scalar_t>(RealDraw<double>(key, d)); });
      return;
    default:
      AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "random", [&] {
        using Real = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
        launch.template operator()<scalar_t>(RealDraw<Real>(key, d));
      });
  }
}

} // namespace shardtensor::kernels
