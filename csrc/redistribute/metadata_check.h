// If ranks disagree about a tensor (its sizes, its dtype), a move would read memory that no rank has written, or fail in the
// backend. from_local() does not communicate, so the disagreement is found when the tensor, or the result of an op on it, first
// moves.
#pragma once

#include "layout/layout.h"

#include <c10/core/ScalarType.h>

namespace shardtensor {

// Raises on all ranks alike if they disagree. Communicates only before the first move of this process between two such layouts,
// whatever their cuts, for a dtype and a number of dims. That depends only on the moves that all ranks have made, so all ranks
// communicate or none does.
void check_metadata(const Layout& from, const Layout& to, c10::IntArrayRef sizes, c10::ScalarType dtype);

} // namespace shardtensor
