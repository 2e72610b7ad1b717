#include "redistribute/metadata_check.h"

#include "comm/consensus.h"
#include "comm/counts.h"
#include "comm/group_generation.h"

#include <mutex>
#include <sstream>
#include <unordered_set>

namespace shardtensor {

namespace {

// A hash of the properties of a move that do not depend on the tensor's sizes. (Threads that act as several ranks share this
// memory.)
size_t kind_of(const Layout& from, const Layout& to, size_t ndim, c10::ScalarType dtype) {
  const auto& mesh = from.mesh().description();
  std::ostringstream out;
  out << comm::group_generation() << mesh.rank << mesh.world << c10::IntArrayRef(mesh.ranks)
      << c10::ArrayRef<std::string>(mesh.groups) << ndim << dtype;
  for (int64_t m = 0; m < from.ndim(); ++m) {
    out << from.placement(m).str() << to.placement(m).str();
  }
  return std::hash<std::string>()(out.str());
}

bool is_first(size_t kind) {
  static auto* mutex = new std::mutex();
  static auto* seen = new std::unordered_set<size_t>();
  const std::lock_guard<std::mutex> lock(*mutex);
  return seen->insert(kind).second;
}

} // namespace

void check_metadata(const Layout& from, const Layout& to, c10::IntArrayRef sizes, c10::ScalarType dtype) {
  uint64_t over = 0;
  for (int64_t m = 0; m < from.ndim(); ++m) {
    const bool changes = from.placement(m) != to.placement(m) || !same_cut(from.cut(m), to.cut(m));
    over |= static_cast<uint64_t>(changes && !comm::is_alone(from.mesh(), m)) << m;
  }
  if (!over || !is_first(kind_of(from, to, sizes.size(), dtype))) {
    return;
  }
  const comm::UncountedGuard aside;
  const auto differ = comm::differences(c10::str(dtype, " ", sizes, " ", from.str(), " to ", to.str()), from.mesh(), over);
  TORCH_CHECK_VALUE(
      differ.empty(), "redistribute: the ranks disagree about the tensor:", differ,
      "\nIf it comes from from_local of pieces of different sizes, pass sharding_shapes=\"infer\" there (the ranks then tell "
      "each other), the sizes along the cut dim (sharding_shapes={0: [2, 3]}), or run_check=True.");
}

} // namespace shardtensor
