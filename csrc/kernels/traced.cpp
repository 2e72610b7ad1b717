#include "kernels/traced.h"

#include <ATen/ATen.h>

#include <utility>

namespace shardtensor::kernels::traced {

namespace {

at::Tensor part_of(const at::Tensor& t, const Box& box) {
  auto part = t;
  for (size_t d = 0; d < box.sizes.size(); ++d) {
    part = part.narrow(static_cast<int64_t>(d), box.offsets[d], box.sizes[d]);
  }
  return part;
}

// The next box of a flat buffer, with the box's sizes.
at::Tensor next_of(const at::Tensor& flat, int64_t& at, const Box& box) {
  const auto numel = box.numel();
  return flat.narrow(0, std::exchange(at, at + numel), numel).view(box.sizes);
}

at::Tensor combined(const at::Tensor& a, const at::Tensor& b, ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Avg:
    case ReduceOp::Norm:
      return a.scalar_type() == at::kBool ? at::logical_or(a, b) : at::add(a, b);
    case ReduceOp::Product:
      return at::mul(a, b);
    case ReduceOp::Min:
      return at::minimum(a, b);
    case ReduceOp::Max:
      return at::maximum(a, b);
    case ReduceOp::Band:
      return at::bitwise_and(a, b);
    case ReduceOp::Bor:
      return at::bitwise_or(a, b);
    case ReduceOp::Bxor:
      return at::bitwise_xor(a, b);
  }
  return a;
}

} // namespace

void move(
    const at::Tensor& from,
    c10::ArrayRef<Box> from_boxes,
    bool from_flat,
    const at::Tensor& to,
    c10::ArrayRef<Box> to_boxes,
    bool to_flat) {
  int64_t from_at = 0, to_at = 0;
  for (size_t i = 0; i < from_boxes.size(); ++i) {
    const auto source = from_flat ? next_of(from, from_at, from_boxes[i]) : part_of(from, from_boxes[i]);
    const auto target = to_flat ? next_of(to, to_at, to_boxes[i]) : part_of(to, to_boxes[i]);
    target.copy_(source);
  }
}

at::Tensor packed(const at::Tensor& source, c10::ArrayRef<Box> boxes) {
  std::vector<at::Tensor> parts{source.reshape({-1}).narrow(0, 0, 0)};
  for (const auto& box : boxes) {
    parts.push_back(part_of(source, box).reshape({-1}));
  }
  return at::cat(parts, 0);
}

void reduce(const at::Tensor& flat, int64_t parts, c10::ArrayRef<Box> boxes, ReduceOp op, const at::Tensor& target) {
  const auto type = target.scalar_type();
  const bool widened = type == at::kHalf || type == at::kBFloat16;
  const auto numel = numel_of(boxes);
  const auto summands = flat.narrow(0, 0, parts * numel).view({parts, numel}).unbind(0);
  auto sum = widened ? summands[0].to(at::kFloat) : summands[0];
  for (int64_t p = 1; p < parts; ++p) {
    sum = combined(sum, summands[p], op);
  }
  if (op == ReduceOp::Avg) {
    sum = at::div(sum, parts, c10::isIntegralType(type, true) ? std::optional<c10::string_view>("trunc") : std::nullopt);
  }
  move(sum, boxes, true, target, boxes, false);
}

} // namespace shardtensor::kernels::traced
