#include "rules/resolve/choices.h"

namespace shardtensor::rules {

int64_t dim_of(const Dims& dims, int64_t factor) {
  for (size_t d = 0; d < dims.size(); ++d) {
    if (dims[d].lies_along(factor)) {
      return static_cast<int64_t>(d);
    }
  }
  return -1;
}

Placement Choices::placement_of(size_t i, const Choice& c) const {
  const auto& operand = rule.operands[i];
  switch (c.role) {
    case Choice::Role::Shard: {
      const auto d = dim_of(operand.dims, c.factor);
      if (d >= 0) {
        return Placement::shard(d, c.split_factor);
      }
      return operand.summand || call.tensors[i].mutated ? summands(c.factor, operand.reduce) : Placement::replicate();
    }
    case Choice::Role::Partial:
      return c.group->operands.has(i) || call.tensors[i].output ? c.partial : Placement::replicate();
    case Choice::Role::Replicate:
      return Placement::replicate();
  }
  return {};
}

Placement Choices::summands(int64_t factor, const std::optional<std::optional<ReduceOp>>& override_) const {
  const auto& f = rule.factors[factor];
  const auto reduce = override_ ? *override_ : f.reduce;
  if (f.picked && reduce == f.reduce) {
    return Placement::partial_of_picked();
  }
  return reduce ? Placement::partial(*reduce, f.norm_order) : Placement::replicate();
}

Placement Choices::placement_of(const Result& r, const Choice& c) const {
  if (c.role != Choice::Role::Shard) {
    return c.role == Choice::Role::Partial ? c.partial : Placement::replicate();
  }
  const auto d = dim_of(r.dims, c.factor);
  if (d >= 0) {
    return Placement::shard(d, c.split_factor);
  }
  if (r.same_over >> c.factor & 1) {
    return Placement::replicate();
  }
  const auto out = summands(c.factor, r.reduce);
  TORCH_INTERNAL_ASSERT(
      out.is_partial() || r.reduce || rule.factors[c.factor].kernel || rule.always_kernel, "the rule of ", call.schema.name(),
      ": factor ", c.factor, " is sharded, a result lacks it, and nothing reduces it");
  return out;
}

} // namespace shardtensor::rules
