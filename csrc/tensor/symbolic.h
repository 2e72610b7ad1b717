// Queries about tensors of symbolic sizes. Uses layout/symbolic.h and, for hints, torch's Python binding.
#pragma once

#include "layout/symbolic.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

namespace shardtensor {

inline bool is_symbolic(const at::TensorBase& t) {
  return t.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

// Whether any of its sizes is still a symbol, not guarded to be a number.
inline bool has_symbols(const at::TensorBase& t) {
  if (C10_LIKELY(!is_symbolic(t))) {
    return false;
  }
  const auto sizes = t.sym_sizes();
  return std::any_of(sizes.begin(), sizes.end(), [](const auto& n) { return !n.maybe_as_int(); });
}

// Sizes, strides and offsets as numbers, or as a graph's symbols: the type parameter of code that takes either.
struct Numbers {
  using List = Sizes;
  static bool is_zero(int64_t n) {
    return n == 0;
  }
  static c10::IntArrayRef sizes(const at::Tensor& t) {
    return t.sizes();
  }
  static c10::IntArrayRef strides(const at::Tensor& t) {
    return t.strides();
  }
  static int64_t offset(const at::Tensor& t) {
    return t.storage_offset();
  }
  static int64_t of(const c10::SymInt& n) {
    const auto number = n.maybe_as_int();
    return number ? *number : n.guard_int(__FILE__, __LINE__);
  }
  static Sizes piece(const Layout& layout, c10::IntArrayRef sizes) {
    return layout.local_sizes(sizes);
  }
};
struct Symbols {
  using List = SymSizes;
  // False for a symbol that may be 0. (torch's tracer does not terminate on a symbol plus the number 0.)
  static bool is_zero(const c10::SymInt& n) {
    const auto number = n.maybe_as_int();
    return number && *number == 0;
  }
  static c10::SymIntArrayRef sizes(const at::Tensor& t) {
    return t.sym_sizes();
  }
  static c10::SymIntArrayRef strides(const at::Tensor& t) {
    return t.sym_strides();
  }
  static c10::SymInt offset(const at::Tensor& t) {
    return t.sym_storage_offset();
  }
  static const c10::SymInt& of(const c10::SymInt& n) {
    return n;
  }
  static SymSizes piece(const Layout& layout, c10::SymIntArrayRef sizes) {
    return sym_local_sizes(layout, sizes);
  }
};

// The same tensor with its symbolic sizes as numbers, for code that needs numbers.
at::Tensor in_numbers(const at::Tensor& t);

// The number in the current call, without a guard: only for choices that are correct for any number. It may differ between
// ranks, so it must not decide about communication.
int64_t hint_of(const c10::SymInt& n);
Sizes hints_of(c10::SymIntArrayRef symbols);

// The cut of a dim of this size into these pieces, if they are formulas of the size (see PieceSizes); else null.
Cut cut_that_follows(c10::SymIntArrayRef pieces, const c10::SymInt& size);

} // namespace shardtensor
