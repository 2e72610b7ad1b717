#include "layout/reach.h"

#include <algorithm>

namespace shardtensor {

Reach mirror(const Reach& r, int64_t size) {
  const bool is_mirror = r.operand >= 0 || r.beyond == PaddingMode::Constant;
  return {r.den, r.num, r.num - 1 - r.last, r.den - 1 - r.first, r.beyond, is_mirror ? -1 : size};
}

int64_t source_index(PaddingMode beyond, int64_t e, int64_t size) {
  return beyond == PaddingMode::Replicate ? std::clamp<int64_t>(e, 0, size - 1) : e < 0 ? -e : e < size ? e : 2 * (size - 1) - e;
}

namespace {

// The run from the first to the last index that is read, for a dim without padding.
Interval hull(const Reach& r, int64_t lo, int64_t hi, int64_t size) {
  const bool some = std::max<int64_t>(lo, 0) < std::min(hi, size); // between the edges
  auto from = some ? std::max<int64_t>(lo, 0) : size, to = some ? std::min(hi, size) : 0;
  const auto add = [&](int64_t a, int64_t b) {
    from = std::min({from, a, b});
    to = std::max({to, a + 1, b + 1});
  };
  if (lo < 0) {
    add(source_index(r.beyond, lo, size), source_index(r.beyond, std::min<int64_t>(hi, 0) - 1, size));
  }
  if (hi > size) {
    add(source_index(r.beyond, std::max(lo, size), size), source_index(r.beyond, hi - 1, size));
  }
  return {from, to - from};
}

// The run from the first to the last result that reads a run of an operand of r.operand indices, beyond its edges too. Only if
// each result reads one index.
Interval hull_of_images(const Reach& r, const Interval& run, int64_t results) {
  const auto n = r.operand, left = r.first, right = results - n - left;
  const auto first = run.start, last = run.end() - 1;
  auto from = first, to = last; // counted as indices of the operand
  if (r.beyond == PaddingMode::Replicate) {
    from = first == 0 ? -left : from;
    to = last == n - 1 ? n - 1 + right : to;
  } else {
    from = last >= 1 && first <= left ? -std::min(last, left) : from;
    to = first <= n - 2 && last >= n - 1 - right ? 2 * (n - 1) - std::max(first, n - 1 - right) : to;
  }
  return {from + left, to + 1 - from};
}

} // namespace

PaddedInterval read(const Reach& r, const Interval& run, int64_t size) {
  if (run.length <= 0) {
    return {0, {0, 0}, 0};
  }
  const auto last = run.end() - 1;
  const bool backwards = r.num < 0;
  const auto lo = r.lo(backwards ? last : run.start);
  const auto hi = std::max(lo, r.hi(backwards ? run.start : last));
  if (r.beyond == PaddingMode::Circular) {
    return {0, hi - lo > size ? Interval{0, size} : Interval{lo, hi - lo}, 0};
  }
  if (r.beyond != PaddingMode::Constant) {
    return {0, r.operand >= 0 ? hull_of_images(r, run, size) : hull(r, lo, hi, size), 0};
  }
  const auto before = std::max<int64_t>(0, std::min<int64_t>(hi, 0) - lo);
  const auto after = std::max<int64_t>(0, hi - std::max(lo, size));
  return {before, {lo + before, hi - lo - before - after}, after};
}

c10::SmallVector<WrappedRun, 2> wrapped_runs(const Interval& run, int64_t size) {
  if (run.length <= 0) {
    return {{run, 0}};
  }
  c10::SmallVector<WrappedRun, 2> out;
  for (auto first = floor_div(run.start, size) * size; first < run.end(); first += size) {
    const auto inside = intersection(run, {first, size});
    out.push_back({{inside.start - first, inside.length}, first});
  }
  return out;
}

int64_t cut_through(const Reach& r, int64_t cut, int64_t size, int64_t count) {
  if (cut <= 0 || cut >= size) {
    return cut <= 0 ? 0 : count;
  }
  if (r.num < 0) {
    return cut;
  }
  if (r.beyond == PaddingMode::Circular) {
    return count >= size ? cut * (count / size) : cut / (size / count);
  }
  const auto at = floor_div(2 * r.den * cut - r.first - r.last - 1, 2 * r.num) + 1;
  return std::clamp<int64_t>(at, 0, count);
}

Interval cut_through(const Reach& r, const Interval& piece, int64_t size, int64_t count) {
  const auto start = cut_through(r, piece.start, size, count);
  return {start, cut_through(r, piece.end(), size, count) - start};
}

} // namespace shardtensor
