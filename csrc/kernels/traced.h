// Copies of boxes as ops of a graph: what boxes.h does, of tensors that have no values yet (comm/values.h).
#pragma once

#include "kernels/boxes.h"

namespace shardtensor::kernels::traced {

// A tensor and its boxes; `flat`: the boxes lie one after the other, whatever their offsets.
void move(
    const at::Tensor& from,
    c10::ArrayRef<Box> from_boxes,
    bool from_flat,
    const at::Tensor& to,
    c10::ArrayRef<Box> to_boxes,
    bool to_flat);
// The boxes one after the other, and a part of `source` without elements: what a rank sends depends on what it is sent of, even
// where it sends nothing.
at::Tensor packed(const at::Tensor& source, c10::ArrayRef<Box> boxes);
void reduce(const at::Tensor& flat, int64_t parts, c10::ArrayRef<Box> boxes, ReduceOp op, const at::Tensor& target);

} // namespace shardtensor::kernels::traced
