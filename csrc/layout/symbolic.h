// Sizes that may be symbols of a graph (torch.compile with dynamic shapes). Uses only c10.
#pragma once

#include "layout/layout.h"

#include <c10/core/SymInt.h>
#include <c10/core/SymIntArrayRef.h>

#include <algorithm>
#include <optional>
#include <vector>

namespace shardtensor {

using SymSizes = std::vector<c10::SymInt>;

inline SymSizes symbols(c10::IntArrayRef sizes) {
  return {sizes.begin(), sizes.end()};
}

// The sizes as numbers, which guards the graph.
inline Sizes guarded(c10::SymIntArrayRef sizes) {
  Sizes out;
  for (const auto& n : sizes) {
    out.push_back(n.guard_int(__FILE__, __LINE__));
  }
  return out;
}

// Whether `n` is a multiple of `pieces`. Adds a guard if `n` is a symbol.
inline bool divides(int64_t pieces, const c10::SymInt& n) {
  return (n % pieces).sym_eq(0).guard_bool(__FILE__, __LINE__);
}

// torch cannot trace a symbol plus 0.
inline c10::SymInt plus(const c10::SymInt& a, const c10::SymInt& b) {
  const auto is_zero = [](const c10::SymInt& n) { return n.maybe_as_int() == 0; };
  return is_zero(a) ? b : is_zero(b) ? a : a + b;
}

// A run of indices along one dim.
struct SymInterval {
  c10::SymInt start, length;

  c10::SymInt end() const {
    return plus(start, length);
  }
  Interval numbers() const { // which guards the graph
    return {start.guard_int(__FILE__, __LINE__), length.guard_int(__FILE__, __LINE__)};
  }
};

// Pieces by torch.chunk's rule: all have the length `full` but for the last.
struct SymChunks {
  c10::SymInt full, last;

  bool equal() const {
    return last.is_same(full);
  }
  SymInterval operator()(int64_t pieces, int64_t index) const {
    return {index == 0 ? c10::SymInt(0) : index == 1 ? full : full * index, index == pieces - 1 ? last : full};
  }
};
// Splits a symbol by torch.chunk's rule. Guards the graph on whether the pieces are equal. `nested`: another mesh dim cuts the
// same tensor dim. Then the ranks' sizes differ, and only guards on the remainder agree. Returns nothing if `size` is a number or
// a piece has fewer than two indices: torch makes sizes 0 and 1 numbers on the rank that has them, so such sizes are numbers on
// all ranks.
inline std::optional<SymChunks> sym_chunks(const c10::SymInt& size, int64_t pieces, bool nested) {
  if (!size.is_symbolic()) {
    return std::nullopt;
  }
  const bool equal = divides(pieces, size);
  if (nested && !equal) {
    (void)(size % pieces).guard_int(__FILE__, __LINE__);
  }
  const auto full = (equal ? size : size + (pieces - 1)) / pieces;
  const auto last = equal ? full : size - full * (pieces - 1);
  return last < 2 ? std::nullopt : std::optional(SymChunks{full, last});
}
// chunk() over symbols.
inline SymInterval sym_chunk(const c10::SymInt& size, int64_t pieces, int64_t index) {
  if (const auto chunks = sym_chunks(size, pieces, false)) {
    return (*chunks)(pieces, index);
  }
  const auto piece = chunk(size.guard_int(__FILE__, __LINE__), pieces, index);
  return {piece.start, piece.length};
}

// Whether another mesh dim cuts the same tensor dim.
inline bool is_nested(const Layout& layout, int64_t m) {
  int64_t cuts = 0;
  for (const auto& p : layout.placements()) {
    cuts += p.is_shard(layout.placement(m).dim);
  }
  return cuts > 1;
}

// The pieces of mesh dim m for each of its coordinates, if they can be symbols.
class SymSplit {
 public:
  SymSplit(const Layout& layout, int64_t m, const c10::SymInt& extent) : pieces_(layout.mesh().size(m)) {
    if (!extent.is_symbolic() || layout.placement(m).split_factor > 1) {
      return;
    }
    if (!layout.cut(m)) {
      chunks_ = sym_chunks(extent, pieces_, is_nested(layout, m));
    } else if (layout.cut(m)->follows() && (layout.cut(m)->quotients.empty() || !is_nested(layout, m))) {
      follows_ = layout.cut(m);
      extent_ = extent;
    }
  }
  explicit operator bool() const {
    return chunks_ || follows_;
  }
  SymInterval operator()(int64_t coordinate) const {
    if (chunks_) {
      return (*chunks_)(pieces_, coordinate);
    }
    if (const auto& symbols = follows_->symbols; !symbols.empty()) {
      c10::SymInt start = 0;
      for (int64_t i = 0; i < coordinate; ++i) {
        start = plus(start, symbols[i]);
      }
      return {start, symbols[coordinate]};
    }
    return {sum(0, coordinate), sum(coordinate, coordinate + 1)};
  }

 private:
  // How many indices the pieces from `first` to `end` - 1 have together.
  c10::SymInt sum(int64_t first, int64_t end) const {
    const auto n = follows_->quotients.size();
    int64_t size = 0, share = 0;
    std::vector<int64_t> times(n, 0);
    for (auto i = first; i < end; ++i) {
      size += (*follows_)[i];
      share += follows_->shares[i];
      for (size_t k = 0; k < n; ++k) {
        times[k] += follows_->times[i * n + k];
      }
    }
    auto out = shared(size, share);
    for (size_t k = 0; k < n; ++k) {
      out = times[k] == 0 ? out : plus(out, multiple(quotient(follows_->quotients[k]), times[k]));
    }
    return out;
  }
  c10::SymInt shared(int64_t size, int64_t share) const {
    if (share == 0) {
      return size / follows_->per;
    }
    const auto n = plus(multiple(extent_, share), size);
    TORCH_SYM_CHECK((n % follows_->per).sym_eq(0), "shardtensor: the cut of a graph does not fit its size");
    return follows_->per == 1 ? n : n / follows_->per;
  }
  c10::SymInt quotient(const PieceSizes::Quotient& q) const {
    return plus(multiple(extent_, q.up), q.shift) / q.down;
  }
  static c10::SymInt multiple(const c10::SymInt& n, int64_t times) {
    return times == 1 ? n : n * times;
  }

  int64_t pieces_;
  std::optional<SymChunks> chunks_;
  Cut follows_;
  c10::SymInt extent_ = 0;
};

// The layout with numbers for pieces that are symbols of their own (PieceSizes::symbols), which guards the graph.
inline LayoutPtr in_numbers(const LayoutPtr& layout, c10::SymIntArrayRef sizes) {
  return layout->has_symbols() ? layout->settled(guarded(sizes)) : layout;
}

// Layout::extent_before() over symbols.
inline c10::SymInt sym_extent_before(
    const Layout& layout, int64_t mesh_dim, int64_t dim, const c10::SymInt& size, const Coordinate& at) {
  auto extent = size;
  for (int64_t m = 0; m < mesh_dim; ++m) {
    if (layout.placement(m).is_shard(dim)) {
      const SymSplit split(layout, m, extent);
      extent = split ? split(at[m]).length : c10::SymInt(layout.split_size(m, extent.guard_int(__FILE__, __LINE__), at));
    }
  }
  return extent;
}

// This rank's sizes: Layout::local_sizes() over symbols.
inline SymSizes sym_local_sizes(const Layout& layout, c10::SymIntArrayRef sizes) {
  SymSizes out;
  for (size_t d = 0; d < sizes.size(); ++d) {
    out.push_back(sym_extent_before(layout, layout.ndim(), static_cast<int64_t>(d), sizes[d], layout.mesh().coordinate()));
  }
  return out;
}

// The piece of mesh dim m at a coordinate; with a stride, its first run.
inline SymInterval sym_piece(const Layout& layout, int64_t m, const c10::SymInt& extent, const Coordinate& at) {
  if (const SymSplit split(layout, m, extent); split) {
    return split(at[m]);
  }
  const auto run = layout.split(m, extent.guard_int(__FILE__, __LINE__), at)[0];
  return {run.start, run.length};
}

// The indices along `dim`, of `size`, that this rank holds: one run; Layout::intervals() over symbols.
inline SymInterval mine(const Layout& layout, int64_t dim, const c10::SymInt& size) {
  const auto& here = layout.mesh().coordinate();
  const auto strided = [&](const Placement& p) { return p.is_shard(dim) && p.split_factor > 1; };
  if (!size.is_symbolic() || std::any_of(layout.placements().begin(), layout.placements().end(), strided)) {
    const auto runs = layout.intervals(dim, size.guard_int(__FILE__, __LINE__), here);
    TORCH_CHECK_NOT_IMPLEMENTED(runs.size() == 1, "a kernel cannot run on a strided shard");
    return {runs[0].start, runs[0].length};
  }
  SymInterval held{0, size};
  for (int64_t m = 0; m < layout.ndim(); ++m) {
    if (layout.placement(m).is_shard(dim)) {
      const auto piece = sym_piece(layout, m, held.length, here);
      held = {plus(held.start, piece.start), piece.length};
    }
  }
  return held;
}

inline c10::SymInt numel_of(c10::SymIntArrayRef sizes) {
  c10::SymInt n = 1;
  for (const auto& size : sizes) {
    n = n * size;
  }
  return n;
}

// Bytes that only tell whether anything has to be sent. A symbol counts as some number, so do not compare these bytes.
inline double nominal_bytes(c10::SymIntArrayRef sizes, size_t item) {
  constexpr double kNominalSize = 1024;
  auto bytes = static_cast<double>(item);
  for (const auto& n : sizes) {
    const auto number = n.maybe_as_int();
    bytes *= number ? static_cast<double>(*number) : kNominalSize;
  }
  return bytes;
}

} // namespace shardtensor
