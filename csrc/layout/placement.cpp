#include "layout/placement.h"

#include <c10/util/Exception.h>

#include <array>

namespace shardtensor {

namespace {
constexpr std::array<const char*, 9> kNames = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor", "norm"};
}

const char* name_of(ReduceOp op) {
  return kNames[static_cast<size_t>(op)];
}

ReduceOp reduce_op_from(const std::string& name) {
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (name == kNames[i]) {
      return static_cast<ReduceOp>(i);
    }
  }
  TORCH_CHECK_VALUE(false, "Partial: reduce_op '", name, "' is unknown; use sum, avg, product, min, max, band, bor or bxor");
}

std::string Placement::str() const {
  switch (kind) {
    case Kind::Replicate:
      return "R";
    case Kind::Shard:
      return split_factor == 1 ? "S(" + std::to_string(dim) + ")"
                               : "_S(" + std::to_string(dim) + ", " + std::to_string(split_factor) + ")";
    case Kind::Partial:
      return std::string("P(") + name_of(reduce) + ")";
  }
  return "?";
}

} // namespace shardtensor
