// How often this process has destroyed all its process groups. Whatever the ranks agreed on before that no longer holds,
// because some of them may have failed in between. Uses no other folder.
#pragma once

#include <cstdint>

namespace shardtensor::comm {

int64_t group_generation();

} // namespace shardtensor::comm
