// How a call uses each mesh dim, and what operands and results are placed as then.
#pragma once

#include "rules/rule.h"

namespace shardtensor::rules {

// How one mesh dim is used by the op.
struct Choice {
  enum class Kind : uint8_t { Shard, Partial, Replicate };
  Kind kind = Kind::Replicate;
  int64_t factor = kNone; // Shard
  int64_t donor = -1;     // Shard: the operand whose cut the others follow
  int64_t donor_dim = -1;
  int32_t split_factor = 1;
  const Linear* group = nullptr; // Partial
  Placement partial;             // Partial
};

// The dim that carries the factor, or -1.
int64_t dim_of(const Dims& dims, int64_t factor);

// What has been decided so far, for the first mesh dims.
struct Choices {
  Choices(const Call& call_, const Rule& rule_) : call(call_), rule(rule_) {}

  const Call& call;
  const Rule& rule;
  c10::SmallVector<Choice, 3> made;
  c10::SmallVector<Cut, 3> cuts; // in units of the factor: null is even in those units

  // What operand i would be placed as along mesh dim m.
  Placement placement_of(size_t i, const Choice& c) const;
  Placement placement_of(const Result& r, int64_t m) const;
  // What a result that lacks the sharded factor holds.
  Placement summands(int64_t factor, const std::optional<std::optional<ReduceOp>>& override_) const;
};

// How mesh dim m is best used, after those before it. `summands_pass`: through ops that are linear in them. Bytes are compared
// where no choice is free; then `weighed` is set.
Choice choose(const Choices& so_far, int64_t m, bool summands_pass, bool& weighed);

} // namespace shardtensor::rules
