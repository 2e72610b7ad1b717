// Whether the dtypes allow summands to pass an op. Computing before the reduction must give the same as computing after it: a
// sum of integers that wraps must not be widened first, and a sum of bools is no sum of numbers. For floating-point numbers a
// sum is exact up to rounding.
#pragma once

#include "rules/rule.h"

namespace shardtensor::rules {

// In LinearGroup::reductions: sums of integers pass as well, because the op adds and multiplies in their own dtype. Without it,
// only a group that moves values lets them pass.
constexpr uint32_t kWrapping = uint32_t{1} << 31;

// Whether values of dtype `from` may be cast to `to` before they are reduced.
bool exactly_linear(ReduceOp op, at::ScalarType from, at::ScalarType to);

// The dtype to which torch promotes these operands, and the numbers among the arguments.
at::ScalarType promoted(const Call& call, const OperandSet& operands);
at::ScalarType promoted(const Call& call); // all that the op reads

// The op casts these operands to `to`, and then only moves values.
LinearGroup moves(const Call& call, OperandSet operands, at::ScalarType to);
// The op casts these operands to `to`, and is linear there in all of them together.
LinearGroup computes(const Call& call, OperandSet operands, at::ScalarType to);
// The same if the op only adds them up.
LinearGroup adds(const Call& call, OperandSet operands, at::ScalarType to);

// A summand that is zero, times infinity, is NaN. So an op with an infinite number takes no summands.
void without_infinities(const Call& call, Rule& rule);

// Whether the group's operands hold numbers whose sums the op keeps.
bool adds_up(const LinearGroup& group, const Placement& summands, const Call& call);

} // namespace shardtensor::rules
