// Copies of boxes as ops of a graph: boxes.h for tensors that have no values yet (comm/tensor_kind.h).
#pragma once

#include "layout/layout.h"

#include <ATen/core/Tensor.h>

namespace shardtensor::kernels::traced {

// Copies the boxes of `from` to the boxes of `to`. A flat side holds its boxes one after the other, whatever their offsets.
void move(
    const at::Tensor& from,
    c10::ArrayRef<Box> from_boxes,
    bool from_flat,
    const at::Tensor& to,
    c10::ArrayRef<Box> to_boxes,
    bool to_flat);
// The boxes one after the other, plus an empty part of `source`: so the message depends on `source` even if no box is sent.
at::Tensor packed(const at::Tensor& source, c10::ArrayRef<Box> boxes);
void reduce(const at::Tensor& flat, int64_t parts, c10::ArrayRef<Box> boxes, ReduceOp op, const at::Tensor& target);

} // namespace shardtensor::kernels::traced
