#include "layout/reach.h"

#include <algorithm>

namespace shardtensor {

Reach mirror(const Reach& r) {
  return {r.den, r.num, r.num - 1 - r.last, r.den - 1 - r.first};
}

Stretch read(const Reach& r, const Interval& run, int64_t size) {
  if (run.length <= 0) {
    return {0, {0, 0}, 0};
  }
  const auto lo = r.lo(run.start);
  const auto hi = std::max(lo, r.hi(run.start + run.length - 1));
  const auto before = std::max<int64_t>(0, std::min<int64_t>(hi, 0) - lo);
  const auto after = std::max<int64_t>(0, hi - std::max(lo, size));
  return {before, {lo + before, hi - lo - before - after}, after};
}

int64_t cut_through(const Reach& r, int64_t cut, int64_t size, int64_t count) {
  if (cut <= 0 || cut >= size) {
    return cut <= 0 ? 0 : count;
  }
  const auto at = floor_div(2 * r.den * cut - r.first - r.last - 1, 2 * r.num) + 1;
  return std::clamp<int64_t>(at, 0, count);
}

Interval cut_through(const Reach& r, const Interval& piece, int64_t size, int64_t count) {
  const auto start = cut_through(r, piece.start, size, count);
  return {start, cut_through(r, piece.start + piece.length, size, count) - start};
}

} // namespace shardtensor
