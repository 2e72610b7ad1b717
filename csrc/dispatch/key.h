// The key of a cached solution: the facts of a call that its rule depends on.
#pragma once

#include "dispatch/refs.h"
#include "rules/rule.h"

#include <ATen/core/IListRef.h>

#include <bit>

namespace shardtensor {

class CacheKey {
 public:
  // `reads`: which facts of a call the key holds, as the bits of Reads.
  explicit CacheKey(uint64_t reads) : reads_(reads) {
    push(reads); // so that equal words mean equal facts
  }
  uint64_t reads() const {
    return reads_;
  }
  bool holds(uint64_t what) const {
    return reads_ & what;
  }

  // The meaning of a word of a non-tensor argument.
  enum Tag : uint64_t {
    kNone = 1,
    kInt,
    kTrue,
    kFalse,
    kDouble,
    kComplex,
    kUnsigned,
    kInts,
    kString,
    kDevice,
    kList,
    kOrder,
    kSizes
  };

  void push(uint64_t word) {
    words_.push_back(word);
    hash_ = (std::rotl(hash_, 29) ^ word) * 0x9e3779b97f4a7c15ULL;
  }
  void push(Tag tag, uint64_t word) {
    push(static_cast<uint64_t>(tag));
    push(word);
  }
  void push_scalar(const c10::Scalar& v) {
    if (v.isSymbolic()) {
      push_scalar(guarded(v));
    } else if (v.isBoolean()) {
      push(v.toBool() ? kTrue : kFalse);
    } else if (v.isFloatingPoint()) {
      push(kDouble, std::bit_cast<uint64_t>(v.toDouble()));
    } else if (v.isComplex()) {
      const auto z = v.toComplexDouble();
      push(kComplex, std::bit_cast<uint64_t>(z.real()));
      push(std::bit_cast<uint64_t>(z.imag()));
    } else if (v.isUnsigned()) { // too large for int64_t
      push(kUnsigned, v.toUInt64());
    } else {
      push(kInt, static_cast<uint64_t>(v.toLong()));
    }
  }
  void push_all(c10::ArrayRef<int64_t> words) {
    for (const auto w : words) {
      push(static_cast<uint64_t>(w));
    }
  }
  uint64_t hash() const {
    return hash_ ^ hash_ >> 32;
  }
  bool operator==(const CacheKey& o) const {
    return hash_ == o.hash_ && words_ == o.words_;
  }

 private:
  static c10::Scalar guarded(const c10::Scalar& symbol); // as a number, which guards the graph

  uint64_t reads_;
  c10::SmallVector<uint64_t, 16> words_;
  uint64_t hash_ = 0x243f6a8885a308d3ULL;
};

// The key of a call without its non-tensor arguments: layouts, numbers of dims, dims of size 1, dtypes, orders of dims in
// memory, and the sizes and strides that the op's rule reads.
CacheKey key_of(const Op& op, const Refs& refs);
void add_sizes(const Refs& refs, CacheKey& key);

// The same with boxed arguments.
CacheKey key_of(const Op& op, const torch::jit::Stack& stack, size_t base, const Refs& refs);

// ---- the words of one non-tensor argument, boxed or not; a tensor adds none ----

inline void push(CacheKey& key, int64_t v) {
  key.push(CacheKey::kInt, static_cast<uint64_t>(v));
}
inline void push(CacheKey& key, bool v) {
  key.push(v ? CacheKey::kTrue : CacheKey::kFalse);
}
inline void push(CacheKey& key, double v) {
  key.push(CacheKey::kDouble, std::bit_cast<uint64_t>(v));
}
inline void push(CacheKey& key, at::ScalarType v) {
  push(key, static_cast<int64_t>(v));
}
inline void push(CacheKey& key, at::MemoryFormat v) {
  push(key, static_cast<int64_t>(v));
}
inline void push(CacheKey& key, c10::IntArrayRef v) {
  key.push(CacheKey::kInts, v.size());
  key.push_all(v);
}
inline void push(CacheKey& key, c10::SymIntArrayRef v) {
  push(key, C10_AS_INTARRAYREF_SLOW(v));
}
inline void push(CacheKey& key, const at::OptionalIntArrayRef& v) {
  if (v) {
    push(key, *v);
  } else {
    key.push(CacheKey::kNone);
  }
}
inline void push(CacheKey& key, const c10::Scalar& v) {
  key.push_scalar(v);
}
template <typename T>
inline void push(CacheKey& key, const std::optional<T>& v) {
  if (v) {
    push(key, *v);
  } else {
    key.push(CacheKey::kNone);
  }
}
inline void push(CacheKey&, const at::Tensor&) {}
inline void push(CacheKey&, const std::optional<at::Tensor>&) {}
inline void push(CacheKey&, const at::ITensorListRef&) {}
inline void push(CacheKey&, at::TensorList) {}
inline void push(CacheKey& key, c10::Device v) {
  key.push(CacheKey::kDevice, static_cast<uint64_t>(v.type()));
}
void push(CacheKey& key, const c10::IValue& v);

} // namespace shardtensor
