// The ranks a tensor lives on, seen from one of them. Plain data, interned: equal meshes are one object.
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

namespace shardtensor {

using Coordinate = c10::SmallVector<int64_t, 4>;

class Mesh;
using MeshPtr = c10::intrusive_ptr<const Mesh>;

class Mesh final : public c10::intrusive_ptr_target {
 public:
  struct Description {
    std::string device_type;
    std::vector<int64_t> shape;
    std::vector<int64_t> ranks;         // row-major over shape
    std::vector<std::string> dim_names; // empty: unnamed
    std::vector<std::string> groups;    // a process group's name per mesh dim; empty if this rank has none
    int64_t rank = 0;                   // this process's global rank; threads that act as several ranks have a mesh each
    std::string world;                  // the name of the default group, which holds all ranks; empty if there is none
    // Per mesh dim, each coordinate's rank in the group; empty if it equals the coordinate. (torch's groups sort their ranks.)
    std::vector<std::vector<int64_t>> group_ranks;

    bool operator==(const Description& o) const {
      return device_type == o.device_type && shape == o.shape && ranks == o.ranks && dim_names == o.dim_names &&
             groups == o.groups && rank == o.rank && world == o.world && group_ranks == o.group_ranks;
    }
  };

  static MeshPtr make(Description description);
  // The most recent mesh alive whose process groups, one per mesh dim, have these names; null if there is none.
  static MeshPtr with_groups(const std::vector<std::string>& groups);
  // How many meshes exist.
  static size_t count();
  // The hash of the description; equal meshes have the same one in every process that runs this build.
  size_t hash() const {
    return hash_;
  }

  Mesh(Description description, size_t hash, int64_t id);

  int64_t ndim() const {
    return static_cast<int64_t>(d_.shape.size());
  }
  int64_t size(int64_t dim) const {
    return d_.shape[dim];
  }
  int64_t size() const {
    return static_cast<int64_t>(d_.ranks.size());
  }
  int64_t rank() const {
    return d_.rank;
  }
  int64_t rank_at(c10::ArrayRef<int64_t> coordinate) const {
    return d_.ranks[index_of(coordinate)];
  }
  int64_t index_of(c10::ArrayRef<int64_t> coordinate) const;
  Coordinate coordinate_at(int64_t index) const;
  // The index of a global rank among the mesh's ranks, or -1.
  int64_t index_of_rank(int64_t rank) const {
    return rank >= 0 && rank < static_cast<int64_t>(places_.size()) ? places_[rank] : -1;
  }
  // Whether the mesh contains this rank.
  bool has_this_rank() const {
    return mine_;
  }
  // This rank's coordinate; all zeros if the mesh does not hold this rank.
  const Coordinate& coordinate() const {
    return coordinate_;
  }
  const Description& description() const {
    return d_;
  }
  const std::string& group(int64_t dim) const {
    return d_.groups[dim];
  }
  // Whether the group's ranks are in another order than the coordinates along mesh dim `dim`.
  bool is_reordered(int64_t dim) const {
    return !d_.group_ranks.empty() && !d_.group_ranks[dim].empty();
  }
  int64_t group_rank(int64_t dim, int64_t coordinate) const {
    return is_reordered(dim) ? d_.group_ranks[dim][coordinate] : coordinate;
  }
  // Distinct for each mesh ever made; a key for caches.
  int64_t id() const {
    return id_;
  }
  std::string str() const;

  // A tally of the pieces that from_local() assumed to have the same sizes on all ranks along mesh dim `dim`: their number in
  // the low 16 bits, a sum over their sizes in the others. Ranks with the same number must have the same sum; comm/ compares
  // them.
  uint64_t equal_pieces(int64_t dim) const {
    return equal_pieces_[dim].load(std::memory_order_relaxed);
  }
  void note_equal_piece(int64_t dim, c10::ArrayRef<int64_t> sizes) const;

  void release_resources() override; // only for intrusive_ptr, after the last reference is gone

 private:
  Description d_;
  size_t hash_;
  int64_t id_;
  bool mine_ = false;
  Coordinate coordinate_;
  std::vector<int32_t> places_; // by global rank
  std::unique_ptr<std::atomic<uint64_t>[]> equal_pieces_;
};

} // namespace shardtensor
