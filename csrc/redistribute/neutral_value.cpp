#include "redistribute/neutral_value.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <limits>

namespace shardtensor {

namespace {

template <typename T>
at::Scalar bound(bool highest) {
  return at::Scalar(highest ? std::numeric_limits<T>::max() : std::numeric_limits<T>::lowest());
}

// The highest or lowest value of the dtype.
at::Scalar extreme(at::ScalarType type, bool highest) {
  switch (type) {
    case at::kBool:
      return at::Scalar(highest);
    case at::kByte:
      return bound<uint8_t>(highest);
    case at::kChar:
      return bound<int8_t>(highest);
    case at::kShort:
      return bound<int16_t>(highest);
    case at::kInt:
      return bound<int32_t>(highest);
    case at::kLong:
      return bound<int64_t>(highest);
    case at::kUInt16:
      return bound<uint16_t>(highest);
    case at::kUInt32:
      return bound<uint32_t>(highest);
    case at::kUInt64:
      return bound<uint64_t>(highest);
    case at::kFloat8_e4m3fn: // the eight-bit floats without infinity
      return at::Scalar(highest ? 448.0 : -448.0);
    case at::kFloat8_e4m3fnuz:
      return at::Scalar(highest ? 240.0 : -240.0);
    case at::kFloat8_e5m2fnuz:
      return at::Scalar(highest ? 57344.0 : -57344.0);
    default:
      return at::Scalar(highest ? std::numeric_limits<double>::infinity() : -std::numeric_limits<double>::infinity());
  }
}

} // namespace

at::Scalar neutral_value(ReduceOp op, at::ScalarType type, double norm_order) {
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Bor:
    case ReduceOp::Bxor:
      return at::Scalar(0);
    case ReduceOp::Product:
      return at::Scalar(1);
    case ReduceOp::Min:
      return extreme(type, true);
    case ReduceOp::Max:
      return extreme(type, false);
    case ReduceOp::Band: // all bits
      return type == at::kBool ? at::Scalar(true) : c10::isSignedType(type) ? at::Scalar(-1) : extreme(type, true);
    case ReduceOp::Norm:
      return norm_order < 0 ? at::Scalar(std::numeric_limits<double>::infinity()) : at::Scalar(0);
    case ReduceOp::Avg:
      break;
  }
  TORCH_INTERNAL_ASSERT(false, name_of(op), " has no identity");
}

at::Scalar neutral_summand(ReduceOp op, at::ScalarType type, double norm_order) {
  if (op != ReduceOp::Sum || c10::isFloat8Type(type)) {
    return neutral_value(op, type, norm_order);
  }
  return c10::isComplexType(type)    ? at::Scalar(c10::complex<double>(-0.0, -0.0))
         : c10::isFloatingType(type) ? at::Scalar(-0.0)
                                     : at::Scalar(0);
}

// Half precision is widened: a norm may fit although its square does not.
at::Tensor norm_power(const at::Tensor& t, double order) {
  const bool half = t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16;
  const auto x = (half ? t.to(at::kFloat) : t).contiguous();
  return order == 2.0 ? x * x : at::pow(at::abs(x), order);
}
at::Tensor norm_root(const at::Tensor& sum, double order, at::ScalarType type) {
  return (order == 2.0 ? at::sqrt(sum) : at::pow(sum, 1.0 / order)).to(type);
}

} // namespace shardtensor
