// Gets a call's local tensors, in the layouts that the solution requires, and moves written operands back to their owners.
#pragma once

#include "dispatch/refs.h"
#include "redistribute/watch.h"
#include "rules/solution.h"
#include "tensor/symbolic.h"

#include <algorithm>

namespace shardtensor {

// The local tensor of each Ref, in the layout that the solution requires: borrowed from its owner, or moved and owned here.
class Locals {
 public:
  void reserve(size_t n) {
    moved_.reserve(n); // pointers into it stay valid
  }
  void borrow(const at::Tensor& t) {
    at_.push_back(&t);
  }
  // `shared`: other calls read it too.
  void hold(at::Tensor t, bool shared = false) {
    if (C10_UNLIKELY(shared)) {
      shared_ |= uint64_t{1} << std::min<size_t>(moved_.size(), 63);
    }
    moved_.push_back(std::move(t));
    at_.push_back(&moved_.back());
  }
  // The call's result; a copy if it shares memory with a shared operand.
  at::Tensor result(at::Tensor t) const {
    return C10_LIKELY(!shared_) ? t : apart(std::move(t));
  }
  const at::Tensor& operator[](size_t i) const {
    return *at_[i];
  }
  std::vector<at::Tensor> all() const {
    std::vector<at::Tensor> out;
    for (const auto* t : at_) {
      out.push_back(*t);
    }
    return out;
  }
  bool any(rules::PiecePredicate is) const {
    return std::any_of(at_.begin(), at_.end(), [&](const at::Tensor* t) { return is(*t); });
  }

 private:
  at::Tensor apart(at::Tensor t) const {
    for (size_t i = 0; i < moved_.size(); ++i) {
      if ((shared_ >> std::min<size_t>(i, 63) & 1) && t.is_alias_of(moved_[i])) {
        return t.clone();
      }
    }
    return t;
  }

  uint64_t shared_ = 0; // bits of moved_; the last bit stands for all further ones
  c10::SmallVector<const at::Tensor*, 4> at_;
  c10::SmallVector<at::Tensor, 4> moved_;
};

// Why an argument moves. `why`: by default, the reason that follows from the op's entry: it has no rule, needs whole inputs, or
// its rule requires the layout.
MoveCause cause_of(const Op& op, const Ref& ref, const char* why = nullptr);
inline constexpr const char* kWrittenBack = "it was written under another layout";

// Raises, on all ranks, if operands whose sizes must agree do not. (On one rank the pieces may agree although the whole
// tensors do not.)
void check_must_match(const Op& op, const Refs& refs, const rules::Solution& solution);

// Fills `locals` with the local tensors in the layouts that the solution requires. The operands have been checked.
void local_arguments(const Op& op, const Refs& refs, const rules::Solution& solution, Locals& locals);

// Call it after the op has run: views that had to move data must notice writes to their base. A call that fails does not count
// as a write.
void note_writes(const Op& op, const Refs& refs);

// A kernel's description of its operands.
c10::SmallVector<rules::KernelRun::OperandInfo, 4> after_moves(const Refs& refs, const rules::Solution& solution);

// Moves an operand that was written in another layout than its owner's back to its owner.
void carry_back(const Op& op, const Refs& refs, const rules::Solution& solution, const Locals& locals);

// This rank's sizes of the first result, for the argument that lists the global ones. In: Numbers or Symbols.
template <typename In>
typename In::List local_sizes_argument(const rules::Solution& solution, const Refs& refs) {
  const auto& result = solution.results[0];
  typename In::List sizes;
  for (const auto& s : result.sizes) {
    sizes.push_back(s.operand >= 0 ? In::sizes(*refs[s.operand].tensor)[s.dim] : In::of(s.value));
  }
  return In::piece(*result.layout, sizes);
}

} // namespace shardtensor
