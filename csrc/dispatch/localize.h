// From a call's tensors to this rank's, in the layouts that the solution asks for, and back where the op has written.
#pragma once

#include "dispatch/refs.h"
#include "rules/resolve.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>

namespace shardtensor {

// The local tensor of each Ref, in the layout the solution asks for: borrowed from its owner, or moved and held here.
class Locals {
 public:
  void reserve(size_t n) {
    moved_.reserve(n); // pointers into it stay valid
  }
  void borrow(const at::Tensor& t) {
    at_.push_back(&t);
  }
  void hold(at::Tensor t) {
    moved_.push_back(std::move(t));
    at_.push_back(&moved_.back());
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
  bool any(rules::OfPiece is) const {
    return std::any_of(at_.begin(), at_.end(), [&](const at::Tensor* t) { return is(*t); });
  }

 private:
  c10::SmallVector<const at::Tensor*, 4> at_;
  c10::SmallVector<at::Tensor, 4> moved_;
};

// The keys that a local tensor must not meet again below the handler.
inline const c10::DispatchKeySet kBelow = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;

// Neither modes nor graphs see what is done under it: questions to meta kernels.
inline const c10::DispatchKeySet kAside = kBelow | kStandIns | c10::DispatchKeySet(c10::DispatchKey::PythonTLSSnapshot);

// A local tensor of an argument in another layout. Failures name the op.
at::Tensor move_for(const Op& op, const Ref& ref, const char* why, const at::Tensor& local, const Layout& from, const Layout& to);
const char* why_moved(const Op& op); // an operand
inline constexpr const char* kWrittenBack = "it was written under another layout";

// Raises, on all ranks, where operands that are to be as large as each other are not: whether a rank's own pieces fit says
// nothing about the others'.
void check_alike(const Op& op, const Refs& refs, const rules::Solution& solution);

// The local tensors in the layouts that the solution asks for, of operands that are checked.
void local_arguments(const Op& op, const Refs& refs, const rules::Solution& solution, Locals& locals);

// To be called when the op has run: copies of views look for writes to their base. A call that fails has written nothing.
void note_writes(const Op& op, const Refs& refs);

// What a kernel is told of its operands.
c10::SmallVector<rules::Run::At, 4> after_moves(const Refs& refs, const rules::Solution& solution);

// What was written under another layout than its owner's goes back to the owner.
void carry_back(const Op& op, const Refs& refs, const rules::Solution& solution, const Locals& locals);

// This rank's sizes of the result that a size argument lists.
Sizes local_size_argument(const rules::Solution& solution, const rules::SizeArg& a, const Refs& refs);

} // namespace shardtensor
