// What tensors of symbolic sizes are asked for. Uses layout/symbolic.h and, for hints, torch's Python binding.
#pragma once

#include "layout/symbolic.h"
#include "tensor/order.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

namespace shardtensor {

inline bool is_symbolic(const at::TensorBase& t) {
  return t.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

// Whether any of its sizes is a symbol still, not guarded to be a number.
inline bool has_symbols(const at::TensorBase& t) {
  const auto sizes = t.sym_sizes();
  return is_symbolic(t) && std::any_of(sizes.begin(), sizes.end(), [](const auto& n) { return !n.maybe_as_int(); });
}

// The same tensor, its symbolic sizes as numbers: where code needs numbers.
at::Tensor in_numbers(const at::Tensor& t);

// What it is in the call at hand, without a guard: for what is right whatever it is. Nothing that other ranks must do alike may
// follow from it; for that there is nominal_bytes().
int64_t hint_of(const c10::SymInt& n);

// Layout::sizes_of_equal_pieces() over symbols.
SymSizes sym_sizes_of_equal_pieces(const Layout& layout, c10::SymIntArrayRef local);

// dense_strides() over symbols.
SymSizes sym_dense_strides(c10::SymIntArrayRef sizes, const Order& order);
// strides_like() over symbols; undefined `like`: one after the other.
SymSizes sym_strides_like(c10::SymIntArrayRef sizes, const at::Tensor& like);

} // namespace shardtensor
