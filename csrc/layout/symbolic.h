// Sizes that may be symbols of a graph (torch.compile with dynamic shapes). Uses only c10.
#pragma once

#include "layout/layout.h"

#include <c10/core/SymInt.h>
#include <c10/core/SymIntArrayRef.h>

#include <vector>

namespace shardtensor {

using SymSizes = std::vector<c10::SymInt>;

inline SymSizes symbols(c10::IntArrayRef sizes) {
  return {sizes.begin(), sizes.end()};
}

// As numbers, which guards the graph.
inline Sizes guarded(c10::SymIntArrayRef sizes) {
  Sizes out;
  for (const auto& n : sizes) {
    out.push_back(n.guard_int(__FILE__, __LINE__));
  }
  return out;
}

// A symbol adds a guard.
inline bool divides(int64_t pieces, const c10::SymInt& n) {
  return (n % pieces).sym_eq(0).guard_bool(__FILE__, __LINE__);
}

// Layout::extent_before(): a symbol if the cuts are even and divide it, else a number.
inline c10::SymInt sym_extent_before(
    const Layout& layout, int64_t mesh_dim, int64_t dim, const c10::SymInt& size, const Coordinate& at) {
  auto extent = size;
  for (int64_t m = 0; m < mesh_dim; ++m) {
    const auto& p = layout.placement(m);
    if (!p.is_shard(dim)) {
      continue;
    }
    const auto n = layout.mesh().size(m);
    if (layout.cut(m) || p.split_factor > 1 || !divides(n, extent)) {
      return layout.extent_before(mesh_dim, dim, size.guard_int(__FILE__, __LINE__), at);
    }
    extent = extent / n;
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

// What this rank holds of `size` indices along `dim`: one run, Layout::intervals() over symbols.
struct SymInterval {
  c10::SymInt start, length;

  Interval numbers() const { // which guards the graph
    return {start.guard_int(__FILE__, __LINE__), length.guard_int(__FILE__, __LINE__)};
  }
};
inline SymInterval mine(const Layout& layout, int64_t dim, const c10::SymInt& size) {
  SymInterval held{0, size};
  for (int64_t m = 0; m < layout.ndim() && held.length.is_symbolic(); ++m) {
    if (layout.placement(m).is_shard(dim)) {
      held.length = sym_extent_before(layout, m + 1, dim, size, layout.mesh().coordinate());
      held.start = held.start + held.length * layout.mesh().coordinate()[m];
    }
  }
  if (held.length.is_symbolic()) {
    return held;
  }
  const auto runs = layout.intervals(dim, size.guard_int(__FILE__, __LINE__), layout.mesh().coordinate());
  TORCH_CHECK_NOT_IMPLEMENTED(runs.size() == 1, "a kernel cannot run on a strided shard");
  return {runs[0].start, runs[0].length};
}

inline c10::SymInt numel_of(c10::SymIntArrayRef sizes) {
  c10::SymInt n = 1;
  for (const auto& size : sizes) {
    n = n * size;
  }
  return n;
}

// Bytes to tell whether anything has to be sent. A symbol counts as some number, so do not compare them.
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
