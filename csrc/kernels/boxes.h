// Copies of many boxes of a tensor at once: into and out of the flat buffers that travel between ranks.
#pragma once

#include "layout/layout.h"

#include <ATen/core/Tensor.h>

namespace shardtensor::kernels {

// Computes a lazy conjugate or negative, since only bytes are copied and sent.
inline at::Tensor resolved(const at::Tensor& t) {
  return t.is_conj() || t.is_neg() ? t.resolve_conj().resolve_neg() : t;
}

// Boxes are in the indices of the given tensor. Any strides work; a source may be expanded, a target may not. If dtypes differ,
// values are cast. One launch on the current stream, without synchronization; also in a CUDA graph.

// In a flat buffer, the boxes of each part start at a multiple of `elements`; `parts`: the elements of each part. Without parts
// there are no gaps. Not in a graph.
struct Spacing {
  c10::IntArrayRef parts = {};
  int64_t elements = 1;
};
// The length of a flat buffer with these parts, and its parts.
int64_t length_of(const Spacing& spacing);
std::vector<at::Tensor> parts_of(const at::Tensor& flat, const Spacing& spacing);

// flat: 1-d, contiguous; the boxes one after the other, each in row-major order.
void pack(const at::Tensor& source, c10::ArrayRef<Box> boxes, at::Tensor& flat, const Spacing& spacing = {});
void unpack(const at::Tensor& flat, c10::ArrayRef<Box> boxes, at::Tensor& target, const Spacing& spacing = {});
// Pairs of equal sizes; source and target share no memory.
void copy(const at::Tensor& source, c10::ArrayRef<Box> from, at::Tensor& target, c10::ArrayRef<Box> to);
// flat: `parts` times the boxes as pack() writes them. They are combined in order, 0 first, so the result is deterministic.
// Half types accumulate in float; min and max propagate NaN; Sum of bool is `or`, Avg of integers truncates, Norm is Sum.
void unpack_reduce(const at::Tensor& flat, int64_t parts, c10::ArrayRef<Box> boxes, ReduceOp op, at::Tensor& target);

struct BoxCopies;

// The CPU and CUDA twins. Both tensors are on one device; no tensor and no box is empty; there are no conj or neg bits.
// for_cuda(): whether a tensor needs the CUDA twin.
bool for_cuda(const at::Tensor& t);
namespace cpu {
void move(const BoxCopies& moves, const at::Tensor& from, at::Tensor& to);
void reduce(const BoxCopies& moves, const at::Tensor& from, int64_t parts, ReduceOp op, at::Tensor& to);
} // namespace cpu
namespace cuda {
void move(const BoxCopies& moves, const at::Tensor& from, at::Tensor& to);
void reduce(const BoxCopies& moves, const at::Tensor& from, int64_t parts, ReduceOp op, at::Tensor& to);
} // namespace cuda

} // namespace shardtensor::kernels
