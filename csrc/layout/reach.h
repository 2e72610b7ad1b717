// What a windowed op (convolution, pooling, resampling) reads along one dim: integer arithmetic on indices, cuts and sizes, so
// that every rank finds what every other rank reads. Plain C++.
#pragma once

#include "layout/layout.h"

namespace shardtensor {

inline int64_t floor_div(int64_t a, int64_t b) {
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}
inline int64_t ceil_div(int64_t a, int64_t b) {
  return -floor_div(-a, b);
}

// Index i of one dim reads the indices lo(i) .. hi(i) - 1 of another: floors of two parallel lines, num and den positive. What
// lies outside of 0 .. size - 1 is padding.
struct Reach {
  int64_t num, den, first, last;

  int64_t lo(int64_t i) const {
    return floor_div(num * i + first, den);
  }
  int64_t hi(int64_t i) const {
    return floor_div(num * i + last, den) + 1;
  }
  bool operator==(const Reach& o) const {
    return num == o.num && den == o.den && first == o.first && last == o.last;
  }
};

// The reverse: which indices read index j. Its own reverse is the reach itself.
Reach mirror(const Reach& r);

// What a run of indices reads of a dim: `before` cells of padding, then `inside`, then `after` cells of padding.
struct Stretch {
  int64_t before;
  Interval inside;
  int64_t after;

  // The first cell, counted as an index of the dim: negative in the padding before index 0.
  int64_t start() const {
    return inside.start - before;
  }
  int64_t length() const {
    return before + inside.length + after;
  }
};
// An empty run reads nothing.
Stretch read(const Reach& r, const Interval& run, int64_t size);

// Where a cut of the dim that is read (after `cut` of its `size` indices) cuts the `count` indices that read it. Each index goes
// to the side where the middle of what it reads lies. Cuts stay in order, and an empty piece is read by nobody.
int64_t cut_through(const Reach& r, int64_t cut, int64_t size, int64_t count);
// The same for both ends of a piece.
Interval cut_through(const Reach& r, const Interval& piece, int64_t size, int64_t count);

} // namespace shardtensor
