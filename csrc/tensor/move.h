// Moves a tensor to another layout: for an op, for a gradient, or because the user asked for it. Only this file deals with what
// concerns every move: observers, kept sums (tensor/reduced_partials.h), pieces that a graph has moved before, and whose memory
// the result may share. Without autograd.
#pragma once

#include "redistribute/watch.h"
#include "tensor/reduced_partials.h"
#include "tensor/shard_tensor.h"

#include <optional>
#include <vector>

namespace shardtensor {

// Whose memory the moved piece may share.
enum class MovePurpose {
  Reading, // anyone's: it is not written, and no result is a view of it. A sum that is made for it is kept for the next reader
  Viewing, // the tensor's own piece's
  Owning,  // no one's, unless the piece stays as it is
};

struct MoveRequest {
  const at::Tensor& tensor; // a ShardTensor, unless `from` says where it is
  LayoutPtr to;
  // Empty: the user asked for the move. Otherwise observers hear of it, and errors name the op.
  std::optional<MoveCause> cause = {};
  MovePurpose use = MovePurpose::Owning;
  // The data to move, if not the tensor's piece: values that an op has written elsewhere, or a plain tensor.
  std::optional<PieceInLayout> from = {};
};

// This rank's piece of the tensor in the layout. Ranks communicate once: a sum that was made before is used again, and so is a
// piece that a graph has already moved there. (Not in a graph's backward: the forward would have to keep the piece.)
// `rest`: see redistribute().
at::Tensor moved_piece(const MoveRequest& request, comm::InFlight* rest = nullptr);
// The pieces of several tensors, which move together (redistribute_all()). In graphs they move one by one.
std::vector<at::Tensor> moved_pieces(const std::vector<MoveRequest>& requests, std::vector<comm::InFlight>* rests = nullptr);
// For values that belong to no tensor at hand.
at::Tensor moved_piece(const PieceInLayout& from, const Layout& to, c10::SymIntArrayRef sizes, const MoveCause& cause);

// The ShardTensor in the layout; the same tensor if it has that layout. `async`: its first use waits for the data.
at::Tensor moved(const at::Tensor& t, const LayoutPtr& to, const std::optional<MoveCause>& cause = {}, bool async = false);
std::vector<at::Tensor> moved(
    const std::vector<at::Tensor>& tensors,
    const std::vector<LayoutPtr>& layouts,
    const std::optional<MoveCause>& cause = {},
    bool async = false);

// A ShardTensor of this piece and layout, with the sizes of `t` and its order of dims in memory.
at::Tensor with_piece(const at::Tensor& t, at::Tensor local, const LayoutPtr& layout);

} // namespace shardtensor
