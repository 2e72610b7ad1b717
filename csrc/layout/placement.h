// How one mesh dim treats a tensor: cut it, copy it, or hold summands of it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace shardtensor {

enum class ReduceOp : uint8_t { Sum, Avg, Product, Min, Max, Band, Bor, Bxor, Norm };

const char* name_of(ReduceOp op);
ReduceOp reduce_op_from(const std::string& name);

struct Placement {
  enum class Kind : uint8_t { Replicate, Shard, Partial };

  Kind kind = Kind::Replicate;
  ReduceOp reduce = ReduceOp::Sum;
  // Partial over Sum: at most one rank has a summand of each element, the others have the neutral value (a looked-up row). So
  // ops that move or cast values may run before the sum, exactly, for all values and dtypes; ops that compute with values may
  // not: 0 * inf.
  bool picked = false;
  int16_t dim = -1;
  // Shard: > 1 is torch's _StridedShard, which cuts each of `split_factor` chunks and takes one piece of every chunk.
  int32_t split_factor = 1;
  // Partial over Norm: the order p; the value is (sum |x|^p)^(1/p).
  double norm_order = 2.0;

  static Placement replicate() {
    return {};
  }
  static Placement shard(int64_t dim, int64_t split_factor = 1) {
    Placement p;
    p.kind = Kind::Shard;
    p.dim = static_cast<int16_t>(dim);
    p.split_factor = static_cast<int32_t>(split_factor);
    return p;
  }
  static Placement partial(ReduceOp op, double norm_order = 2.0) {
    Placement p;
    p.kind = Kind::Partial;
    p.reduce = op;
    p.norm_order = op == ReduceOp::Norm ? norm_order : 2.0;
    return p;
  }

  static Placement partial_of_picked() {
    auto p = partial(ReduceOp::Sum);
    p.picked = true;
    return p;
  }

  bool is_replicate() const {
    return kind == Kind::Replicate;
  }
  bool is_shard() const {
    return kind == Kind::Shard;
  }
  bool is_shard(int64_t d) const {
    return kind == Kind::Shard && dim == d;
  }
  bool is_partial() const {
    return kind == Kind::Partial;
  }
  // Whether its summands can be used as summands of `o` unchanged.
  bool serves_as(const Placement& o) const {
    auto p = *this;
    p.picked = p.picked && o.picked;
    return p == o;
  }
  // Whether a tensor may hold summands of both, along two mesh dims: the order of reduction must not matter.
  bool commutes_with(const Placement& o) const {
    const auto linear = [](const Placement& p) { return p.reduce == ReduceOp::Sum || p.reduce == ReduceOp::Avg; };
    return !is_partial() || !o.is_partial() || *this == o || (linear(*this) && linear(o));
  }
  bool operator==(const Placement& o) const {
    return kind == o.kind && reduce == o.reduce && picked == o.picked && dim == o.dim && split_factor == o.split_factor &&
           norm_order == o.norm_order;
  }
  bool operator!=(const Placement& o) const {
    return !(*this == o);
  }
  size_t hash() const {
    size_t h = static_cast<size_t>(kind) | static_cast<size_t>(picked) << 7 | static_cast<size_t>(reduce) << 8 |
               static_cast<size_t>(static_cast<uint16_t>(dim)) << 16 | static_cast<size_t>(split_factor) << 32;
    return h ^ (std::hash<double>()(norm_order) * 31);
  }
  std::string str() const;
};

} // namespace shardtensor
