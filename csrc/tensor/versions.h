// Autograd's version counters of pieces. A graph (torch.compile) saves pieces for its backward, so a write to a ShardTensor
// counts on its piece too, and a view's piece has the counter of its base's piece.
#pragma once

#include "tensor/shard_tensor.h"

namespace shardtensor {

inline void bump_piece(const at::Tensor& piece) {
  if (!piece.is_inference()) {
    piece.unsafeGetTensorImpl()->bump_version();
  }
}

// Called after an op has written `t`, on all ranks. While a graph is traced, the tracer itself tracks writes to the pieces.
inline void note_write_and_piece(ShardTensorImpl& t) {
  t.note_write();
  if (C10_LIKELY(!t.traced())) {
    bump_piece(t.local(/*to_view=*/true));
  }
}

// The same for a tensor of a list: no autograd kernel above ours counts the write on the ShardTensor.
inline void note_write_in_list(ShardTensorImpl& t) {
  note_write_and_piece(t);
  if (C10_LIKELY(!t.traced() && !t.is_inference())) {
    t.bump_version();
  }
}

} // namespace shardtensor
