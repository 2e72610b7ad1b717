// Copies writes to a view that had to move data back into its base.
#pragma once

#include "dispatch/refs.h"
#include "rules/solution.h"

namespace shardtensor {

// `operand`: the piece that the op has viewed or copied. Does nothing if `view` shares memory with its base.
void remember_base(
    const Op& op, const rules::SolutionPtr& solution, const Ref& base, const at::Tensor& operand, const at::Tensor& view);

} // namespace shardtensor
