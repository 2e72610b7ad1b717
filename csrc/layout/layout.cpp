#include "layout/layout.h"

#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <sstream>
#include <unordered_map>

namespace shardtensor {

namespace {

// Keeps no layout alive. release_resources() removes a layout after its last reference is gone. Until then the table's weak
// pointer keeps the layout's memory, so no thread deletes a layout while it holds the lock.
struct LayoutTable {
  std::mutex mutex;
  std::unordered_multimap<size_t, c10::weak_intrusive_ptr<const Layout>> layouts;
  std::atomic<int64_t> next_id{1};
};

LayoutTable& table() {
  static LayoutTable* t = new LayoutTable();
  return *t;
}

size_t hash_of(const Mesh& mesh, const Placements& placements, const Cuts& cuts) {
  size_t h = static_cast<size_t>(mesh.id()) * 0x9e3779b97f4a7c15ULL;
  for (const auto& p : placements) {
    h = c10::hash_combine(h, p.hash());
  }
  for (const auto& cut : cuts) {
    if (cut) {
      for (const auto* list : {static_cast<const std::vector<int64_t>*>(cut.get()), &cut->shares, &cut->times}) {
        for (auto s : *list) {
          h = c10::hash_combine(h, static_cast<size_t>(s));
        }
      }
    }
    h = c10::hash_combine(h, cut != nullptr);
  }
  return h;
}

bool same(const Cuts& a, const Cuts& b) {
  return std::equal(
      a.begin(), a.end(), b.begin(), b.end(), [](const Cut& x, const Cut& y) { return x == y || (x && y && *x == *y); });
}

// torch.chunk's pieces of a size: the last takes the remaining indices.
bool chunks_follow(const PieceSizes& sizes, int64_t pieces) {
  PieceSizes any(std::vector<int64_t>(pieces, 0));
  any.shares.resize(pieces, 0);
  any.times.resize(pieces, 1);
  any.shares.back() = 1;
  any.times.back() = 1 - pieces;
  any.quotients = {{1, pieces - 1, pieces}};
  return sizes == any;
}

// The same if the number of indices that are missing to fill all pieces is known.
bool filled_chunks_follow(const PieceSizes& sizes, int64_t pieces) {
  const auto lacks = sizes[0];
  for (int64_t i = 0; i < pieces; ++i) {
    if (sizes.shares[i] * pieces != sizes.per || sizes[i] != (i == pieces - 1 ? lacks - lacks * pieces : lacks)) {
      return false;
    }
  }
  return lacks >= 0 && lacks < pieces && sizes.quotients.empty();
}

bool is_even(const PieceSizes& sizes, int64_t pieces) {
  if (sizes.follows()) {
    return sizes.symbols.empty() && (chunks_follow(sizes, pieces) || filled_chunks_follow(sizes, pieces));
  }
  for (size_t row = 0; row < sizes.size(); row += pieces) {
    int64_t extent = 0;
    for (int64_t i = 0; i < pieces; ++i) {
      extent += sizes[row + i];
    }
    for (int64_t i = 0; i < pieces; ++i) {
      if (chunk(extent, pieces, i).length != sizes[row + i]) {
        return false;
      }
    }
  }
  return true;
}

// Piece i of a cut that follows the extent. Symbols become numbers, which guards the graph.
Interval piece_that_follows(const PieceSizes& sizes, int64_t extent, int64_t i) {
  const auto size = [&](int64_t j) {
    if (!sizes.symbols.empty()) {
      return sizes.symbols[j].guard_int(__FILE__, __LINE__);
    }
    auto out = (sizes[j] + sizes.shares[j] * extent) / sizes.per;
    for (size_t k = 0; k < sizes.quotients.size(); ++k) {
      out += sizes.times[j * sizes.quotients.size() + k] * sizes.quotients[k].of(extent);
    }
    return out;
  };
  int64_t start = 0;
  for (int64_t j = 0; j < i; ++j) {
    start += size(j);
  }
  return {start, size(i)};
}

// Takes [start, start + length) of the concatenation of `runs`.
void take(const Intervals& runs, int64_t start, int64_t length, Intervals& out) {
  int64_t at = 0;
  for (const auto& run : runs) {
    const int64_t from = std::max(start, at);
    const int64_t to = std::min(start + length, at + run.length);
    if (from < to) {
      const Interval next{run.start + from - at, to - from};
      if (!out.empty() && out.back().start + out.back().length == next.start) {
        out.back().length += next.length;
      } else {
        out.push_back(next);
      }
    }
    at += run.length;
  }
}

// How many sizes an explicit cut has per row. A strided placement has one per chunk.
int64_t sizes_per_row(const Mesh& mesh, const Placement& p, int64_t mesh_dim) {
  return p.split_factor > 1 ? p.split_factor : mesh.size(mesh_dim);
}

} // namespace

LayoutPtr Layout::make(MeshPtr mesh, Placements placements, Cuts cuts) {
  TORCH_CHECK_VALUE(
      static_cast<int64_t>(placements.size()) == mesh->ndim(), "placements: ", placements.size(), " given for a mesh of ",
      mesh->ndim(), " dims; give one per mesh dim");
  cuts.resize(placements.size());
  for (int64_t m = 0; m < mesh->ndim(); ++m) {
    for (int64_t i = 0; i < m; ++i) {
      TORCH_CHECK_VALUE(
          placements[i].commutes_with(placements[m]), "placements: ", placements[i].str(), " on mesh dim ", i, " and ",
          placements[m].str(), " on mesh dim ", m,
          ": the value would depend on which is reduced first; use one reduction for all (rank ", mesh->rank(), ")");
    }
    auto& cut = cuts[m];
    if (!cut) {
      continue;
    }
    TORCH_CHECK_VALUE(
        placements[m].is_shard(), "sharding_shapes: mesh dim ", m, " has explicit sizes but its placement is ",
        placements[m].str(), ", not Shard");
    const auto pieces = sizes_per_row(*mesh, placements[m], m);
    int64_t rows = 1;
    for (int64_t i = 0; i < m; ++i) {
      if (placements[i].is_shard(placements[m].dim)) {
        rows *= mesh->size(i);
      }
    }
    const auto want = rows * pieces;
    if (rows > 1 && static_cast<int64_t>(cut->size()) == pieces) { // one row for all coordinates
      std::vector<int64_t> all;
      for (int64_t r = 0; r < rows; ++r) {
        all.insert(all.end(), cut->begin(), cut->end());
      }
      cut = std::make_shared<const PieceSizes>(std::move(all));
    }
    TORCH_CHECK_VALUE(
        static_cast<int64_t>(cut->size()) == want, "sharding_shapes: mesh dim ", m, " needs ", want, " sizes, got ", cut->size());
    TORCH_INTERNAL_ASSERT(!cut->follows() || (rows == 1 && std::max(cut->shares.size(), cut->symbols.size()) == cut->size()));
    for (auto s : *cut) {
      TORCH_CHECK_VALUE(s >= 0 || cut->follows(), "sharding_shapes: mesh dim ", m, " has the negative size ", s);
    }
    if (shardtensor::is_even(*cut, pieces)) {
      cut = nullptr;
    }
  }
  const auto hash = hash_of(*mesh, placements, cuts);
  auto& t = table();
  std::lock_guard<std::mutex> lock(t.mutex);
  auto [begin, end] = t.layouts.equal_range(hash);
  for (auto it = begin; it != end; ++it) {
    const Layout* l = it->second._unsafe_get_target();
    if (l->mesh_ == mesh && l->placements_ == placements && same(l->cuts_, cuts)) {
      if (auto alive = it->second.lock()) {
        return alive;
      }
    }
  }
  auto layout = c10::make_intrusive<Layout>(std::move(mesh), std::move(placements), std::move(cuts), hash, t.next_id++);
  t.layouts.emplace(hash, layout);
  return layout;
}

LayoutPtr Layout::replicated(const MeshPtr& mesh) {
  return make(mesh, Placements(mesh->ndim(), Placement::replicate()));
}

size_t Layout::count() {
  auto& t = table();
  std::lock_guard<std::mutex> lock(t.mutex);
  return t.layouts.size();
}

Layout::Layout(MeshPtr mesh, Placements placements, Cuts cuts, size_t hash, int64_t id)
    : mesh_(std::move(mesh)), placements_(std::move(placements)), cuts_(std::move(cuts)), hash_(hash), id_(id) {
  starts_.resize(placements_.size());
  for (size_t m = 0; m < placements_.size(); ++m) {
    const auto& p = placements_[m];
    partial_ |= p.is_partial();
    follows_ |= cuts_[m] && cuts_[m]->follows();
    symbols_ |= cuts_[m] && !cuts_[m]->symbols.empty();
    if (cuts_[m]) {
      const auto row = sizes_per_row(*mesh_, p, static_cast<int64_t>(m));
      int64_t at = 0;
      for (size_t i = 0; i < cuts_[m]->size(); ++i) {
        at = static_cast<int64_t>(i) % row == 0 ? 0 : at;
        starts_[m].push_back(at);
        at += (*cuts_[m])[i];
      }
    }
    sharded_ |= p.is_shard();
    even_ &= !cuts_[m];
    if (p.is_shard()) {
      TORCH_CHECK_VALUE(p.dim >= 0 && p.dim < 64, "placements: Shard(", p.dim, ") must name a dim in [0, 64)");
      sharded_dims_ |= uint64_t{1} << p.dim;
    }
  }
}

void Layout::release_resources() {
  // Others' weak pointers may keep the object; they keep nothing else. Freed after the lock.
  MeshPtr mesh;
  Cuts cuts;
  auto& t = table();
  std::lock_guard<std::mutex> lock(t.mutex);
  auto [begin, end] = t.layouts.equal_range(hash_);
  for (auto it = begin; it != end; ++it) {
    if (it->second._unsafe_get_target() == this) {
      t.layouts.erase(it);
      break;
    }
  }
  mesh = std::move(mesh_);
  cuts = std::move(cuts_);
  starts_.clear();
}

int64_t Layout::innermost(int64_t dim) const {
  for (int64_t m = ndim() - 1; m >= 0; --m) {
    if (placements_[m].is_shard(dim)) {
      return m;
    }
  }
  return -1;
}

int64_t Layout::row_of(int64_t mesh_dim, c10::ArrayRef<int64_t> coordinate) const {
  int64_t row = 0;
  for (int64_t i = 0; i < mesh_dim; ++i) {
    if (placements_[i].is_shard(placements_[mesh_dim].dim)) {
      row = row * mesh_->size(i) + coordinate[i];
    }
  }
  return row;
}

int64_t Layout::extent_before(int64_t m, int64_t dim, int64_t size, c10::ArrayRef<int64_t> coordinate) const {
  for (int64_t i = 0; i < m; ++i) {
    if (placements_[i].is_shard(dim)) {
      size = split_size(i, size, coordinate);
    }
  }
  return size;
}

Interval Layout::piece_at(int64_t m, int64_t extent, int64_t row, int64_t at) const {
  const auto per_row = sizes_per_row(*mesh_, placements_[m], m);
  if (!cuts_[m]) {
    return chunk(extent, per_row, at);
  }
  const auto i = row * per_row + at;
  const auto& sizes = *cuts_[m];
  if (C10_UNLIKELY(sizes.follows())) {
    return piece_that_follows(sizes, extent, i);
  }
  return {starts_[m][i], sizes[i]};
}

Interval Layout::piece(int64_t m, int64_t extent, c10::ArrayRef<int64_t> coordinate) const {
  return piece_at(m, extent, row_of(m, coordinate), coordinate[m]);
}

std::pair<int64_t, int64_t> Layout::meeting(
    int64_t m, int64_t extent, c10::ArrayRef<int64_t> coordinate, const Interval& run) const {
  const auto n = mesh_->size(m);
  if (run.length == 0 || extent == 0) {
    return {0, 0};
  }
  if (!cuts_[m]) {
    const auto full = (extent + n - 1) / n;
    return {run.start / full, std::min(n, (run.end() - 1) / full + 1)};
  }
  if (C10_UNLIKELY(cuts_[m]->follows())) {
    return {0, n};
  }
  const auto begin = starts_[m].begin() + row_of(m, coordinate) * n, end = begin + n;
  const auto first = std::upper_bound(begin, end, run.start) - 1, last = std::lower_bound(begin, end, run.end());
  return {first - begin, last - begin};
}

Intervals Layout::split(int64_t m, int64_t extent, c10::ArrayRef<int64_t> coordinate) const {
  const auto pieces = mesh_->size(m);
  const auto index = coordinate[m];
  if (placements_[m].split_factor == 1) {
    return {piece(m, extent, coordinate)};
  }
  Intervals out;
  const Intervals whole{Interval{0, extent}};
  const auto row = row_of(m, coordinate);
  for (int64_t f = 0; f < placements_[m].split_factor; ++f) {
    const auto outer = piece_at(m, extent, row, f);
    const auto inner = chunk(outer.length, pieces, index);
    take(whole, outer.start + inner.start, inner.length, out);
  }
  return out;
}

int64_t Layout::split_size(int64_t m, int64_t extent, c10::ArrayRef<int64_t> coordinate) const {
  if (placements_[m].split_factor > 1) {
    return length_of(split(m, extent, coordinate));
  }
  if (const auto& cut = cuts_[m]) {
    if (C10_UNLIKELY(cut->follows())) {
      return piece(m, extent, coordinate).length;
    }
    return (*cut)[row_of(m, coordinate) * mesh_->size(m) + coordinate[m]];
  }
  return chunk(extent, mesh_->size(m), coordinate[m]).length;
}

Intervals Layout::intervals(int64_t dim, int64_t size, c10::ArrayRef<int64_t> coordinate) const {
  Intervals runs{Interval{0, size}};
  for (int64_t m = 0; m < ndim(); ++m) {
    if (!placements_[m].is_shard(dim)) {
      continue;
    }
    Intervals next;
    for (const auto& piece : split(m, length_of(runs), coordinate)) {
      take(runs, piece.start, piece.length, next);
    }
    if (next.empty()) { // an empty shard still has a start
      const auto piece = split(m, length_of(runs), coordinate);
      const int64_t at = piece.empty() ? 0 : piece[0].start;
      next.push_back({runs.empty() ? 0 : std::min(runs[0].start + at, size), 0});
    }
    runs = std::move(next);
  }
  return runs;
}

int64_t Layout::local_size(int64_t dim, int64_t size, c10::ArrayRef<int64_t> coordinate) const {
  for (int64_t m = 0; m < ndim(); ++m) {
    if (placements_[m].is_shard(dim)) {
      size = split_size(m, size, coordinate);
    }
  }
  return size;
}

Sizes Layout::local_sizes(c10::ArrayRef<int64_t> sizes, c10::ArrayRef<int64_t> coordinate) const {
  Sizes local(sizes.begin(), sizes.end());
  for (int64_t m = 0; m < ndim(); ++m) {
    const auto& p = placements_[m];
    if (p.is_shard() && p.dim < static_cast<int64_t>(sizes.size())) {
      local[p.dim] = split_size(m, local[p.dim], coordinate);
    }
  }
  return local;
}

std::vector<Box> Layout::boxes(c10::ArrayRef<int64_t> sizes, c10::ArrayRef<int64_t> coordinate) const {
  std::vector<Box> out(1);
  for (size_t d = 0; d < sizes.size(); ++d) {
    std::vector<Box> next;
    for (const auto& run : intervals(static_cast<int64_t>(d), sizes[d], coordinate)) {
      for (auto box : out) {
        box.offsets.push_back(run.start);
        box.sizes.push_back(run.length);
        next.push_back(std::move(box));
      }
    }
    out = std::move(next);
  }
  return out;
}

std::string Layout::misfit(c10::ArrayRef<int64_t> sizes) const {
  std::ostringstream why;
  for (int64_t m = 0; m < ndim(); ++m) {
    const auto& p = placements_[m];
    if (!p.is_shard()) {
      continue;
    }
    if (p.dim >= static_cast<int64_t>(sizes.size())) {
      why << "mesh dim " << m << " shards tensor dim " << p.dim << " of a tensor with " << sizes.size() << " dims";
      return why.str();
    }
    if (!cuts_[m] || cuts_[m]->follows()) {
      continue;
    }
    // Each row must add up to the extent that the outer mesh dims leave.
    Coordinate c(ndim(), 0);
    const auto n = sizes_per_row(*mesh_, p, m);
    const auto rows = static_cast<int64_t>(cuts_[m]->size()) / n;
    for (int64_t row = 0; row < rows; ++row) {
      int64_t rest = row;
      for (int64_t i = m - 1; i >= 0; --i) {
        if (placements_[i].is_shard(p.dim)) {
          c[i] = rest % mesh_->size(i);
          rest /= mesh_->size(i);
        }
      }
      const auto extent = extent_before(m, p.dim, sizes[p.dim], c);
      int64_t sum = 0;
      for (int64_t i = 0; i < n; ++i) {
        sum += (*cuts_[m])[row * n + i];
      }
      if (sum != extent) {
        why << "the pieces along mesh dim " << m << " add up to " << sum << ", but tensor dim " << p.dim << " has " << extent;
        return why.str();
      }
    }
  }
  return {};
}

LayoutPtr Layout::settled(c10::ArrayRef<int64_t> sizes) const {
  if (!follows_) {
    return LayoutPtr::reclaim_copy(this);
  }
  auto cuts = cuts_;
  for (int64_t m = 0; m < ndim(); ++m) {
    if (!cuts[m] || !cuts[m]->follows()) {
      continue;
    }
    Coordinate at(ndim(), 0);
    PieceSizes numbers;
    for (; at[m] < mesh_->size(m); ++at[m]) {
      numbers.push_back(split_size(m, extent_before(m, placements_[m].dim, sizes[placements_[m].dim], at), at));
    }
    cuts[m] = std::make_shared<const PieceSizes>(std::move(numbers));
  }
  return make(mesh_, placements_, std::move(cuts));
}

LayoutPtr Layout::with(int64_t mesh_dim, Placement placement, Cut cut) const {
  auto placements = placements_;
  auto cuts = cuts_;
  for (int64_t m = mesh_dim + 1; m < ndim(); ++m) {
    if (placements[m].is_shard() && (placements[mesh_dim].is_shard(placements[m].dim) || placement.is_shard(placements[m].dim))) {
      cuts[m] = nullptr;
    }
  }
  placements[mesh_dim] = placement;
  cuts[mesh_dim] = std::move(cut);
  return make(mesh_, std::move(placements), std::move(cuts));
}

LayoutPtr Layout::uncut(uint64_t dims) const {
  auto placements = placements_;
  auto cuts = cuts_;
  for (int64_t m = 0; m < ndim(); ++m) {
    if (placements[m].is_shard() && (dims >> placements[m].dim & 1)) {
      placements[m] = Placement::replicate();
      cuts[m] = nullptr;
    }
  }
  return make(mesh_, std::move(placements), std::move(cuts));
}

std::string Layout::str() const {
  std::ostringstream out;
  for (size_t m = 0; m < placements_.size(); ++m) {
    out << (m ? " " : "") << placements_[m].str();
    if (const auto& cut = cuts_[m]) {
      out << "[";
      for (size_t i = 0; i < cut->size() && i < 8; ++i) {
        out << (i ? "," : "");
        if (!cut->symbols.empty()) {
          out << cut->symbols[i];
        } else if (cut->follows()) {
          out << "(" << cut->shares[i] << "n+" << (*cut)[i] << ")/" << cut->per;
          for (size_t k = 0; k < cut->quotients.size(); ++k) {
            const auto& q = cut->quotients[k];
            out << "+" << cut->times[i * cut->quotients.size() + k] << "((" << q.up << "n+" << q.shift << ")//" << q.down << ")";
          }
        } else {
          out << (*cut)[i];
        }
      }
      out << (cut->size() > 8 ? ",...]" : "]");
    }
  }
  out << " on " << mesh_->str();
  return out.str();
}

} // namespace shardtensor
