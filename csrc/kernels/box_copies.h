// Boxes to move from one side to the other, with dims merged and cut into tiles; how to locate an element and combine parts.
// One source for host and device.
#pragma once

#include "layout/placement.h"

#include <c10/macros/Macros.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

#include <type_traits>

namespace shardtensor::kernels {

constexpr int kMaxDims = 9;
constexpr int64_t kStreamBytes = 4 << 20; // less may stay in a CPU's cache until it is used

// An element is a byte if the dtype stays, and a value if it changes or parts are combined. The last dim is contiguous
// on both sides. It is moved in units of 2^width elements, to which both sides are aligned.
//
// A tile's level is its place within its box. Tiles are numbered level by level: the first of each box, then the second of each
// box that has two, and so on. Boxes are often neighbours, so tiles that run at the same time, or one after the other, share
// cache lines and pages of memory.
struct BoxCopies {
  int ndim;
  bool from_flat, to_flat; // boxes one after the other: strides follow from each box's sizes
  int64_t boxes;
  int64_t tiles;
  int64_t bytes;       // in all
  int64_t part_stride; // elements between two parts, to be combined
  int64_t from_strides[kMaxDims], to_strides[kMaxDims];
  // A row for each box, sorted by falling number of tiles. No box is empty.
  const int64_t* table;

  // Words of a row. kBelow: how many tiles of all boxes have a level below this box's number of tiles. kTiles: that number.
  // kUnits: units per tile, and width. kFrom, kTo: where the box starts on either side, in elements. kSizes: its sizes.
  static constexpr int kBelow = 0, kTiles = 1, kUnits = 2, kFrom = 3, kTo = 4, kSizes = 5;

  C10_HOST_DEVICE int row() const {
    return kSizes + ndim;
  }
  static C10_HOST_DEVICE int64_t units(const int64_t* box) { // under 2^31
    return box[kUnits] >> 8;
  }
  static C10_HOST_DEVICE int width(const int64_t* box) {
    return static_cast<int>(box[kUnits] & 255);
  }
};

// Fills in kBelow of a table or of a part of one; returns the number of tiles.
inline int64_t number_tiles(int64_t* table, int64_t boxes, int row) {
  int64_t rest = 0;
  for (int64_t b = boxes - 1; b >= 0; --b) {
    int64_t* box = table + b * row;
    rest += box[BoxCopies::kTiles];
    box[BoxCopies::kBelow] = b * box[BoxCopies::kTiles] + rest;
  }
  return rest;
}

// A run of units within one box.
struct Tile {
  int64_t count;
  int width;
  int ndim;
  int64_t from, to;       // of its first unit, in elements
  int64_t at[kMaxDims];   // the unit's index in the box; the last dim in units
  int64_t size[kMaxDims]; // of the box, likewise
  int64_t from_stride[kMaxDims], to_stride[kMaxDims];
};

C10_HOST_DEVICE inline void locate(const BoxCopies& moves, const int64_t* table, int64_t index, Tile& tile) {
  const int row = moves.row(), last = moves.ndim - 1;
  int64_t low = 1, high = moves.boxes; // how many boxes have a tile at this level
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (table[middle * row + BoxCopies::kBelow] > index) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  const bool more = low < moves.boxes;
  const int64_t rank = index - (more ? table[low * row + BoxCopies::kBelow] : 0);
  const int64_t level = (more ? table[low * row + BoxCopies::kTiles] : 0) + rank / low;
  const int64_t* box = table + rank % low * row;
  tile.ndim = moves.ndim;
  tile.width = BoxCopies::width(box);
  int64_t units = 1;
  for (int d = last; d >= 0; --d) {
    const int64_t stride = units << tile.width;
    tile.from_stride[d] = d == last ? stride : moves.from_flat ? stride : moves.from_strides[d];
    tile.to_stride[d] = d == last ? stride : moves.to_flat ? stride : moves.to_strides[d];
    tile.size[d] = d == last ? box[BoxCopies::kSizes + d] >> tile.width : box[BoxCopies::kSizes + d];
    units *= tile.size[d];
  }
  const int64_t full = BoxCopies::units(box);
  int64_t first = level * full;
  tile.count = units - first < full ? units - first : full;
  tile.from = box[BoxCopies::kFrom];
  tile.to = box[BoxCopies::kTo];
  for (int d = last; d >= 0; --d) {
    tile.at[d] = d > 0 ? first % tile.size[d] : first;
    first = d > 0 ? first / tile.size[d] : 0;
    tile.from += tile.at[d] * tile.from_stride[d];
    tile.to += tile.at[d] * tile.to_stride[d];
  }
}

// Where the tile's k-th unit is on either side, in elements. k is less than 2^31.
C10_HOST_DEVICE inline void locate_unit(const Tile& tile, uint32_t k, int64_t& from, int64_t& to) {
  from = tile.from;
  to = tile.to;
  uint32_t carry = k;
  for (int d = tile.ndim - 1; carry != 0; --d) {
    int64_t index = tile.at[d] + carry;
    carry = 0;
    if (d > 0 && index >= tile.size[d]) {
      // 32-bit division is several times faster; a larger size can carry at most once.
      carry = tile.size[d] >> 31 ? 1 : static_cast<uint32_t>(index) / static_cast<uint32_t>(tile.size[d]);
      index -= carry * tile.size[d];
    }
    from += (index - tile.at[d]) * tile.from_stride[d];
    to += (index - tile.at[d]) * tile.to_stride[d];
  }
}

// The type in which parts of T are combined.
template <typename T>
using Accumulator = std::conditional_t<
    std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>,
    float,
    std::conditional_t<std::is_integral_v<T> && !std::is_same_v<T, bool>, int64_t, T>>;

template <typename A>
constexpr bool is_complex = std::is_same_v<A, c10::complex<float>> || std::is_same_v<A, c10::complex<double>>;

template <typename A>
C10_HOST_DEVICE inline A combine(ReduceOp op, A a, A b) {
  if constexpr (std::is_same_v<A, bool>) {
    const bool both = op == ReduceOp::Product || op == ReduceOp::Min || op == ReduceOp::Band;
    return op == ReduceOp::Bxor ? a != b : both ? a && b : a || b;
  } else {
    switch (op) {
      case ReduceOp::Product:
        if constexpr (std::is_integral_v<A>) { // wraps around
          return static_cast<A>(static_cast<std::make_unsigned_t<A>>(a) * static_cast<std::make_unsigned_t<A>>(b));
        }
        return a * b;
      case ReduceOp::Min:
        if constexpr (!is_complex<A>) {
          return a != a || a < b ? a : b;
        }
        return a;
      case ReduceOp::Max:
        if constexpr (!is_complex<A>) {
          return a != a || a > b ? a : b;
        }
        return a;
      case ReduceOp::Band:
        if constexpr (std::is_integral_v<A>) {
          return a & b;
        }
        return a;
      case ReduceOp::Bor:
        if constexpr (std::is_integral_v<A>) {
          return a | b;
        }
        return a;
      case ReduceOp::Bxor:
        if constexpr (std::is_integral_v<A>) {
          return a ^ b;
        }
        return a;
      default:
        if constexpr (std::is_integral_v<A>) {
          return static_cast<A>(static_cast<std::make_unsigned_t<A>>(a) + static_cast<std::make_unsigned_t<A>>(b));
        }
        return a + b;
    }
  }
}

template <typename T, typename A>
C10_HOST_DEVICE inline T finish(ReduceOp op, A a, int64_t parts) {
  if constexpr (!std::is_same_v<A, bool>) {
    if (op == ReduceOp::Avg) {
      a = a / static_cast<typename c10::scalar_value_type<A>::type>(parts);
    }
  }
  return static_cast<T>(a);
}

} // namespace shardtensor::kernels
