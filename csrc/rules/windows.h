// What windowed ops share: convolutions, pooling, resampling, padding. Where space is cut, operand 0 comes with a halo, and at
// the edges of the whole with cells of padding. run_windowed() runs torch's op on that; a family says what its arguments are
// then.
#pragma once

#include "rules/solution.h"

#include <ATen/ATen.h>
#include <c10/util/FunctionRef.h>

#include <algorithm>

namespace shardtensor::rules {

// How many dims of space an op's name says: 2 of avg_pool2d_backward. 0: it says nothing.
int64_t space_of(const c10::FunctionSchema& schema);

// Whether a tensor with the same number of dims as the first one is cut along its last `space` dims.
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
  // The cells that the windows of a run of results hold, counted as indices: some lie in the padding.
  Interval cells(const Interval& results) const {
    return {results.start * stride - padding, results.length > 0 ? (results.length - 1) * stride + span() : 0};
  }
  // What a result reads.
  Reach reach(bool transposed = false) const {
    const Reach r{stride, 1, -padding, span() - 1 - padding};
    return transposed ? mirror(r, -1) : r;
  }
  // The results whose gradients an index of the input needs. Includes results that no index reaches: the bias needs their
  // gradients.
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

// Noted by rules of ops that read the last dims of operand 0 through windows, where these are cut.
struct Windows {
  // One dim of space.
  struct Along {
    int64_t size;   // of the dim that the windows lie in
    int64_t count;  // of windows
    Reach reach;    // what each window holds
    Taps taps = {}; // if the op has a kernel
  };
  int64_t lead = 0; // dims before space
  std::vector<Along> space = {};
  // Operand 0 has an index for each window, and the result has what the windows hold: gradients, transposed convolutions.
  bool reversed = false;
  // Argument 1, if it is a tensor, is the forward op's input. It is cut as the result is.
  bool backward = false;
  int64_t more_factors = 0; // dim d of space has factor d + more_factors

  int64_t ndim() const {
    return static_cast<int64_t>(space.size());
  }
};

// Operand 0 is read through these windows. `sizes`: those of the result along the dims before space. Factor d is dim d.
void read_through(Rule& rule, const Windows& windows, SymSizes sizes);

// This rank's indices of a factor that has a halo, or null.
inline const Interval* cut_run(const Run& run, int64_t factor) {
  const auto& runs = run.solution.runs;
  return factor < static_cast<int64_t>(runs.size()) && runs[factor] ? &*runs[factor] : nullptr;
}

// What this rank does along one dim of space: all of it, if the dim is not cut.
struct Share {
  bool cut;
  Interval makes; // indices of the result
  Stretch reads;  // what it has of operand 0

  Interval read() const { // its cells
    return {reads.start(), reads.length()};
  }
};
Share share_of(const Run& run, const Windows& windows, int64_t i);

// Brings tensors from the cells that they have to others: crops them, and adds zeros.
class Refit {
 public:
  void along(int64_t dim, const Interval& has, const Interval& wants);
  at::Tensor operator()(const at::Tensor& t) const;

 private:
  struct Sides {
    int64_t dim, before, after, length; // negative: what is cropped
  };
  std::vector<Sides> sides_;
};

// The cells of operand 0 that torch's op gets along a cut dim, and the indices of the first result that it makes of them.
struct Native {
  Interval given, made;
};

// Runs torch's op on this rank's piece with its halo. `each` gets the number of a cut dim of space, writes the op's arguments for
// what this rank does there (set_along()), and says what the op then gets and makes: the rest is cropped, or zeros are added.
// A rank that makes or reads nothing does one window's work on zeros, so that the op raises what it raises on other ranks. Its
// results are zeros, and it returns false.
// `call` runs in place of the op.
bool run_windowed(
    Run& run, const Windows& windows, c10::function_ref<Native(int64_t i, const Share& share)> each, Kernel call = nullptr);

// Writes integer i of an argument that lists one per dim of space, or one for all. Does nothing if the op has no such argument.
void set_along(const Run& run, const Windows& windows, const char* name, int64_t i, int64_t value);

// This rank's sizes of a result all of whose global sizes the rule gives.
SymSizes sizes_of_piece(const Run& run, size_t nth = 0);

// The results of the op itself on its arguments, which stay on the stack.
std::vector<c10::IValue> results_of_op(const Run& run);

// Whether messages may depend on values now: not in a graph (see later.h), and not for tensors on the meta device.
bool may_ask_values(const at::Tensor& piece);

// Smallest piece, in bytes, for which a convolution overlaps computing with its halo (1 MiB; tests set less).
int64_t second_call();
void set_second_call(int64_t bytes);

// Item i of a list of integers that has one per dim of space, or one for all.
inline int64_t integer_at(c10::IntArrayRef list, int64_t i) {
  TORCH_CHECK(
      list.size() == 1 || i < static_cast<int64_t>(list.size()), "expected one integer, or one per dim of space, but got ", list);
  return list[list.size() == 1 ? 0 : i];
}

} // namespace shardtensor::rules
