// One call on ShardTensors, from its arguments to its wrapped results: what the boxed handler and the typed ones share.
// Uses rules/, redistribute/, tensor/. Used by handler.cpp, typed.cpp, lists.cpp, special.cpp, plain.cpp and autograd/.
#pragma once

#include "comm/values.h"
#include "dispatch/cache.h"
#include "dispatch/op.h"
#include "rules/resolve.h"
#include "tensor/shard_tensor.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/stack.h>

#include <algorithm>

namespace shardtensor {

// One tensor among the arguments, as it came. It owns nothing: taking a reference to a tensor that Python knows costs the GIL.
struct Ref {
  int16_t arg;
  int32_t index; // in its list, or -1
  const at::Tensor* tensor;
  ShardTensorImpl* impl; // null: plain

  Ref(size_t a, int64_t i, const at::Tensor& t)
      : arg(static_cast<int16_t>(a)), index(static_cast<int32_t>(i)), tensor(&t), impl(as_shard_tensor(t)) {}
};
using Refs = c10::SmallVector<Ref, 4>;

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

// That of the ShardTensors among the arguments: one.
const MeshPtr& mesh_of(const Op& op, const Refs& refs);

// The parts of a cache key.
void key_of(const Op& op, const Refs& refs, Key& key);
void add_sizes(const Refs& refs, Key& key);
void key_of(const c10::IValue& value, Key& key);

// A new solution from the op's rule, on boxed arguments.
rules::SolutionPtr solve(const Op& op, const torch::jit::Stack& stack, size_t base, const Refs& refs);

// The cached one for boxed arguments, or a new one. `refs` may be some of the tensors: one index of lists.
rules::SolutionPtr find_solution(const Op& op, const torch::jit::Stack& stack, size_t base, const Refs& refs);

// One that is cached for these very sizes, or null.
rules::SolutionPtr known_for_sizes(const Op& op, const torch::jit::Stack& stack, size_t base, const Refs& refs);

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

// How a view lies in its base's memory, which is imaginary, but autograd goes by it.
struct Form {
  Sizes strides;
  int64_t offset;
};

// Whether a view's rule leaves its form to be found on a meta tensor.
inline bool needs_forms(const Op& op, const rules::Solution& solution, const Refs& refs) {
  return (op.is_view || op.reshapes_self) && refs[0].impl && !solution.geometry;
}

at::Tensor wrap_result(
    const Op& op,
    at::Tensor local,
    const rules::Solution& solution,
    size_t nth,
    const Refs& refs,
    const Form* form = nullptr,
    const SymSizes* given = nullptr);

// Every tensor among boxed arguments. The references point into the stack.
Refs collect(const Op& op, torch::jit::Stack& stack, size_t base);

// Puts a copy of `list`, a list of tensors or of optional ones, changed by `change`, into the slot.
template <typename Change>
void change_list(c10::IValue& slot, const c10::IValue& list, const Change& change) {
  const auto put = [&](auto copy) {
    change(copy);
    slot = std::move(copy);
  };
  if (list.isTensorList()) {
    put(list.toTensorList().copy());
  } else {
    put(c10::impl::toTypedList<std::optional<at::Tensor>>(list.toList()).copy());
  }
}

// Runs a whole call on boxed arguments, replacing them by the results. `sizes`: what the op's argument of sizes stands for, where
// that has symbols.
void handle(const Op& op, torch::jit::Stack* stack, const SymSizes* sizes = nullptr);

} // namespace shardtensor
