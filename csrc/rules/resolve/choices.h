// How a call uses each mesh dim, and the placements of operands and results that follow.
#pragma once

#include "rules/rule.h"

namespace shardtensor::rules {

// How one mesh dim is used by the op.
struct Choice {
  enum class Role : uint8_t { Shard, Partial, Replicate };
  Role role = Role::Replicate;
  int64_t factor = kNone; // Shard
  int64_t donor = -1;     // Shard: the operand whose cut the others follow
  int64_t donor_dim = -1;
  int32_t split_factor = 1;
  const LinearGroup* group = nullptr; // Partial
  Placement partial;                  // Partial
};

// The dim that carries the factor, or -1.
int64_t dim_of(const Dims& dims, int64_t factor);

// The choices so far, for the first mesh dims.
struct Choices {
  Choices(const Call& call_, const Rule& rule_) : call(call_), rule(rule_) {}

  const Call& call;
  const Rule& rule;
  c10::SmallVector<Choice, 3> made;
  c10::SmallVector<Cut, 3> cuts; // in units of the factor; null: even in those units

  // The placement of operand i along a mesh dim with choice `c`.
  Placement placement_of(size_t i, const Choice& c) const;
  Placement placement_of(const Result& r, const Choice& c) const;
  // The placement of a result that lacks the sharded factor.
  Placement summands(int64_t factor, const std::optional<std::optional<ReduceOp>>& override_) const;
};

} // namespace shardtensor::rules
