// Moves a tensor to another layout: for an op, for a gradient, or because the user said so. What every such move has to mind is
// here alone: observers, sums that are kept (tensor/sums.h), what a graph has moved before, and whose memory the result may
// share. Without autograd.
#pragma once

#include "redistribute/watch.h"
#include "tensor/shard_tensor.h"
#include "tensor/sums.h"

#include <optional>
#include <vector>

namespace shardtensor {

// Whose memory the moved piece may share.
enum class For {
  Reading, // anyone's: nobody writes it, and no result is a view of it. What is added up for it is kept for the next reader
  Viewing, // the tensor's own piece's
  Owning,  // no one's, unless the piece stays as it is
};

struct Request {
  const at::Tensor& tensor; // a ShardTensor, unless `from` says where it is
  LayoutPtr to;
  std::optional<Cause> cause = {}; // nothing: the user asked for it. Else observers hear of it, and errors name the op
  For use = For::Owning;
  // What moves, if not the tensor's piece: values that an op has written elsewhere, a plain tensor.
  std::optional<Placed> from = {};
};

// This rank's piece of the tensor in the layout. A sum of summands that was made before, and what a graph has moved there, is not
// moved again, so ranks communicate once. (In a graph's backward it is: the forward would have to keep it.)
// `rest`: as redistribute() has it.
at::Tensor moved_piece(const Request& request, comm::InFlight* rest = nullptr);
// Of several, which move together (redistribute_all()). Those of graphs move one by one.
std::vector<at::Tensor> moved_pieces(const std::vector<Request>& requests, std::vector<comm::InFlight>* rests = nullptr);
// For values that belong to no tensor at hand.
at::Tensor moved_piece(const Placed& from, const Layout& to, c10::SymIntArrayRef sizes, const Cause& cause);

// The ShardTensor in the layout; itself if it is there. `async`: its first use waits for the data.
at::Tensor moved(const at::Tensor& t, const LayoutPtr& to, const std::optional<Cause>& cause = {}, bool async = false);
std::vector<at::Tensor> moved(
    const std::vector<at::Tensor>& tensors,
    const std::vector<LayoutPtr>& layouts,
    const std::optional<Cause>& cause = {},
    bool async = false);

// A ShardTensor of this piece and layout, with the sizes of `t` and its order of dims in memory.
at::Tensor with_piece(const at::Tensor& t, at::Tensor local, const LayoutPtr& layout);

} // namespace shardtensor
