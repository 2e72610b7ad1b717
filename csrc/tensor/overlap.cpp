#include "tensor/overlap.h"

#include "tensor/symbolic.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <functional>
#include <map>
#include <unordered_map>

namespace shardtensor {

namespace {

// The same for a tensor and its views, even views that had to move data.
const void* memory_of(const ShardTensorImpl& t) {
  const WriteCounter* writes = t.watches() ? t.detached_view()->base_writes.get() : t.known_writes();
  return writes ? static_cast<const void*>(writes) : t.storage().unsafeGetStorageImpl();
}

// For two tensors with the same memory.
bool may_overlap(const at::Tensor& a, const at::Tensor& b) {
  if (is_symbolic(a) || is_symbolic(b) || a.scalar_type() != b.scalar_type()) {
    return true;
  }
  if (a.numel() == 0 || b.numel() == 0) {
    return false;
  }
  std::map<int64_t, std::array<int64_t, 2>, std::greater<>> steps; // by stride: how far a and b go along it
  for (const auto* t : {&a, &b}) {
    for (int64_t d = 0; d < t->dim(); ++d) {
      if (t->size(d) > 1 && t->stride(d) > 0) {
        steps[t->stride(d)][t == &b] += t->size(d) - 1;
      }
    }
  }
  const std::array<int64_t, 2> from{a.storage_offset(), b.storage_offset()};
  auto to = from; // the last elements
  for (const auto& [stride, n] : steps) {
    to[0] += stride * n[0];
    to[1] += stride * n[1];
  }
  if (to[0] < from[1] || to[1] < from[0]) {
    return false;
  }
  auto rest = from;
  int64_t outer = 0;
  bool apart = false;
  for (const auto& [stride, n] : steps) {
    const std::array<int64_t, 2> at{rest[0] / stride, rest[1] / stride};
    if (outer && (outer % stride || at[0] + n[0] >= outer / stride || at[1] + n[1] >= outer / stride)) {
      return true; // no grid, or one tensor wraps around its end
    }
    apart |= at[0] + n[0] < at[1] || at[1] + n[1] < at[0];
    rest = {rest[0] % stride, rest[1] % stride};
    outer = stride;
  }
  return !apart && rest[0] == rest[1];
}

} // namespace

std::optional<std::pair<size_t, size_t>> first_overlap(c10::ArrayRef<TensorAccess> uses) {
  std::unordered_map<const void*, c10::SmallVector<size_t, 2>> written;
  for (size_t i = 0; i < uses.size(); ++i) {
    if (uses[i].written) {
      written[memory_of(*uses[i].impl)].push_back(i);
    }
  }
  for (size_t i = 0; !written.empty() && i < uses.size(); ++i) {
    const auto found = written.find(memory_of(*uses[i].impl));
    if (found == written.end()) {
      continue;
    }
    for (const auto w : found->second) {
      if (uses[w].user != uses[i].user && may_overlap(*uses[w].tensor, *uses[i].tensor)) {
        return std::pair(w, i);
      }
    }
  }
  return std::nullopt;
}

} // namespace shardtensor
