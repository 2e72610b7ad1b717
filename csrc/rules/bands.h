// Ops that make each result along a dim a weighted sum of a run of elements, whatever the ratio of their sizes: resampling with
// aligned corners, antialiased or by any factor, adaptive average pooling. torch's kernels take the positions from the sizes, so
// on a piece they would be wrong. Here torch's op itself says what the whole's weights are; pieces are then added up with them.
#pragma once

#include "rules/windows.h"

namespace shardtensor::rules {

// Noted by rules whose space is cut. The windows' reaches say what a result reads of the input.
struct Bands : Windows {
  // Calls the forward op on `input`, with results of these sizes along the dims of space; those along dim `along` as in the call.
  at::Tensor (*op)(const Run& run, const at::Tensor& input, c10::IntArrayRef out, int64_t along) = nullptr;
  // For backwards that scatter each gradient to one element (nearest): gradients per element along dim `along`, in order. Null:
  // the forward op's weights are used.
  at::Tensor (*counts)(const Run& run, const Bands& bands, int64_t along, const at::TensorOptions& options) = nullptr;
};

// Adds the windows, sizes and kernel to a rule of planes(). `sizes`: as read_through() takes them.
void read_in_bands(Rule& rule, SymSizes sizes, Bands bands);

// The op itself, or the one whose gradient it is.
c10::OperatorHandle forward_op(const Run& run);

} // namespace shardtensor::rules
