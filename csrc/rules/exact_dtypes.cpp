#include "rules/exact_dtypes.h"

#include <ATen/core/jit_type.h>

#include <algorithm>

namespace shardtensor::rules {

namespace {

bool is_integer(at::ScalarType t) {
  return c10::isIntegralType(t, true);
}

// Whether the cast keeps the order of numbers.
bool keeps_order(at::ScalarType from, at::ScalarType to) {
  if (c10::isComplexType(from) || c10::isComplexType(to)) {
    return false;
  }
  if (!is_integer(from) || !is_integer(to)) {
    return !is_integer(to);
  }
  const bool wider = c10::elementSize(to) > c10::elementSize(from) || from == at::kBool;
  return to != at::kBool && wider && (c10::isSignedType(to) || !c10::isSignedType(from));
}

// The reductions whose summands may be cast.
uint32_t before_cast(at::ScalarType from, at::ScalarType to) {
  uint32_t out = 0;
  for (const auto op : {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max}) {
    out |= exactly_linear(op, from, to) ? bit(op) : 0;
  }
  return out;
}

// The same for every operand that holds summands, and for the arguments into which the op casts its result. Empty: no value is
// cast. An operand without summands may be cast: it becomes a summand beside zeros.
std::optional<uint32_t> casts(const Call& call, const OperandSet& operands, at::ScalarType to) {
  std::optional<uint32_t> out;
  const auto add = [&](at::ScalarType from, at::ScalarType into) {
    if (from != into) {
      out = out.value_or(~kWrapping) & before_cast(from, into);
    }
  };
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    const auto& t = call.tensors[i];
    if (t.output) {
      add(to, t.dtype);
    } else if (operands.has(i) && t.layout->has_partial()) {
      add(t.dtype, to);
      if (t.mutated) {
        add(to, t.dtype);
      }
    }
  }
  return out;
}

// Whether an argument is a number with a fraction. A list of numbers counts as such.
bool has_fraction(const Call& call, size_t arg) {
  const auto kind = call.schema.arguments()[arg].type()->kind();
  if (kind == c10::TypeKind::ListType) {
    const auto& item = call.schema.arguments()[arg].type()->castRaw<c10::ListType>()->getElementType();
    return item->kind() == c10::TypeKind::NumberType;
  }
  if (kind != c10::TypeKind::NumberType || !call.has(static_cast<int64_t>(arg))) {
    return false;
  }
  const auto& value = call.arg(static_cast<int64_t>(arg));
  return value.isDouble() || value.isComplexDouble() || value.isSymFloat();
}

} // namespace

bool exactly_linear(ReduceOp op, at::ScalarType from, at::ScalarType to) {
  if (from == to) {
    return true;
  }
  if (c10::isFloat8Type(from) || c10::isFloat8Type(to)) {
    return false; // no backend reduces them
  }
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Avg:
      return !is_integer(from) && !is_integer(to);
    case ReduceOp::Min:
    case ReduceOp::Max:
      return keeps_order(from, to);
    case ReduceOp::Product:
    case ReduceOp::Band:
    case ReduceOp::Bor:
    case ReduceOp::Bxor:
    case ReduceOp::Norm:
      break;
  }
  return false;
}

// Within one category of numbers, tensors without dims do not count if there are tensors with dims.
at::ScalarType promoted(const Call& call, const OperandSet& operands) {
  std::optional<at::ScalarType> with_dims, without;
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    const auto& t = call.tensors[i];
    if (operands.has(i) && !t.output) {
      auto& so_far = t.dim() ? with_dims : without;
      so_far = so_far ? c10::promoteTypes(*so_far, t.dtype) : t.dtype;
    }
  }
  const auto category = [](at::ScalarType t) {
    return c10::isComplexType(t) ? 3 : c10::isFloatingType(t) ? 2 : c10::isIntegralType(t, false) ? 1 : 0;
  };
  auto out = with_dims ? *with_dims : without.value_or(at::kFloat);
  if (with_dims && without && category(*without) > category(*with_dims)) {
    out = c10::promoteTypes(*with_dims, *without);
  }
  for (size_t a = 0; a < call.schema.arguments().size() && is_integer(out); ++a) {
    out = has_fraction(call, a) ? at::kFloat : out;
  }
  return out;
}

at::ScalarType promoted(const Call& call) {
  return promoted(call, OperandSet::first(call.tensors.size()));
}

LinearGroup moves(const Call& call, OperandSet operands, at::ScalarType to) {
  const auto passing = casts(call, operands, to);
  LinearGroup out{std::move(operands)};
  out.any_reduction = !passing;
  out.moves = true;
  out.reductions = passing.value_or(out.reductions);
  return out;
}

LinearGroup computes(const Call& call, OperandSet operands, at::ScalarType to) {
  const auto passing = casts(call, operands, to);
  LinearGroup out{std::move(operands)};
  out.reductions = passing ? out.reductions & *passing : out.reductions | kWrapping;
  return out;
}

LinearGroup adds(const Call& call, OperandSet operands, at::ScalarType to) {
  auto out = computes(call, std::move(operands), to);
  out.adds = true;
  return out;
}

void without_infinities(const Call& call, Rule& rule) {
  const bool summands =
      std::any_of(call.tensors.begin(), call.tensors.end(), [](const auto& t) { return t.layout->has_partial(); });
  if (!rule.linear.empty() && summands && (call.kinds_of_numbers() & kInfinite)) {
    auto& groups = rule.linear;
    groups.erase(std::remove_if(groups.begin(), groups.end(), [](const auto& g) { return !g.moves; }), groups.end());
  }
}

bool adds_up(const LinearGroup& group, const Placement& summands, const Call& call) {
  if (group.any_reduction || summands.picked || (summands.reduce != ReduceOp::Sum && summands.reduce != ReduceOp::Avg)) {
    return true;
  }
  const bool integers = summands.reduce == ReduceOp::Sum && (group.reductions & kWrapping);
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    const auto& t = call.tensors[i];
    if (!group.operands.has(i) || t.output) {
      continue;
    }
    if (t.dtype == at::kBool || (!integers && t.layout->has_partial() && is_integer(t.dtype))) {
      return false;
    }
  }
  return true;
}

} // namespace shardtensor::rules
