// Ranks that disagree about a tensor (its sizes, its dtype) would read memory that nobody has written, or end in the backend.
// from_local() does not communicate, so this is found when its pieces, or results of ops on them, first move.
#pragma once

#include "layout/layout.h"

#include <c10/core/ScalarType.h>

namespace shardtensor {

// Raises on all ranks alike if they disagree. Communicates only before the first move of this process between two such layouts,
// whatever their cuts, for a dtype and a number of dims. That is a function of the moves that all ranks have made, so they do it
// together.
void check_agreed(const Layout& from, const Layout& to, c10::IntArrayRef sizes, c10::ScalarType dtype);

} // namespace shardtensor
