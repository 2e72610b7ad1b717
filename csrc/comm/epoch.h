// How often this process has destroyed all its process groups. What the ranks had agreed on before no longer counts: some may
// have failed before they did. Uses no other folder.
#pragma once

#include <cstdint>

namespace shardtensor::comm {

int64_t epoch();

} // namespace shardtensor::comm
