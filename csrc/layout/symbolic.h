// Sizes that may be symbols of a graph (torch.compile with dynamic shapes). Uses c10 alone.
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

// As numbers; the graph then holds for these alone.
inline Sizes guarded(c10::SymIntArrayRef sizes) {
  Sizes out;
  for (const auto& n : sizes) {
    out.push_back(n.guard_int(__FILE__, __LINE__));
  }
  return out;
}

// Bytes to weigh costs by. A symbol counts as the same number on every rank: ranks may compile at different calls, and must
// choose alike.
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
