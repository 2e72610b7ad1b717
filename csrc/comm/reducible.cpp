#include "comm/reducible.h"

#include <ATen/ATen.h>

#include <limits>

namespace shardtensor::comm {

namespace {

bool by_order(const at::Tensor& t, ReduceOp op) {
  return (op == ReduceOp::Max || op == ReduceOp::Min) && t.is_floating_point();
}

// From the floats' bits to integers in the same order, and back: negative floats are reversed.
at::Tensor mirror(const at::Tensor& bits) {
  const int64_t all_but_sign =
      bits.scalar_type() == at::kLong ? std::numeric_limits<int64_t>::max() : std::numeric_limits<int32_t>::max();
  return at::where(bits.lt(0), bits.bitwise_xor(all_but_sign), bits);
}

// Backends lose NaN in max and min. So floats become integers in the same order, with NaN beyond every number: it wins, as in
// torch.
at::Tensor ordered(const at::Tensor& t, ReduceOp op) {
  const auto x = t.scalar_type() == at::kDouble ? t : t.to(at::kFloat);
  auto out = mirror(x.view(x.scalar_type() == at::kDouble ? at::kLong : at::kInt));
  const bool max = op == ReduceOp::Max;
  if (out.scalar_type() == at::kLong) {
    out.masked_fill_(x.isnan(), max ? std::numeric_limits<int64_t>::max() : std::numeric_limits<int64_t>::min());
  } else {
    out.masked_fill_(x.isnan(), max ? std::numeric_limits<int32_t>::max() : std::numeric_limits<int32_t>::min());
  }
  return out;
}

at::Tensor from_ordered(const at::Tensor& t) {
  return mirror(t).view(t.scalar_type() == at::kLong ? at::kDouble : at::kFloat);
}

// Backends have no unsigned dtypes of several bytes. They are sent as signed ones of the same bits; max and min order them
// alike if the first bit is flipped.
bool as_signed(at::ScalarType dtype) {
  return dtype == at::kUInt32 || dtype == at::kUInt64;
}
at::Tensor turned(const at::Tensor& signed_bits, ReduceOp op) {
  const bool is_long = signed_bits.scalar_type() == at::kLong;
  const int64_t first_bit = is_long ? std::numeric_limits<int64_t>::min() : std::numeric_limits<int32_t>::min();
  return op == ReduceOp::Max || op == ReduceOp::Min ? signed_bits.bitwise_xor(first_bit) : signed_bits;
}

} // namespace

bool can_reduce(at::ScalarType dtype, ReduceOp op) {
  return !c10::isComplexType(dtype) || op == ReduceOp::Sum || op == ReduceOp::Avg;
}

ReduceOp backend_op(ReduceOp op, at::ScalarType dtype) {
  const bool is_bool = dtype == at::kBool;
  switch (op) {
    case ReduceOp::Avg:
    case ReduceOp::Norm:
      return ReduceOp::Sum;
    case ReduceOp::Band:
      return is_bool ? ReduceOp::Min : op;
    case ReduceOp::Bor:
      return is_bool ? ReduceOp::Max : op;
    case ReduceOp::Bxor:
      return is_bool ? ReduceOp::Sum : op;
    default:
      return op;
  }
}

at::Tensor reducible(const at::Tensor& t, ReduceOp op) {
  if (by_order(t, op)) {
    return ordered(t, op);
  }
  if (op == ReduceOp::Avg && t.scalar_type() == at::kHalf) {
    return t.to(at::kFloat); // the sum may overflow the dtype although the mean fits
  }
  if (t.is_complex()) {
    TORCH_CHECK(
        can_reduce(t.scalar_type(), op), "shardtensor: a complex tensor can be reduced over ranks only by sum or avg, not by ",
        shardtensor::name_of(op));
    return at::view_as_real(t);
  }
  if (t.scalar_type() == at::kBool) {
    return t.to(op == ReduceOp::Sum ? at::kInt : at::kByte); // 256 ranks' sum of bytes may be 0
  }
  const auto dtype = t.scalar_type();
  if (dtype == at::kShort || dtype == at::kUInt16) {
    return t.to(at::kInt);
  }
  if (c10::isFloat8Type(dtype)) { // NCCL would add in 8 bits, and does not know all of these dtypes
    return t.to(at::kFloat);
  }
  if (as_signed(dtype)) {
    return turned(t.view(dtype == at::kUInt32 ? at::kInt : at::kLong), op);
  }
  return t;
}

at::Tensor from_reducible(at::Tensor reduced, const at::Tensor& t, ReduceOp op, int64_t n) {
  if (op == ReduceOp::Avg) {
    reduced.div_(n);
  }
  if (t.scalar_type() == at::kBool && op == ReduceOp::Bxor) {
    reduced = reduced.remainder(2);
  }
  if (by_order(t, op)) {
    reduced = from_ordered(reduced);
  } else if (t.is_complex()) {
    reduced = at::view_as_complex(reduced);
  } else if (as_signed(t.scalar_type())) {
    reduced = turned(reduced, op).view(t.scalar_type());
  }
  return reduced.scalar_type() == t.scalar_type() ? reduced : reduced.to(t.scalar_type());
}

} // namespace shardtensor::comm
