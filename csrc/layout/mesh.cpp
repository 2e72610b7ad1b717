#include "layout/mesh.h"

#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <mutex>
#include <sstream>
#include <unordered_map>

namespace shardtensor {

namespace {

using WeakMesh = c10::weak_intrusive_ptr<const Mesh>;

// Keeps no mesh alive, as the table of layouts (layout.cpp).
struct MeshTable {
  std::mutex mutex;
  std::unordered_multimap<size_t, WeakMesh> meshes;
  int64_t next_id = 0;
};

MeshTable& meshes() {
  static MeshTable* t = new MeshTable(); // never destroyed: tensors may outlive static destruction
  return *t;
}

size_t hash_of(const Mesh::Description& d) {
  size_t h = std::hash<std::string>()(d.device_type) ^ static_cast<size_t>(d.rank * 0x9e3779b97f4a7c15ULL);
  for (auto n : d.shape) {
    h = c10::hash_combine(h, static_cast<size_t>(n));
  }
  for (auto r : d.ranks) {
    h = c10::hash_combine(h, static_cast<size_t>(r));
  }
  for (const auto* names : {&d.dim_names, &d.groups}) {
    for (const auto& name : *names) {
      h = c10::hash_combine(h, std::hash<std::string>()(name));
    }
  }
  for (const auto& along : d.group_ranks) {
    for (auto r : along) {
      h = c10::hash_combine(h, static_cast<size_t>(r));
    }
  }
  return c10::hash_combine(h, std::hash<std::string>()(d.world));
}

} // namespace

MeshPtr Mesh::make(Description d) {
  int64_t count = 1;
  for (auto n : d.shape) {
    TORCH_CHECK_VALUE(n > 0, "Mesh: a mesh dim has size ", n, "; sizes must be positive");
    count *= n;
  }
  TORCH_CHECK_VALUE(
      count == static_cast<int64_t>(d.ranks.size()), "Mesh: shape holds ", count, " ranks but ", d.ranks.size(), " are given");
  TORCH_CHECK_VALUE(d.groups.size() == d.shape.size(), "Mesh: one group name per mesh dim is needed");
  TORCH_CHECK_VALUE(
      d.group_ranks.empty() || d.group_ranks.size() == d.shape.size(), "Mesh: ranks in the groups are given per mesh dim");
  for (auto r : d.ranks) {
    TORCH_CHECK_VALUE(r >= 0, "Mesh: rank ", r, " is negative");
  }
  const auto hash = hash_of(d);
  auto& t = meshes();
  std::lock_guard<std::mutex> lock(t.mutex);
  auto [begin, end] = t.meshes.equal_range(hash);
  for (auto it = begin; it != end; ++it) {
    if (it->second._unsafe_get_target()->description() == d) {
      if (auto alive = it->second.lock()) {
        return alive;
      }
    }
  }
  auto mesh = c10::make_intrusive<Mesh>(std::move(d), hash, t.next_id++);
  t.meshes.emplace(hash, WeakMesh(MeshPtr(mesh)));
  return mesh;
}

void Mesh::release_resources() {
  auto& t = meshes();
  std::lock_guard<std::mutex> lock(t.mutex);
  auto [begin, end] = t.meshes.equal_range(hash_);
  for (auto it = begin; it != end; ++it) {
    if (it->second._unsafe_get_target() == this) {
      t.meshes.erase(it);
      return;
    }
  }
}

size_t Mesh::count() {
  auto& t = meshes();
  std::lock_guard<std::mutex> lock(t.mutex);
  return t.meshes.size();
}

MeshPtr Mesh::with_groups(const std::vector<std::string>& groups) {
  auto& t = meshes();
  std::vector<MeshPtr> found; // freed after the lock
  {
    std::lock_guard<std::mutex> lock(t.mutex);
    for (const auto& [hash, weak] : t.meshes) {
      if (weak._unsafe_get_target()->description().groups == groups) {
        found.push_back(weak.lock());
      }
    }
  }
  MeshPtr latest;
  for (const auto& mesh : found) {
    latest = mesh && (!latest || mesh->id() > latest->id()) ? mesh : latest;
  }
  return latest;
}

void Mesh::note_equal_piece(int64_t dim, c10::ArrayRef<int64_t> sizes) const {
  size_t h = sizes.size();
  for (const auto n : sizes) {
    h = c10::hash_combine(h, static_cast<size_t>(n));
  }
  equal_pieces_[dim].fetch_add(static_cast<uint64_t>(h) << 16 | 1, std::memory_order_relaxed);
}

Mesh::Mesh(Description description, size_t hash, int64_t id)
    : d_(std::move(description)), hash_(hash), id_(id), equal_pieces_(new std::atomic<uint64_t>[d_.shape.size()]()) {
  coordinate_.assign(d_.shape.size(), 0);
  for (size_t i = 0; i < d_.ranks.size(); ++i) {
    places_.resize(std::max(places_.size(), static_cast<size_t>(d_.ranks[i]) + 1), -1);
    places_[d_.ranks[i]] = static_cast<int32_t>(i);
    if (d_.ranks[i] == d_.rank) {
      mine_ = true;
      coordinate_ = coordinate_at(static_cast<int64_t>(i));
    }
  }
}

int64_t Mesh::index_of(c10::ArrayRef<int64_t> coordinate) const {
  int64_t index = 0;
  for (int64_t i = 0; i < ndim(); ++i) {
    index = index * d_.shape[i] + coordinate[i];
  }
  return index;
}

Coordinate Mesh::coordinate_at(int64_t index) const {
  Coordinate c(d_.shape.size(), 0);
  for (int64_t i = ndim() - 1; i >= 0; --i) {
    c[i] = index % d_.shape[i];
    index /= d_.shape[i];
  }
  return c;
}

std::string Mesh::str() const {
  std::ostringstream out;
  out << d_.device_type << " mesh (";
  for (size_t i = 0; i < d_.shape.size(); ++i) {
    out << (i ? ", " : "");
    if (i < d_.dim_names.size()) {
      out << d_.dim_names[i] << "=";
    }
    out << d_.shape[i];
  }
  out << ")";
  return out.str();
}

} // namespace shardtensor
