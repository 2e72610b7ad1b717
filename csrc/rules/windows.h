// Shared by windowed ops: convolutions, pooling, resampling, padding. If space is cut, operand 0 comes with a halo, and with
// cells of padding at the edges of the whole. run_windowed() runs torch's op on that; each family of ops supplies the arguments
// for that call.
#pragma once

#include "rules/solution.h"

#include <ATen/ATen.h>
#include <c10/util/FunctionRef.h>

#include <algorithm>

namespace shardtensor::rules {

// The number of dims of space in an op's name: 2 for avg_pool2d_backward. 0 if the name has none.
int64_t space_of(const c10::FunctionSchema& schema);

// Whether a tensor with the same number of dims as the first one is cut along its last `space` dims.
bool cut_in_space(const Call& call, int64_t space);

// The rule of ops on the last `space` dims: all operands and results share the dims before those, and factor d is dim d. Space
// stays whole. If it is cut, dims before it may be cut instead.
Rule planes(const Call& call, int64_t space);

// Dim d of operand 0 is read through windows, one for each of the `count` indices of the result's dim d. Their factor is d.
void read_through(Rule& rule, int64_t d, int64_t count, const Reach& reach);

// Whether a result of these sizes has no elements.
bool has_no_elements(c10::SymIntArrayRef sizes);

// A kernel's taps along one dim.
struct WindowSpec {
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
  // The run of indices that a result reads.
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

// Rules of ops that read the last dims of operand 0 through windows pass this to their kernels if those dims are cut.
struct Windows {
  // One dim of space.
  struct WindowedDim {
    int64_t size;         // of the dim that the windows lie in
    int64_t count;        // of windows
    Reach reach;          // what each window holds
    WindowSpec taps = {}; // if the op has a kernel
  };
  int64_t lead = 0; // dims before space
  std::vector<WindowedDim> space = {};
  // Operand 0 has one index per window, and the result has the indices inside the windows: gradients, transposed convolutions.
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
inline const Interval* cut_run(const KernelRun& run, int64_t factor) {
  const auto& runs = run.solution.runs;
  return factor < static_cast<int64_t>(runs.size()) && runs[factor] ? &*runs[factor] : nullptr;
}

// This rank's share of the work along one dim of space: all of it, if the dim is not cut.
struct WindowShare {
  bool cut;
  Interval makes;       // indices of the result
  PaddedInterval reads; // its indices of operand 0, with padding

  Interval read() const { // its cells
    return {reads.start(), reads.length()};
  }
};
WindowShare share_of(const KernelRun& run, const Windows& windows, int64_t i);

// Crops a tensor or pads it with zeros, from the cells that it has to the cells that are wanted.
class CropOrPad {
 public:
  void along(int64_t dim, const Interval& has, const Interval& wants);
  at::Tensor operator()(const at::Tensor& t) const;

 private:
  struct Sides {
    int64_t dim, before, after, length; // before, after: added; negative: cropped
  };
  std::vector<Sides> sides_;
};

// The cells of operand 0 that torch's op gets along a cut dim, and the indices of the first result that it makes of them.
struct NativeIntervals {
  Interval given, made;
};

// Runs torch's op on this rank's piece with its halo. For each cut dim of space, `each` gets the dim's number, writes the op's
// arguments for this rank's share (set_along()), and returns the cells that the op then reads and makes: the rest is cropped, or
// zeros are added. A rank that makes or reads nothing computes one window of zeros, so that the op raises the same errors as on
// other ranks. Its results are zeros, and it returns false.
// `call` runs in place of the op.
bool run_windowed(
    KernelRun& run,
    const Windows& windows,
    c10::function_ref<NativeIntervals(int64_t i, const WindowShare& share)> each,
    Kernel call = nullptr);

// Writes integer i of an argument that lists one per dim of space, or one for all. Does nothing if the op has no such argument.
void set_along(const KernelRun& run, const Windows& windows, const char* name, int64_t i, int64_t value);

// What an op of padded windows gets along a cut dim: no padding, since its cells are there.
NativeIntervals whole_windows(const KernelRun& run, const Windows& windows, int64_t i, const WindowShare& share);

// This rank's sizes of a result all of whose global sizes the rule gives.
SymSizes sizes_of_piece(const KernelRun& run, size_t nth = 0);

// The results of the op itself on its arguments, which stay on the stack.
std::vector<c10::IValue> results_of_op(const KernelRun& run);

// Whether messages may depend on values: not in a graph (see deferred_op.h), and not for tensors on the meta device.
bool may_ask_values(const at::Tensor& piece);

// Smallest piece, in bytes, for which a convolution overlaps computing with its halo (1 MiB; tests set less).
int64_t min_overlap_bytes();
void set_min_overlap_bytes(int64_t bytes);

// Item i of a list of integers that has one per dim of space, or one for all.
inline int64_t integer_at(c10::IntArrayRef list, int64_t i) {
  TORCH_CHECK(
      list.size() == 1 || i < static_cast<int64_t>(list.size()), "expected one integer, or one per dim of space, but got ", list);
  return list[list.size() == 1 ? 0 : i];
}

} // namespace shardtensor::rules
