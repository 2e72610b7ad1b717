// Tiles as rows of memory, and their copies as bytes.
#pragma once

#include "kernels/box_copies.h"

#include <ATen/Parallel.h>

#include <algorithm>

namespace shardtensor::kernels::cpu {

// Rows of a box at a constant distance; all in elements.
struct RowBlock {
  int64_t from, to;
  int64_t count;
  int64_t length;
  int64_t from_stride, to_stride;
};

// All rows of a tile: a partial row at either end, and between them as many rows at once as possible.
class TileRows {
 public:
  TileRows() = default;
  explicit TileRows(const Tile& tile) : left_(tile) {}

  bool next(RowBlock& rows) {
    auto& t = left_;
    if (t.count == 0) {
      return false;
    }
    const int last = t.ndim - 1;
    const int outer = last > 0 ? last - 1 : 0;
    const int64_t whole = t.size[last];
    rows = {t.from, t.to, 1, std::min(t.count, whole - t.at[last]), t.from_stride[outer], t.to_stride[outer]};
    if (last > 0 && rows.length == whole) {
      rows.count = std::min(t.count / whole, t.size[outer] - t.at[outer]);
    }
    t.count -= rows.count * rows.length;
    // To the start of the next row.
    t.from -= t.at[last];
    t.to -= t.at[last];
    t.at[last] = 0;
    int64_t carry = rows.count;
    for (int d = outer; d >= 0 && carry > 0 && t.count > 0; --d) {
      t.at[d] += carry;
      t.from += carry * t.from_stride[d];
      t.to += carry * t.to_stride[d];
      carry = 0;
      if (t.at[d] == t.size[d]) {
        t.from -= t.at[d] * t.from_stride[d];
        t.to -= t.at[d] * t.to_stride[d];
        t.at[d] = 0;
        carry = 1;
      }
    }
    return true;
  }

 private:
  Tile left_{};
};

inline TileRows rows_of(const BoxCopies& moves, int64_t tile) {
  Tile found;
  locate(moves, moves.table, tile, found);
  return TileRows(found);
}

// Calls use(begin, end) on ranges of the `parts` that the moves are cut into; in parallel if there is enough work.
template <typename Use>
void for_parts(const BoxCopies& moves, int64_t parts, const Use& use) {
  constexpr int64_t kParallelBytes = 1 << 18; // less is not worth waking a thread
  at::parallel_for(0, parts, kParallelBytes * parts / std::max<int64_t>(1, moves.bytes) + 1, use);
}

// Calls use(Rows) for all rows.
template <typename Use>
void for_rows(const BoxCopies& moves, const Use& use) {
  for_parts(moves, moves.tiles, [&](int64_t begin, int64_t end) {
    RowBlock rows;
    for (int64_t tile = begin; tile < end; ++tile) {
      for (auto all = rows_of(moves, tile); all.next(rows);) {
        use(rows);
      }
    }
  });
}

// Elements are bytes.
void copy_bytes(const BoxCopies& moves, const char* from, char* to);

} // namespace shardtensor::kernels::cpu
