#include "draws/keys.h"

#include "comm/comm.h"
#include "comm/desync.h"
#include "comm/error_context.h"
#include "comm/group_generation.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <mutex>
#include <unordered_set>
#include <utility>

namespace shardtensor::draws {

namespace {

std::mutex g_mutex;

// By the meshes' hashes: equal meshes that are made one after the other, at different times on each rank, agree only once.
std::unordered_set<size_t>& agreed() {
  static auto* meshes = new std::unordered_set<size_t>();
  static int64_t generation = 0;
  if (std::exchange(generation, comm::group_generation()) != comm::group_generation()) {
    meshes->clear();
  }
  return *meshes;
}

at::Tensor state_of(at::Generator& generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

// splitmix64's finish: neighbouring inputs give unrelated keys.
uint64_t scramble(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

} // namespace

void agree(const Mesh& mesh) {
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    if (!mesh.has_this_rank() || agreed().count(mesh.hash())) {
      return;
    }
  }
  auto generator = at::detail::getDefaultCPUGenerator();
  const auto mine = state_of(generator);
  auto first = mesh.description().device_type == "cpu" ? mine.clone() : mine.to(comm::device_of(mesh));
  const auto text = [&] {
    return c10::str("the first random op on ", mesh.str(), ", for which its ranks agree on the generator's state");
  };
  const comm::Frame frame(text);
  const comm::desync::ConfirmedStartGuard careful; // the user did not ask for this communication, so one rank may come alone
  for (int64_t m = 0; m < mesh.ndim(); ++m) {
    comm::broadcast(first, mesh, m, 0);
  }
  first = first.cpu();
  if (!at::equal(first, mine)) {
    TORCH_WARN(
        "shardtensor: on rank ", mesh.rank(), " the default random generator has another state than on rank ",
        mesh.description().ranks[0], ", the first of ", mesh.str(),
        "; that rank's state is now used. Seed all ranks alike: torch.manual_seed(seed) or shardtensor.random.manual_seed(seed)");
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(first);
  }
  mark_agreed(mesh);
}

void mark_agreed(const Mesh& mesh) {
  std::lock_guard<std::mutex> lock(g_mutex);
  agreed().insert(mesh.hash());
}

uint64_t next_key(const Mesh& mesh, const std::optional<at::Generator>& generator) {
  const bool given = generator && generator->defined();
  if (!given) {
    agree(mesh);
  }
  auto source = given ? *generator : at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> lock(source.mutex());
  if (source.device().is_cpu()) {
    const auto key = at::check_generator<at::CPUGeneratorImpl>(source)->random64();
    if (!given) {
      comm::desync::note_draw(mesh, key);
    }
    return key;
  }
  // A device's generator counts from its seed; take one step of it.
  const auto offset = source.get_offset();
  source.set_offset(offset + 4);
  return scramble(source.current_seed() + scramble(offset + 0x9e3779b97f4a7c15));
}

} // namespace shardtensor::draws
