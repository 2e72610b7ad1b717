#include "draws/fill.h"

#include "draws/graph.h"
#include "kernels/random.h"
#include "layout/symbolic.h"

namespace shardtensor::draws {

void fill(
    at::Tensor& local,
    const RandomKey& key,
    const Layout& layout,
    c10::SymIntArrayRef symbols,
    const kernels::Distribution& distribution) {
  if (key.traced.defined()) {
    local.copy_(drawn_in_graph(local, key.traced, layout, symbols, distribution));
    return;
  }
  const auto sizes = guarded(symbols);
  c10::SmallVector<Intervals, 6> runs;
  for (size_t d = 0; d < sizes.size(); ++d) {
    runs.push_back(layout.intervals(static_cast<int64_t>(d), sizes[d], layout.mesh().coordinate()));
  }
  kernels::fill_runs(local, key.bits, sizes, std::move(runs), distribution);
}

} // namespace shardtensor::draws
