// One call on ShardTensors, from its arguments to its wrapped results: its solution is found (solve.h), its tensors are made this
// rank's (localize.h), the op or its rule's kernel runs, and its results are wrapped (wrap.h). Boxed calls are run here;
// typed.cpp and lists.cpp go the same way with arguments of other forms.
#pragma once

#include "dispatch/localize.h"
#include "dispatch/solve.h"
#include "dispatch/wrap.h"

namespace shardtensor {

// Runs a whole call on boxed arguments, replacing them by the results. `sizes`: what the op's argument of sizes stands for, where
// that has symbols.
void handle(const Op& op, torch::jit::Stack* stack, const SymSizes* sizes = nullptr);

} // namespace shardtensor
