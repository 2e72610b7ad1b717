// Four threads make, share, use and drop the same layouts, meshes, kept plans and cached solutions. Run under a sanitizer
// (CMakeLists.txt); it ends with an error if that finds a fault, or if a value is wrong. With the argument "race" or "overrun" it
// makes such a fault of its own, which shows that they are found.
#include "dispatch/cache.h"
#include "layout/layout.h"
#include "redistribute/plan_cache.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

namespace {

using namespace shardtensor;

constexpr int kThreads = 4;
constexpr int kRounds = 3000;

MeshPtr mesh(int64_t a, int64_t b) {
  Mesh::Description d;
  d.device_type = "cpu";
  d.shape = {a, b};
  for (int64_t r = 0; r < a * b; ++r) {
    d.ranks.push_back(r);
  }
  d.groups = {"rows", "columns"};
  d.rank = 1;
  return Mesh::make(std::move(d));
}

// One of a few, so that threads make the same one at the same time. Uneven ones list their sizes.
LayoutPtr layout(const MeshPtr& m, unsigned which) {
  const Placement choices[] = {Placement::replicate(), Placement::shard(0), Placement::shard(1)};
  const auto uneven = std::make_shared<const PieceSizes>(std::vector<int64_t>{5, 7});
  const auto& first = choices[which % 3];
  return Layout::make(m, {first, choices[which / 3 % 3]}, {first.is_shard() && which % 2 ? uneven : nullptr, nullptr});
}

// What a layout that several threads hold is asked at once.
void use(const LayoutPtr& a) {
  const int64_t sizes[] = {12, 12};
  int64_t elements = 0;
  for (int64_t r = 0; r < a->mesh().size(); ++r) {
    const auto local = a->local_sizes(sizes, a->mesh().coordinate_at(r));
    elements += local[0] * local[1];
  }
  TORCH_CHECK(elements >= 144, a->str(), " holds ", elements, " elements");
  const int64_t piece[] = {3, 3};
  a->mesh().note_equal_piece(0, piece);
  TORCH_CHECK(a->with(0, Placement::replicate())->uncut(3)->is_replicated(), a->str());
  TORCH_CHECK(!a->boxes(sizes, a->mesh().coordinate()).empty(), a->str());
}

struct Number {
  int64_t value;
  size_t weight() const {
    return 1;
  }
};

void use_tables(const LayoutPtr& a, const LayoutPtr& b, unsigned which) {
  const int64_t sizes[] = {which % 5};
  const auto plan = cached<Number>(*a, *b, CachedKind::Plan, sizes, [&] { return Number{a->id() + b->id()}; });
  TORCH_CHECK(plan->value == a->id() + b->id(), "another layout's plan");

  const auto key = [&] {
    CacheKey k(0);
    k.push(static_cast<uint64_t>(a->id()));
    return k;
  };
  const auto solution = Cache::get(
      static_cast<int32_t>(which % 7), key, [](CacheKey&) {},
      [&] {
        auto out = c10::make_intrusive<rules::Solution>();
        out->replicated = a;
        return rules::SolutionPtr(std::move(out));
      });
  TORCH_CHECK(solution->replicated == a, "another layout's solution");
}

// One layout of each thread, which the next one takes over: its last reference often drops in another thread.
struct Shelf {
  std::mutex mutex;
  std::vector<LayoutPtr> held = std::vector<LayoutPtr>(kThreads);

  LayoutPtr swap(size_t at, LayoutPtr layout) {
    const std::lock_guard<std::mutex> lock(mutex);
    std::swap(held[at % held.size()], layout);
    return layout;
  }
};

void work(unsigned seed, Shelf& shelf) {
  std::minstd_rand random(seed);
  for (int i = 0; i < kRounds; ++i) {
    const auto m = mesh(2, 1 + static_cast<int64_t>(random() % 3));
    const auto which = static_cast<unsigned>(random());
    const auto a = layout(m, which), b = layout(m, which / 16), again = layout(m, which);
    TORCH_CHECK(a == again && mesh(2, m->size(1)) == m, "equal ones are two");
    use(a);
    use_tables(a, b, which);
    if (const auto other = shelf.swap(random(), a)) {
      use(other);
      use_tables(other, a, which);
    }
    if (which % 512 == 0) {
      clear_cache();
    }
  }
}

int race() {
  int unguarded = 0;
  std::thread other([&] { ++unguarded; });
  ++unguarded;
  other.join();
  return unguarded;
}

int overrun() {
  const auto numbers = std::make_unique<int[]>(1);
  const volatile size_t past = 1;
  return numbers[past];
}

} // namespace

int main(int argc, char** argv) {
  if (argc > 1) {
    std::printf("%d\n", std::strcmp(argv[1], "race") == 0 ? race() : overrun());
    return 0;
  }
  std::atomic<int> failed{0};
  {
    Shelf shelf;
    for (unsigned generation = 0; generation < 3; ++generation) { // tables are freed with their threads
      std::vector<std::thread> threads;
      for (unsigned t = 0; t < kThreads; ++t) {
        threads.emplace_back([&, seed = 10 * generation + t + 1] {
          try {
            work(seed, shelf);
          } catch (const std::exception& e) {
            std::fprintf(stderr, "%s\n", e.what());
            ++failed;
          }
        });
      }
      for (auto& thread : threads) {
        thread.join();
      }
    }
  }
  if (Layout::count() || Mesh::count() || cache_info().threads > 1) {
    std::fprintf(
        stderr, "left: %zu layouts, %zu meshes, caches of %ld threads\n", Layout::count(), Mesh::count(), cache_info().threads);
    ++failed;
  }
  std::printf("%d threads, 3 times %d rounds: %d failed\n", kThreads, kRounds, failed.load());
  return failed ? 1 : 0;
}
