// Which indices a windowed op (convolution, pooling, resampling) reads along one dim: integer arithmetic on indices, cuts and
// sizes, so that every rank can compute what every other rank reads. Plain C++.
#pragma once

#include "layout/layout.h"

namespace shardtensor {

inline int64_t floor_div(int64_t a, int64_t b) {
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}
inline int64_t ceil_div(int64_t a, int64_t b) {
  return -floor_div(-a, b);
}

// Which values an op reads beyond the edges of a dim.
enum class PaddingMode : uint8_t {
  Constant,  // cells of padding, all of one value
  Reflect,   // the dim itself, from its second index on
  Replicate, // its first and last index
  Circular,  // the dim itself, again and again
};

// Index i of one dim reads the indices lo(i) to hi(i) - 1 of another. Both bounds are linear in i, rounded down; den is positive.
// Indices below 0, or from the size on, are beyond the edges. If num is -1, the dim is read backwards.
struct Reach {
  int64_t num, den, first, last;
  PaddingMode beyond = PaddingMode::Constant;
  // If not -1: this is the reach of a gradient, from an operand of this size to the results that read it. `beyond` then applies
  // to the edges of the operand.
  int64_t operand = -1;

  int64_t lo(int64_t i) const {
    return floor_div(num * i + first, den);
  }
  int64_t hi(int64_t i) const {
    return floor_div(num * i + last, den) + 1;
  }
  bool operator==(const Reach& o) const {
    return num == o.num && den == o.den && first == o.first && last == o.last && beyond == o.beyond && operand == o.operand;
  }
};

// The reverse of `r`, which reads a dim of `size` indices: which indices read its index j. The reverse of the reverse is `r`.
Reach mirror(const Reach& r, int64_t size);
// The index that a read of `e` gets, where `e` may be beyond the edges by less than `size`. Only for Reflect and Replicate.
int64_t source_index(PaddingMode beyond, int64_t e, int64_t size);

// The indices of a dim that a run reads: `before` cells of padding, then `inside`, then `after` cells of padding. Without padding
// (Reflect, Replicate): all from the first to the last index that is read. Circular: `inside` may go beyond the edges, but has at
// most `size` indices, so it has none twice.
struct PaddedInterval {
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
PaddedInterval read(const Reach& r, const Interval& run, int64_t size);

// Part of a circular run, which may go beyond the edges of a dim: the run is split at each multiple of the dim's size.
struct WrappedRun {
  Interval inside;
  int64_t first; // the run's own number for index 0 of the dim in this part: a multiple of the size
};
c10::SmallVector<WrappedRun, 2> wrapped_runs(const Interval& run, int64_t size);

// Where a cut of the dim that is read (after `cut` of its `size` indices) cuts the `count` indices that read it. Each index
// goes to the side that holds the middle of the indices that it reads. Cuts stay in order, and an empty piece has no readers. A
// reversed read has the dim's size and cut. A circular read may have more or fewer indices than the dim.
int64_t cut_through(const Reach& r, int64_t cut, int64_t size, int64_t count);
// The same for both ends of a piece.
Interval cut_through(const Reach& r, const Interval& piece, int64_t size, int64_t count);

} // namespace shardtensor
