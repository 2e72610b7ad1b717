#include "redistribute/messages.h"

#include "comm/tensor_kind.h"
#include "kernels/traced.h"

#include <ATen/ATen.h>

namespace shardtensor {

comm::Collective messages(
    const at::Tensor& like,
    c10::IntArrayRef peers,
    c10::IntArrayRef sent,
    c10::IntArrayRef received,
    const Mesh& mesh,
    int64_t callers) {
  const auto spacing = comm::spacing(like, mesh, -1, comm::StagingKind::Messages);
  return {
      .kind = comm::CollectiveKind::AllToAll,
      .mesh = MeshPtr::reclaim_copy(&mesh),
      .in = is_traced(like) ? at::Tensor() : at::empty({kernels::length_of({sent, spacing})}, like.options()),
      .out = at::empty({kernels::length_of({received, spacing})}, like.options()),
      .in_sizes = sent.vec(),
      .out_sizes = received.vec(),
      .spacing = spacing,
      .peers = peers.vec(),
      .callers = callers,
  };
}

void pack(comm::Collective& messages, const at::Tensor& source, const std::vector<Box>& boxes) {
  if (is_traced(source)) {
    messages.in = kernels::traced::packed(source, boxes);
  } else if (!boxes.empty()) {
    kernels::pack(source, boxes, messages.in, message_spacing(messages));
  }
}

} // namespace shardtensor
