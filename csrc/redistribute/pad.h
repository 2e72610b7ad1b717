// A piece as a summand of the whole: what changes nothing under the reduction goes around it, and nothing is sent.
// Uses layout/, kernels/. Used by redistribute.cpp.
#pragma once

#include "layout/layout.h"

#include <ATen/core/Tensor.h>

namespace shardtensor {

// What changes nothing under the reduction; Avg has none.
at::Scalar identity(ReduceOp op, at::ScalarType type, double norm_order = 2.0);

// `local` under `layout`, whose mesh dim m shards, with that placement replaced by `summand`.
at::Tensor pad(const at::Tensor& local, const Layout& layout, int64_t m, const Placement& summand, c10::ArrayRef<int64_t> sizes);

} // namespace shardtensor
