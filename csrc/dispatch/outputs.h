// Makes ShardTensors of the op's local results: finds their global sizes and strides, and the tensors that they are views of.
#pragma once

#include "dispatch/refs.h"
#include "rules/solution.h"
#include "tensor/symbolic.h"

namespace shardtensor {

// A view's strides and offset in its base's memory. There is no such memory, but autograd uses these numbers.
template <typename In>
struct ViewFormIn {
  typename In::List strides;
  decltype(In::offset(at::Tensor())) offset;
};
using ViewForm = ViewFormIn<Symbols>;

// Whether the op makes views whose form its rule does not give, so that forms_of() must find it on a meta tensor.
inline bool needs_forms(const Op& op, const rules::Solution& solution, const Refs& refs) {
  return (op.is_view || op.reshapes_self) && refs[0].impl && !solution.geometry;
}

// The forms of the op's views, found by running the op on a meta tensor with the base's strides: for rules that give none.
std::vector<ViewForm> forms_of(const Op& op, const at::Tensor& base, const torch::jit::Stack& stack, size_t at);

// A result's global sizes and strides. They depend only on facts that all ranks know: a piece may be a single row, whose
// strides say nothing.
Sizes global_sizes(const rules::Solution::ResultSpec& result, const Refs& refs, const at::Tensor& local);
Sizes strides_of(const rules::Solution::ResultSpec& result, const Refs& refs, c10::IntArrayRef sizes);

// The op's nth result as a ShardTensor.
at::Tensor wrap_result(
    const Op& op,
    at::Tensor local,
    const rules::Solution& solution,
    size_t nth,
    const Refs& refs,
    const ViewForm* form = nullptr);

} // namespace shardtensor
