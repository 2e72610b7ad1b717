// How each collective is made with what the group's backend can do: the last step of start() in comm.h.
#pragma once

#include "comm/collective.h"
#include "comm/in_flight.h"

namespace shardtensor::comm {

// Calls the process group. The tensors are bytes unless the collective reduces.
InFlight call_group(Collective c);

// Whether all ranks of the default group make this AllToAll between any ranks. Then its sizes can be listed for all of them.
bool all_ranks_call(const Collective& c);
std::vector<int64_t> sizes_by_rank(at::IntArrayRef sizes, at::IntArrayRef peers, int64_t ranks);

} // namespace shardtensor::comm
