// Where the pieces of a tensor are: mesh + placements + cuts, immutable and interned. Computes every rank's intervals, local
// sizes and boxes without communication. Plain C++ over c10 containers.
#pragma once

#include "layout/mesh.h"
#include "layout/placement.h"

#include <c10/core/SymInt.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/accumulate.h>
#include <c10/util/generic_math.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace shardtensor {

// A half-open run [start, start + length) of indices along one tensor dim.
struct Interval {
  int64_t start;
  int64_t length;

  int64_t end() const {
    return start + length;
  }
  bool operator==(const Interval& o) const {
    return start == o.start && length == o.length;
  }
};
using Intervals = c10::SmallVector<Interval, 2>;

// The indices in both, of length 0 if there are none.
inline Interval intersection(const Interval& a, const Interval& b) {
  const auto start = std::max(a.start, b.start);
  return {start, std::max<int64_t>(std::min(a.end(), b.end()) - start, 0)};
}
inline int64_t length_of(c10::ArrayRef<Interval> runs) {
  int64_t n = 0;
  for (const auto& run : runs) {
    n += run.length;
  }
  return n;
}

struct Box {
  c10::SmallVector<int64_t, 5> offsets;
  c10::SmallVector<int64_t, 5> sizes;

  int64_t numel() const {
    return c10::multiply_integers(sizes);
  }
};
inline int64_t numel_of(c10::ArrayRef<Box> boxes) {
  int64_t n = 0;
  for (const auto& box : boxes) {
    n += box.numel();
  }
  return n;
}

using Sizes = c10::SmallVector<int64_t, 5>;

// The sizes of the pieces along one mesh dim. A null Cut is even: torch.chunk's rule, for any size. An explicit one has a size
// for each coordinate of the mesh dim, in one row for each coordinate of the earlier mesh dims that cut the same tensor dim. For
// a strided placement it has the sizes of the chunks.
struct PieceSizes : std::vector<int64_t> {
  using vector::vector;
  explicit PieceSizes(std::vector<int64_t> sizes) : vector(std::move(sizes)) {}

  // (up * extent + shift) / down, rounded down.
  struct Quotient {
    int64_t up = 0, shift = 0, down = 1;

    int64_t of(int64_t extent) const {
      return c10::div_floor_integer(up * extent + shift, down);
    }
    bool operator==(const Quotient& o) const {
      return up == o.up && shift == o.shift && down == o.down;
    }
  };
  // Set only in a graph with symbolic sizes, if the pieces' sizes are formulas of the extent. Piece i then has ((*this)[i] +
  // shares[i] * extent) / per indices, plus times[i * quotients.size() + k] times quotient k, for each k. There is one row.
  std::vector<int64_t> shares, times;
  int64_t per = 1;
  std::vector<Quotient> quotients;
  // Set only in a graph, if the sizes depend on more than the extent: the sizes, in one row. The numbers are 0 then. Of all
  // tensors only views have such a cut. A call may move its operands to one, but its results that are not views get even pieces.
  std::vector<c10::SymInt> symbols;

  bool follows() const {
    return !shares.empty() || !symbols.empty();
  }
  bool operator==(const PieceSizes& o) const {
    return static_cast<const std::vector<int64_t>&>(*this) == o && shares == o.shares && times == o.times && per == o.per &&
           quotients == o.quotients &&
           std::equal(symbols.begin(), symbols.end(), o.symbols.begin(), o.symbols.end(), [](const auto& a, const auto& b) {
             return a.is_same(b);
           });
  }
};
using Cut = std::shared_ptr<const PieceSizes>;
inline bool same_cut(const Cut& a, const Cut& b) {
  return a == b || (a && b && *a == *b);
}
using Cuts = c10::SmallVector<Cut, 2>;
using Placements = c10::SmallVector<Placement, 2>;

// torch.chunk's rule.
inline Interval chunk(int64_t size, int64_t pieces, int64_t index) {
  const int64_t full = (size + pieces - 1) / pieces;
  const int64_t start = std::min(size, full * index);
  return {start, std::min(full, size - start)};
}

class Layout;
using LayoutPtr = c10::intrusive_ptr<const Layout>;

class Layout final : public c10::intrusive_ptr_target {
 public:
  // Explicit cuts that equal torch.chunk's become even, so that equal layouts are one object. `cuts` may be empty: all even.
  static LayoutPtr make(MeshPtr mesh, Placements placements, Cuts cuts = {});
  static LayoutPtr replicated(const MeshPtr& mesh);
  // How many layouts exist.
  static size_t count();

  Layout(MeshPtr mesh, Placements placements, Cuts cuts, size_t hash, int64_t id);
  Layout(const Layout&) = delete;
  Layout& operator=(const Layout&) = delete;

  const Mesh& mesh() const {
    return *mesh_;
  }
  const MeshPtr& mesh_ptr() const {
    return mesh_;
  }
  const Placements& placements() const {
    return placements_;
  }
  const Placement& placement(int64_t mesh_dim) const {
    return placements_[mesh_dim];
  }
  const Cut& cut(int64_t mesh_dim) const {
    return cuts_[mesh_dim];
  }
  const Cuts& cuts() const {
    return cuts_;
  }
  int64_t ndim() const {
    return static_cast<int64_t>(placements_.size());
  }
  // Distinct for each layout ever made; a key for caches.
  int64_t id() const {
    return id_;
  }
  bool is_replicated() const {
    return !sharded_ && !partial_;
  }
  bool has_partial() const {
    return partial_;
  }
  bool is_sharded() const {
    return sharded_;
  }
  bool is_even() const {
    return even_;
  }
  // Whether some cut follows the sizes, see PieceSizes.
  bool follows_sizes() const {
    return follows_;
  }
  // Whether some cut's sizes are symbols, see PieceSizes.
  bool has_symbols() const {
    return symbols_;
  }
  // Bit d: some mesh dim cuts tensor dim d.
  uint64_t sharded_dims() const {
    return sharded_dims_;
  }
  bool shards(int64_t dim) const {
    return dim < 64 && (sharded_dims_ >> dim & 1);
  }
  // The last mesh dim that cuts tensor dim `dim`, or -1.
  int64_t innermost(int64_t dim) const;

  // The row of a mesh dim's cut that applies to the coordinate: a row has a size for each coordinate along the mesh dim.
  int64_t row_of(int64_t mesh_dim, c10::ArrayRef<int64_t> coordinate) const;
  // How many of the `size` indices of tensor dim `dim` are left for the coordinate after the mesh dims before `mesh_dim` have
  // cut it.
  int64_t extent_before(int64_t mesh_dim, int64_t dim, int64_t size, c10::ArrayRef<int64_t> coordinate) const;
  // The part of coordinate[mesh_dim] in the `extent` that the earlier mesh dims leave.
  Intervals split(int64_t mesh_dim, int64_t extent, c10::ArrayRef<int64_t> coordinate) const;
  int64_t split_size(int64_t mesh_dim, int64_t extent, c10::ArrayRef<int64_t> coordinate) const;
  // The same for a placement without a stride: one run.
  Interval piece(int64_t mesh_dim, int64_t extent, c10::ArrayRef<int64_t> coordinate) const;
  // The coordinates [first, last) along mesh_dim whose pieces of the `extent` may meet `run`; not for a stride. The time does
  // not grow with the mesh.
  std::pair<int64_t, int64_t> meeting(
      int64_t mesh_dim, int64_t extent, c10::ArrayRef<int64_t> coordinate, const Interval& run) const;

  // The global indices of a rank along tensor dim `dim`, in the order of its local tensor.
  Intervals intervals(int64_t dim, int64_t size, c10::ArrayRef<int64_t> coordinate) const;
  int64_t local_size(int64_t dim, int64_t size, c10::ArrayRef<int64_t> coordinate) const;
  // This rank's; the hot path.
  int64_t local_size(int64_t dim, int64_t size) const {
    return shards(dim) ? local_size(dim, size, mesh_->coordinate()) : size;
  }
  Sizes local_sizes(c10::ArrayRef<int64_t> sizes, c10::ArrayRef<int64_t> coordinate) const;
  // This rank's. A rank outside the mesh has an empty 1-d tensor, whatever the number of dims. If the tensor has no dims, it
  // has one number, as in torch.
  Sizes local_sizes(c10::ArrayRef<int64_t> sizes) const {
    if (C10_UNLIKELY(!mesh_->has_this_rank())) {
      return sizes.empty() ? Sizes{} : Sizes{0};
    }
    return local_sizes(sizes, mesh_->coordinate());
  }
  // The global sizes if every rank's piece has these: numbers or symbols.
  template <typename List>
  List sizes_of_equal_pieces(List sizes) const {
    for (int64_t m = 0; m < ndim(); ++m) {
      if (const auto& p = placements_[m]; p.is_shard()) {
        sizes[p.dim] = sizes[p.dim] * mesh_->size(m);
      }
    }
    return sizes;
  }
  std::vector<Box> boxes(c10::ArrayRef<int64_t> sizes, c10::ArrayRef<int64_t> coordinate) const;

  // The same layout with numbers where a cut depends on the sizes.
  LayoutPtr settled(c10::ArrayRef<int64_t> sizes) const;

  // Why a tensor of these sizes cannot have this layout; empty if it can.
  std::string misfit(c10::ArrayRef<int64_t> sizes) const;

  // The same layout with one mesh dim's placement replaced. Explicit cuts that nest in the changed one become even.
  LayoutPtr with(int64_t mesh_dim, Placement placement, Cut cut = nullptr) const;

  // The same with this placement on every mesh dim m for which is(m) holds.
  template <typename Is>
  LayoutPtr with_where(const Is& is, Placement placement) const {
    auto out = LayoutPtr::reclaim_copy(this);
    for (int64_t m = 0; m < ndim(); ++m) {
      out = is(m) ? out->with(m, placement) : out;
    }
    return out;
  }
  // Whether is(m) holds for some mesh dim m.
  template <typename Is>
  bool any_mesh_dim(const Is& is) const {
    for (int64_t m = 0; m < ndim(); ++m) {
      if (is(m)) {
        return true;
      }
    }
    return false;
  }
  // How many ranks there are along the mesh dims m for which is(m) holds.
  template <typename Is>
  int64_t ranks_where(const Is& is) const {
    int64_t ranks = 1;
    for (int64_t m = 0; m < ndim(); ++m) {
      ranks *= is(m) ? mesh_->size(m) : 1;
    }
    return ranks;
  }
  // Into how many pieces tensor dim `dim` is cut.
  int64_t pieces_of(int64_t dim) const {
    return ranks_where([&](int64_t m) { return placements_[m].is_shard(dim); });
  }

  // The same layout with Replicate where a mesh dim cuts one of the tensor dims `dims` (bits).
  LayoutPtr uncut(uint64_t dims) const;
  LayoutPtr whole_along(int64_t dim) const {
    return uncut(uint64_t{1} << dim);
  }

  // "R S(0)[5,3] on cpu mesh (2, 2)"
  std::string str() const;

  void release_resources() override; // only for intrusive_ptr, after the last reference is gone

 private:
  Interval piece_at(int64_t mesh_dim, int64_t extent, int64_t row, int64_t at) const;

  MeshPtr mesh_;
  Placements placements_;
  Cuts cuts_;
  c10::SmallVector<std::vector<int64_t>, 2> starts_; // of each size of the cuts, within its row
  size_t hash_;
  int64_t id_;
  bool partial_ = false;
  bool sharded_ = false;
  bool even_ = true;
  bool follows_ = false;
  bool symbols_ = false;
  uint64_t sharded_dims_ = 0;
};

} // namespace shardtensor
