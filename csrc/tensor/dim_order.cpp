#include "tensor/dim_order.h"

#include "tensor/symbolic.h"

#include <ATen/ATen.h>
#include <c10/core/Contiguity.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <numeric>

namespace shardtensor {

namespace {

bool is_sorted(c10::IntArrayRef strides) {
  return std::is_sorted(strides.rbegin(), strides.rend());
}

// The dims, stably sorted by insertion: there are few, and std::stable_sort allocates.
template <typename Before>
DimOrder sorted_dims(size_t n, const Before& before) {
  DimOrder order;
  for (size_t d = 0; d < n; ++d) {
    const auto dim = static_cast<int8_t>(d);
    auto at = order.end();
    while (at != order.begin() && before(dim, *(at - 1))) {
      --at;
    }
    order.insert(at, dim);
  }
  return order;
}

} // namespace

DimOrder order_of(c10::IntArrayRef strides) {
  if (is_sorted(strides) || std::find(strides.begin(), strides.end(), 0) != strides.end()) {
    return {};
  }
  return sorted_dims(strides.size(), [&](int8_t a, int8_t b) { return strides[a] > strides[b]; });
}

DimOrder exact_order_of(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return sorted_dims(strides.size(), [&](int8_t a, int8_t b) {
    return strides[a] != strides[b] ? strides[a] > strides[b] : (sizes[a] == 1) < (sizes[b] == 1);
  });
}

DimOrder order_like(const at::Tensor& like, size_t ndim) {
  if (!like.defined() || like.dim() != static_cast<int64_t>(ndim)) {
    return {};
  }
  if (C10_LIKELY(!is_symbolic(like))) {
    return like.is_contiguous() ? DimOrder() : order_of(like.strides());
  }
  const auto sizes = hints_of(like.sym_sizes()), strides = hints_of(like.sym_strides());
  return c10::_compute_contiguous<int64_t>(sizes, strides, c10::multiply_integers(sizes)) ? DimOrder() : order_of(strides);
}

namespace {

int64_t at_least_one(int64_t n) {
  return std::max<int64_t>(n, 1);
}
c10::SymInt at_least_one(const c10::SymInt& n) {
  return n.is_symbolic() ? n : n.max(1);
}

template <typename List, typename Number>
List dense(c10::ArrayRef<Number> sizes, const DimOrder& order) {
  const auto n = static_cast<int64_t>(sizes.size());
  List strides(n, 1);
  Number stride = 1;
  for (int64_t i = n - 1; i >= 0; --i) {
    const auto d = order.empty() ? i : order[i];
    strides[d] = stride;
    stride = stride * at_least_one(sizes[d]);
  }
  return strides;
}

// Whether the dims have these strides, except those of size 1. True if there are no elements.
template <typename Number, typename List>
bool lies(c10::ArrayRef<Number> sizes, c10::ArrayRef<Number> strides, const List& want) {
  bool out = true;
  for (size_t d = 0; d < sizes.size(); ++d) {
    out &= strides[d] == want[d] || sizes[d] == 1; // asks nothing of a symbol whose stride is right
  }
  return out || std::find(sizes.begin(), sizes.end(), Number(0)) != sizes.end();
}

// For graphs: an op that takes symbols.
at::Tensor permuted(const at::Tensor& local, const DimOrder& order) {
  std::vector<int64_t> there(local.dim()), back(local.dim());
  std::iota(there.begin(), there.end(), 0);
  std::copy(order.begin(), order.end(), there.begin());
  for (size_t i = 0; i < there.size(); ++i) {
    back[there[i]] = static_cast<int64_t>(i);
  }
  return local.permute(there).contiguous().permute(back);
}

} // namespace

Sizes dense_strides(c10::IntArrayRef sizes, const DimOrder& order) {
  return dense<Sizes>(sizes, order);
}
SymSizes dense_strides(c10::SymIntArrayRef sizes, const DimOrder& order) {
  return dense<SymSizes>(sizes, order);
}

at::Tensor in_dim_order(at::Tensor local, const DimOrder& order) {
  if (!order.empty() && static_cast<int64_t>(order.size()) != local.dim()) { // the piece of a rank outside the mesh
    return local;
  }
  if (C10_UNLIKELY(is_symbolic(local))) {
    const auto want = dense_strides(local.sym_sizes(), order);
    return lies(local.sym_sizes(), local.sym_strides(), want) ? local : permuted(local, order);
  }
  if (order.empty() && local.is_contiguous()) {
    return local;
  }
  const auto want = dense_strides(local.sizes(), order);
  return lies(local.sizes(), local.strides(), want) ? local
                                                    : at::empty_strided(local.sizes(), want, local.options()).copy_(local);
}

at::Tensor in_dim_order(at::Tensor local, c10::IntArrayRef strides) {
  return local.is_contiguous() && is_sorted(strides) ? local : in_dim_order(std::move(local), order_of(strides));
}

Sizes strides_like(c10::IntArrayRef sizes, const at::Tensor& like) {
  return dense_strides(sizes, order_like(like, sizes.size()));
}
SymSizes strides_like(c10::SymIntArrayRef sizes, const at::Tensor& like) {
  return dense_strides(sizes, order_like(like, sizes.size()));
}

} // namespace shardtensor
