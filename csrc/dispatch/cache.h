// Solutions by (op, layouts, ranks, arguments that matter): a table per op and thread, so that nothing is locked.
// Uses rules/resolve.h. Used by handler.cpp.
#pragma once

#include "rules/resolve.h"

#include <memory>
#include <vector>

namespace shardtensor {

class Key {
 public:
  void push(uint64_t word) {
    words_.push_back(word);
    hash_ = (hash_ ^ word) * 0x9e3779b97f4a7c15ULL;
    hash_ ^= hash_ >> 32;
  }
  void push(uint64_t tag, uint64_t word) {
    push(tag ^ word << 8 ^ word >> 56);
    push(word);
  }
  uint64_t hash() const {
    return hash_;
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

  const rules::SolutionPtr* find(const Key& key);
  void put(Key key, rules::SolutionPtr solution);

 private:
  struct Entry {
    Key key;
    rules::SolutionPtr solution;
  };
  void grow();
  // Open addressing; a null slot ends a probe. Emptied whole when it holds kLimit entries.
  std::vector<std::unique_ptr<Entry>> slots_;
  size_t used_ = 0;
};

} // namespace shardtensor
