// From a rule and the layouts at hand to what will be done: which layout every operand needs, which the results have. Pure
// functions of layouts and sizes, so that every rank finds the same.
#pragma once

#include "rules/rule.h"

namespace shardtensor::rules {

struct Solution final : c10::intrusive_ptr_target {
  // Per operand the layout it must have; null where the one it has will do.
  c10::SmallVector<LayoutPtr, 4> operands;
  bool moves = false;  // some operand is redistributed
  bool shards = false; // some factor is sharded, so the ranks' local tensors differ
  // Operands that the op writes under another layout than their own: the result is carried back.
  OperandSet write_back;

  // Where one dim of a result's global size comes from: an operand's dim, the local result (operand -1), or a constant (-2).
  struct SizeSource {
    int32_t operand = -1;
    int16_t dim = 0;
    int64_t value = 0;
  };
  struct Result {
    LayoutPtr layout;
    c10::SmallVector<SizeSource, 5> sizes; // empty: all from the local result
    Sizes strides;                         // empty: dense, in this order
    std::optional<Order> order;            // none, where no tensor was asked: as that of operand `like`
    int64_t like = -1;                     // -1: one after the other
    std::optional<Geometry> geometry;
  };
  c10::SmallVector<Result, 2> results;
  // For results past the listed ones, and where a rule lists none: whole tensors.
  LayoutPtr replicated;

  // Two dims that the op reads along one index: if they are not as large as each other (in units of `inner`), a rank with
  // small pieces might not notice.
  struct Indexed {
    int32_t operand;
    int16_t dim;
    int64_t inner;
  };
  c10::SmallVector<std::pair<Indexed, Indexed>, 2> alike;

  c10::SmallVector<uint64_t, 6> factor_mesh_dims;
  c10::SmallVector<SizeArg, 1> size_args;
  Kernel kernel = nullptr;
  OfPiece kernel_if = nullptr; // it runs where one of the local tensors is such
  PutBack put_back = nullptr;  // set where the kernel copies what it was to view
  std::any notes;              // the rule's
  bool geometry = false;       // every result has one
  // Reads' bits: what the rule has read of the call.
  uint64_t reads = 0;
  // The choice weighed bytes or read sizes, so it holds for these sizes only.
  bool sized = false;

  bool reads_sizes() const {
    return reads & Reads::kSizes;
  }
};
using SolutionPtr = c10::intrusive_ptr<const Solution>;

// What the rule has noted for its kernel.
template <typename T>
const T& noted(const Solution& solution) {
  const auto* found = std::any_cast<T>(&solution.notes);
  TORCH_INTERNAL_ASSERT(found, "the rule's notes have another type than its kernel reads");
  return *found;
}

c10::intrusive_ptr<Solution> resolve(const Call& call, const Rule& rule);

} // namespace shardtensor::rules
