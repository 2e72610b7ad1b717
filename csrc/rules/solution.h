// The solution of a rule for a call's layouts: the layout that every operand needs, the layouts of the results, and the facts
// that a kernel needs.
#pragma once

#include "comm/tensor_kind.h"
#include "redistribute/halo_exchange.h"
#include "redistribute/neutral_value.h"
#include "rules/rule.h"

namespace shardtensor::rules {

struct Solution final : c10::intrusive_ptr_target {
  // Per operand, the layout that it must have; null if it may stay as it is.
  c10::SmallVector<LayoutPtr, 4> operands;
  bool moves = false;  // some operand is redistributed
  bool shards = false; // some factor is sharded, so the ranks' local tensors differ
  // Operands that are read with halos: the boxes that ranks read, given the layout in `operands` (never null for them).
  struct Halo {
    size_t operand;
    HaloExchange fetch;
    ReduceOp padding; // of its cells beyond the edges: Operand::padding
    bool awaited;     // Operand::awaited
    LayoutPtr recut;  // the layout to which the pieces are recut in the same messages; null if they stay

    // Whether the op's kernel fetches it, while it works on the piece. In graphs the piece is joined with it before.
    bool awaits(const at::Tensor& piece) const {
      return awaited && !is_traced(piece);
    }
    // The piece with its halo. Every rank of the mesh calls it.
    at::Tensor joined(const at::Tensor& piece, c10::IntArrayRef strides) const {
      return fetch(piece, strides, neutral_value(padding, piece.scalar_type()));
    }
  };
  std::vector<Halo> halos;
  const Halo* halo(size_t operand) const {
    const auto it = std::find_if(halos.begin(), halos.end(), [&](const Halo& h) { return h.operand == operand; });
    return it == halos.end() ? nullptr : &*it;
  }
  // This rank's indices of each factor that has a halo; for other factors nothing.
  c10::SmallVector<std::optional<Interval>, 6> runs;
  // Operands that the op writes under another layout than their own: the result is carried back.
  OperandSet write_back;

  // The source of one dim of a result's global size: an operand's dim, the local result (operand -1), or a constant (-2).
  struct SizeSource {
    int32_t operand = -1;
    int16_t dim = 0;
    c10::SymInt value = 0;
  };
  struct ResultSpec {
    LayoutPtr layout;
    c10::SmallVector<SizeSource, 5> sizes; // empty: all from the local result
    SymSizes strides;                      // empty: dense, in this order
    std::optional<DimOrder> order;         // none if torch was not asked: then the order of operand `like`
    int64_t like = -1;                     // -1: contiguous
    std::optional<Geometry> geometry;
  };
  c10::SmallVector<ResultSpec, 2> results;
  // The layout of results that the rule does not list: whole tensors.
  LayoutPtr replicated;

  // A pair of dims that share an index. Their sizes (in units of `inner`) must match; if they do not, a rank with small pieces
  // might not notice.
  struct MatchedDim {
    int32_t operand;
    int16_t dim;
    c10::SymInt inner;
  };
  c10::SmallVector<std::pair<MatchedDim, MatchedDim>, 2> must_match;

  c10::SmallVector<uint64_t, 6> factor_mesh_dims;
  int16_t sizes_arg = kNone; // Rule::sizes_arg
  Kernel kernel = nullptr;
  PiecePredicate kernel_if = nullptr; // the kernel runs only if this holds for a local tensor
  PutBackFn put_back = nullptr;       // set if the kernel of a view copies
  std::any kernel_data;               // Rule::kernel_data
  bool geometry = false;              // every result has one
  // What the rule has read of the call, as the bits of Reads.
  uint64_t reads = 0;
  // The choice compared bytes or read sizes, so it holds for these sizes only.
  bool sized = false;
};
using SolutionPtr = c10::intrusive_ptr<const Solution>;

// The rule's data for its kernel.
template <typename T>
const T& kernel_data(const Solution& solution) {
  const auto* found = std::any_cast<T>(&solution.kernel_data);
  TORCH_INTERNAL_ASSERT(found, "the rule's data for its kernel has another type than the kernel reads");
  return *found;
}

} // namespace shardtensor::rules
