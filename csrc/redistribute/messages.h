// Messages between any ranks: allocates their buffers and packs boxes into them.
#pragma once

#include "comm/comm.h"
#include "kernels/boxes.h"

namespace shardtensor {

// A collective for comm::start(), with allocated buffers; pack() fills `in`. `like` has the dtype and the device. `sent`,
// `received`: elements, by peer.
comm::Collective messages(
    const at::Tensor& like,
    c10::IntArrayRef peers,
    c10::IntArrayRef sent,
    c10::IntArrayRef received,
    const Mesh& mesh,
    int64_t callers);
// Packs the boxes, one message's after the other's. In graphs too.
void pack(comm::Collective& messages, const at::Tensor& source, const std::vector<Box>& boxes);

inline kernels::Spacing message_spacing(const comm::Collective& messages) {
  return {messages.in_sizes, messages.spacing};
}

} // namespace shardtensor
