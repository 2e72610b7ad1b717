#include "tensor/order.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace shardtensor {

namespace {

bool is_sorted(c10::IntArrayRef strides) {
  return std::is_sorted(strides.rbegin(), strides.rend());
}

// The dims, stably sorted by insertion: there are few, and std::stable_sort allocates.
template <typename Before>
Order sorted_dims(size_t n, const Before& before) {
  Order order;
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

Order order_of(c10::IntArrayRef strides) {
  if (is_sorted(strides) || std::find(strides.begin(), strides.end(), 0) != strides.end()) {
    return {};
  }
  return sorted_dims(strides.size(), [&](int8_t a, int8_t b) { return strides[a] > strides[b]; });
}

Order exact_order_of(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return sorted_dims(strides.size(), [&](int8_t a, int8_t b) {
    return strides[a] != strides[b] ? strides[a] > strides[b] : (sizes[a] == 1) < (sizes[b] == 1);
  });
}

Sizes dense_strides(c10::IntArrayRef sizes, const Order& order) {
  const auto n = static_cast<int64_t>(sizes.size());
  Sizes strides(n, 1);
  int64_t stride = 1;
  for (int64_t i = n - 1; i >= 0; --i) {
    const auto d = order.empty() ? i : order[i];
    strides[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

at::Tensor laid(at::Tensor local, c10::IntArrayRef strides) {
  if (static_cast<int64_t>(strides.size()) != local.dim()) { // the piece of a rank outside the mesh
    return local;
  }
  if (local.is_contiguous() && is_sorted(strides)) {
    return local;
  }
  const auto sizes = local.sizes(), have = local.strides();
  const auto want = dense_strides(sizes, order_of(strides));
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) {
      return local;
    }
    if (sizes[d] > 1 && have[d] != want[d]) {
      return at::empty_strided(sizes, want, local.options()).copy_(local);
    }
  }
  return local;
}

Sizes strides_like(c10::IntArrayRef sizes, const at::Tensor& like) {
  const bool ordered = like.dim() == static_cast<int64_t>(sizes.size()) && !like.is_contiguous();
  return dense_strides(sizes, ordered ? order_of(like.strides()) : Order());
}

} // namespace shardtensor
