#include "dispatch/key.h"

#include "dispatch/meta_probe.h"

namespace shardtensor {

c10::Scalar CacheKey::guarded(const c10::Scalar& symbol) {
  if (symbol.isFloatingPoint()) {
    return symbol.toSymFloat().guard_float(__FILE__, __LINE__);
  }
  return symbol.isBoolean() ? c10::Scalar(symbol.toSymBool().guard_bool(__FILE__, __LINE__))
                            : c10::Scalar(symbol.toSymInt().guard_int(__FILE__, __LINE__));
}

namespace {

// The order of a result's dims depends on the order of the operands' dims, and on whether operands have gaps or overlaps.
void push_form(CacheKey& key, const at::Tensor& t) {
  const auto sizes = t.sizes(), strides = t.strides();
  uint64_t word = t.is_non_overlapping_and_dense();
  for (const auto s : strides) {
    word = word << 1 | static_cast<uint64_t>(s == 0);
  }
  key.push(word);
  for (const auto d : exact_order_of(sizes, strides)) {
    key.push(static_cast<uint64_t>(d));
  }
  key.push(CacheKey::kOrder);
  if (C10_UNLIKELY(is_ordered_by_sizes(t))) {
    key.push_all(sizes);
  }
}

} // namespace

CacheKey key_of(const Op& op, const Refs& refs) {
  CacheKey key(op.reads());
  for (const auto& r : refs) {
    const auto shape = sizes_of(r);
    uint64_t ones = 0;
    for (size_t d = 0; d < shape.size(); ++d) {
      ones |= static_cast<uint64_t>(shape[d] == 1) << (d & 15);
    }
    key.push(
        (r.impl ? static_cast<uint64_t>(r.impl->layout().id()) : 0) | static_cast<uint64_t>(r.arg) << 40 |
        static_cast<uint64_t>(shape.size()) << 48 | static_cast<uint64_t>(r.tensor->scalar_type()) << 54);
    key.push(ones | static_cast<uint64_t>(static_cast<uint32_t>(r.index)) << 16);
    if (shape.size() > 16) {
      key.push_all(shape);
    }
    if (key.holds(rules::Reads::kStrides) && !has_symbols(*r.tensor)) {
      key.push_all(r.tensor->strides());
      key.push(static_cast<uint64_t>(r.tensor->storage_offset()));
    } else if (!is_symbolic(*r.tensor) && !r.tensor->is_contiguous()) {
      push_form(key, *r.tensor);
    }
    if (key.holds(rules::Reads::kNumbers) && !r.impl) {
      key.push(rules::kind_of_number(*r.tensor));
    }
  }
  if (key.holds(rules::Reads::kSizes)) {
    add_sizes(refs, key);
  }
  return key;
}

void add_sizes(const Refs& refs, CacheKey& key) {
  key.push(CacheKey::kSizes);
  for (const auto& r : refs) {
    key.push_all(sizes_of(r));
  }
}

CacheKey key_of(const Op& op, const torch::jit::Stack& stack, size_t base, const Refs& refs) {
  auto key = key_of(op, refs);
  for (size_t i = 0; i < op.kinds.size(); ++i) {
    const auto& value = stack[base + i];
    if (op.kinds[i] == ArgKind::Other && key.holds(rules::Reads::arg(i))) {
      push(key, value);
    } else if (op.kinds[i] == ArgKind::Other && key.holds(rules::Reads::kNumbers)) {
      key.push(rules::kind_of_number(value));
    }
  }
  return key;
}

void push(CacheKey& key, const c10::IValue& v) {
  if (v.isNone()) {
    key.push(CacheKey::kNone);
  } else if (v.isScalar() || v.isUnsigned()) {
    push(key, v.toScalar());
  } else if (v.isIntList()) {
    push(key, c10::IntArrayRef(v.toDimVector()));
  } else if (v.isString()) {
    key.push(CacheKey::kString, std::hash<std::string>()(v.toStringRef()));
  } else if (v.isDevice()) {
    push(key, v.toDevice());
  } else {
    TORCH_INTERNAL_ASSERT(v.isList(), "a rule has read a ", v.tagKind(), ", which no key of the cache can hold");
    const auto list = v.toListRef();
    key.push(CacheKey::kList, list.size());
    for (const auto& x : list) {
      push(key, x);
    }
  }
}

} // namespace shardtensor
