// The CPU twin of cuda/random.cu, whose tests compare with it.
#include "kernels/random.h"
#include "kernels/draws.h"

#include <ATen/Parallel.h>

namespace shardtensor::kernels::cpu {

namespace {

// The global index of local element i, and how many elements follow it in both orders.
std::pair<uint64_t, int64_t> locate(const LocalRegion& held, int64_t i) {
  uint64_t at = 0, stride = 1;
  int64_t follow = 0;
  for (size_t d = held.dims.size(); d-- > 0;) {
    const auto& dim = held.dims[d];
    auto k = i % dim.local;
    i /= dim.local;
    for (const auto& run : dim.runs) {
      if (k < run.length) {
        at += stride * static_cast<uint64_t>(run.start + k);
        follow = d + 1 == held.dims.size() ? run.length - k : follow;
        break;
      }
      k -= run.length;
    }
    stride *= static_cast<uint64_t>(dim.size);
  }
  return {at, follow};
}

template <typename Scalar, typename Draw>
void fill_run(Scalar* out, uint64_t start, int64_t n, const Draw& draw) {
  typename Draw::Value block[Draw::kWidth];
  for (int64_t i = 0; i < n;) {
    const uint64_t at = start + static_cast<uint64_t>(i);
    draw(at / Draw::kWidth, block);
    for (auto k = static_cast<int>(at % Draw::kWidth); k < Draw::kWidth && i < n; ++k) {
      out[i++] = draw.template finish<Scalar>(block[k]);
    }
  }
}

struct FillOnCpu {
  at::Tensor& local;
  const LocalRegion& held;

  template <typename Scalar, typename Draw>
  void operator()(const Draw& draw) const {
    auto* out = local.mutable_data_ptr<Scalar>();
    at::parallel_for(0, held.numel, 1 << 15, [&](int64_t begin, int64_t end) {
      while (begin < end) {
        const auto [at, follow] = locate(held, begin);
        const auto n = std::min(follow, end - begin);
        fill_run(out + begin, at, n, draw);
        begin += n;
      }
    });
  }
};

} // namespace

void fill_random(at::Tensor& local, uint64_t key, const LocalRegion& held, const Distribution& distribution) {
  with_draw(local.scalar_type(), key, distribution, FillOnCpu{local, held});
}

} // namespace shardtensor::kernels::cpu
