// Solutions by (op, layouts, ranks, arguments that matter): a table per op and thread, so that nothing is locked.
// Uses rules/resolve.h. Used by handler.cpp.
#pragma once

#include "rules/resolve.h"

#include <bit>
#include <memory>
#include <vector>

namespace shardtensor {

struct CacheInfo; // handler.h

class Key {
 public:
  // What a word of a non-tensor argument stands for.
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
    kSizes,
    kSymbols,
    kOpaque
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
      push(kOpaque); // its value is not known
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
  bool operator==(const Key& o) const {
    return hash_ == o.hash_ && words_ == o.words_;
  }

 private:
  c10::SmallVector<uint64_t, 16> words_;
  uint64_t hash_ = 0x243f6a8885a308d3ULL;
};

class Cache {
 public:
  // This thread's table for the op.
  static Cache& of(int32_t op);

  // The solution for a call. `key` is without the tensors' sizes, `add_sizes(key)` adds them, `solve()` finds the solution.
  // `sized`: the op's rule reads sizes. Otherwise a solution that has weighed bytes is kept by sizes too: it must not depend
  // on what this rank has seen before, or ranks could choose differently.
  template <typename AddSizes, typename Solve>
  static rules::SolutionPtr get(int32_t op, bool sized, Key& key, const AddSizes& add_sizes, const Solve& solve) {
    auto& known = of(op);
    const auto* hit = sized ? nullptr : known.find(key);
    if (hit && !(*hit)->sized) {
      return *hit;
    }
    if (sized || hit) {
      add_sizes(key);
      if (const auto* found = known.find(key)) {
        return *found;
      }
    }
    const auto asked = generation();
    auto solution = solve(); // a log handler may run Python, which may clear the tables: `known` and `hit` are gone
    if (asked != generation()) {
      return solution; // found under modes that hold no more
    }
    auto& now = of(op);
    now.put(key, solution);
    if (!sized && !hit && solution->sized) {
      add_sizes(key);
      now.put(std::move(key), solution);
    }
    return solution;
  }

  void add_to(CacheInfo& info) const;

  const rules::SolutionPtr* find(const Key& key);

 private:
  static int64_t generation(); // of all threads' tables: rises when they are cleared
  void put(Key key, rules::SolutionPtr solution);

  struct Entry {
    Key key;
    rules::SolutionPtr solution;
  };
  void grow();
  // Open addressing; a null slot ends a probe. Emptied whole when it holds kLimit entries.
  std::vector<std::unique_ptr<Entry>> slots_;
  size_t used_ = 0;
  int64_t hits_ = 0;
  int64_t misses_ = 0;
};

} // namespace shardtensor
