// Ops in which each result along a dim is a weighted sum of a run of elements, for any ratio of the sizes: resampling with
// aligned corners, antialiased or by any factor, adaptive average pooling. torch's kernels compute the positions from the
// sizes, so they would be wrong on a piece. Here torch's op is run on unit vectors to find the weights of the whole; the pieces
// are then added up with these weights.
#pragma once

#include "rules/windows.h"

namespace shardtensor::rules {

// The kernel data of rules whose space is cut. The windows' reaches say what a result reads of the input.
struct SeparableFilter : Windows {
  // Calls the forward op on `input`, with results of the sizes `out` along the dims of space; along dim `along` the positions
  // are those of the call.
  at::Tensor (*op)(const KernelRun& run, const at::Tensor& input, c10::IntArrayRef out, int64_t along) = nullptr;
  // For backwards that scatter each gradient to one element (nearest): gradients per element along dim `along`, in order. Null:
  // the forward op's weights are used.
  at::Tensor (*counts)(const KernelRun& run, const SeparableFilter& filter, int64_t along, const at::TensorOptions& options) =
      nullptr;
};

// Adds the windows, sizes and kernel to a rule of planes(). `sizes`: as read_through() takes them.
void add_separable_filter(Rule& rule, SymSizes sizes, SeparableFilter filter);

// The op itself, or its forward op if it is a backward.
c10::OperatorHandle forward_op(const KernelRun& run);

} // namespace shardtensor::rules
