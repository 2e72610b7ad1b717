// From the op's local results to ShardTensors: their sizes, their strides, and what they are views of.
#pragma once

#include "dispatch/refs.h"
#include "rules/resolve.h"

namespace shardtensor {

// How a view lies in its base's memory, which is imaginary, but autograd goes by it.
struct Form {
  Sizes strides;
  int64_t offset;
};

// Whether a view's rule leaves its form to be found on a meta tensor.
inline bool needs_forms(const Op& op, const rules::Solution& solution, const Refs& refs) {
  return (op.is_view || op.reshapes_self) && refs[0].impl && !solution.geometry;
}

// Its views' forms, by running the op on a meta tensor that lies as the base does: for rules that do not say.
std::vector<Form> forms_of(const Op& op, const at::Tensor& base, const torch::jit::Stack& stack, size_t at);

// A result's sizes and strides as a whole. They depend only on what all ranks know: a piece may be a single row, whose strides
// say nothing.
Sizes global_sizes(const rules::Solution::Result& result, const Refs& refs, const at::Tensor& local);
Sizes strides_of(const rules::Solution::Result& result, const Refs& refs, c10::IntArrayRef sizes);

// The op's nth result as a ShardTensor.
at::Tensor wrap_result(
    const Op& op,
    at::Tensor local,
    const rules::Solution& solution,
    size_t nth,
    const Refs& refs,
    const Form* form = nullptr,
    const SymSizes* given = nullptr);

} // namespace shardtensor
