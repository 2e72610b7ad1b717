// What windowed ops share: convolutions, pooling, resampling. Where space is cut, the operand that is read through windows comes
// with a halo, and at the edges of the whole with cells of padding; the op needs no padding of its own along that dim.
#pragma once

#include "rules/solution.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace shardtensor::rules {

// Whether a tensor of as many dims as the first is cut along its last `space` dims.
bool cut_in_space(const Call& call, int64_t space);

// The rule of ops on the last `space` dims: all operands and results share the dims before those, and factor d is dim d. Space
// stays whole. If it is cut, dims before it may be cut instead.
Rule planes(const Call& call, int64_t space);

// Dim d of operand 0 is read through windows, one for each of the `count` indices of the result's dim d. Their factor is d.
void read_through(Rule& rule, int64_t d, int64_t count, const Reach& reach);

// Whether a result of these sizes has no elements.
bool makes_nothing(c10::SymIntArrayRef sizes);

// A kernel's taps along one dim.
struct Taps {
  int64_t count, stride, padding, dilation, output_padding = 0;

  int64_t span() const {
    return (count - 1) * dilation + 1;
  }
  int64_t results(int64_t size, bool transposed = false) const {
    return transposed ? (size - 1) * stride - 2 * padding + span() + output_padding
                      : floor_div(size + 2 * padding - span(), stride) + 1;
  }
  // What a result reads.
  Reach reach(bool transposed = false) const {
    const Reach r{stride, 1, -padding, span() - 1 - padding};
    return transposed ? mirror(r, -1) : r;
  }
  // Whose gradients an index of the input needs. Also those of results between or beyond what any index reaches: for the bias.
  Reach readers(bool transposed = false) const {
    if (transposed) {
      return {stride, 1, -padding, std::max(span() + output_padding, stride) - 1 - padding};
    }
    auto r = mirror(reach(), -1);
    const auto beyond = std::max<int64_t>(0, padding - span() + 1);
    r.first -= beyond * stride;
    r.last += beyond * stride;
    return r;
  }
};

// This rank's indices of a factor that has a halo, or null.
inline const Interval* cut_run(const Run& run, int64_t factor) {
  const auto& runs = run.solution.runs;
  return factor < static_cast<int64_t>(runs.size()) && runs[factor] ? &*runs[factor] : nullptr;
}

// This rank's sizes of a result all of whose global sizes the rule gives.
SymSizes sizes_of_piece(const Run& run, size_t nth = 0);

// Zeros in place of an operand, on a rank that makes nothing: it runs the op all the same, so that it raises what other ranks
// raise. `length` is what the op needs along each dim of space that is cut, to make one result; `first`: the factor of the first
// such dim.
template <typename F>
at::Tensor stand_in(const Run& run, size_t operand, int64_t lead, int64_t first, F length) {
  const auto t = run.arg(operand).toTensor(); // the first arguments are the first operands
  const auto whole = run.operands[operand].symbols;
  auto sizes = t.sym_sizes().vec();
  for (int64_t d = 0; d < t.dim(); ++d) {
    const bool cut = d >= lead && cut_run(run, first + d - lead);
    sizes[d] = cut ? c10::SymInt(length(d - lead)) : sizes[d] == 0 && whole[d] != 0 ? c10::SymInt(1) : sizes[d];
  }
  return t.new_zeros_symint(sizes);
}

// The results of the op itself on its arguments, which stay on the stack.
std::vector<c10::IValue> results_of_op(const Run& run);

// Whether values can decide what is sent now: not in a graph (see later.h), and not of tensors on the meta device.
bool may_ask_values(const at::Tensor& piece);

// What further small calls of a convolution cost, in bytes of its input: a rank with a piece of fewer bytes waits for the halo
// and calls torch once (1 MiB; tests set less).
int64_t second_call();
void set_second_call(int64_t bytes);

// A list of integers with one per dim of space, or one for all.
inline int64_t integer_at(c10::IntArrayRef list, int64_t i) {
  TORCH_CHECK(
      list.size() == 1 || i < static_cast<int64_t>(list.size()), "expected one integer, or one per dim of space, but got ", list);
  return list[list.size() == 1 ? 0 : i];
}

} // namespace shardtensor::rules
