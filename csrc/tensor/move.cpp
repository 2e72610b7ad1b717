#include "tensor/move.h"

#include "comm/error_context.h"
#include "comm/tensor_kind.h"
#include "redistribute/redistribute.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/function.h>

namespace shardtensor {

namespace {

// Runs a function that communicates. Errors name the op that caused the move.
template <typename F>
decltype(auto) run_for(const std::optional<MoveCause>& cause, const F& run) {
  if (!cause) {
    return run();
  }
  const auto text = [&] { return std::string(cause->op); };
  const comm::Frame frame(text);
  return run();
}

void tell(const MoveRequest& r, const Layout& from) {
  if (r.cause && &from != r.to.get()) {
    tell_watcher(*r.cause, from, *r.to, r.tensor.sym_sizes(), r.tensor.element_size());
  }
}

bool is_in_graph(const MoveRequest& r) {
  const auto* impl = as_shard_tensor(r.tensor);
  return is_symbolic(r.tensor) || (impl && impl->traced());
}

// Where a move starts.
struct MoveStart {
  const ShardTensorImpl* impl = nullptr; // null if `MoveRequest::from` says where
  bool adds_up = false;                  // summands are added up: then there may be a sum, or one is made
  PieceInLayout at;
};

MoveStart start_of(const MoveRequest& r) {
  if (r.from) {
    return {nullptr, false, *r.from};
  }
  const auto& t = shard_tensor(r.tensor, "redistribute");
  const bool adds_up = t.layout().has_partial() && !r.to->has_partial() && !t.traced();
  if (C10_UNLIKELY(adds_up)) {
    if (auto sum = sum_of(t)) {
      return {&t, true, std::move(*sum)};
    }
  }
  return {&t, adds_up, {t.local(), t.layout_ptr()}};
}

// The piece that the caller gets.
at::Tensor given_out(const MoveRequest& r, const MoveStart& start, at::Tensor piece) {
  if (start.adds_up && r.use == MovePurpose::Reading && start.at.layout == start.impl->layout_ptr()) {
    keep_sum(*start.impl, piece, r.to);
  }
  const bool needs_own =
      (start.adds_up && r.use != MovePurpose::Reading) || (r.use == MovePurpose::Owning && start.at.layout != r.to);
  return needs_own && piece.is_alias_of(start.at.local) ? piece.clone() : piece;
}

} // namespace

at::Tensor moved_piece(const MoveRequest& r, comm::InFlight* rest) {
  const auto start = start_of(r);
  const auto& local = start.at.local;
  const auto& layout = start.at.layout;
  const auto move = [&] {
    if (layout == r.to) {
      return local;
    }
    return run_for(r.cause, [&] {
      tell(r, *layout);
      return C10_UNLIKELY(is_symbolic(r.tensor)) ? redistribute(local, *layout, *r.to, r.tensor.sym_sizes(), rest)
                                                 : redistribute(local, *layout, *r.to, r.tensor.sizes(), rest);
    });
  };
  const auto* impl = start.impl;
  const bool keeps =
      impl && impl->traced() && !impl->layout().is_replicated() && is_recording() && !torch::autograd::get_current_node();
  if (C10_LIKELY(!keeps)) {
    return given_out(r, start, move());
  }
  auto piece = impl->moved_to(*r.to);
  if (!piece.defined()) {
    piece = move();
  }
  // Keep a copy: the caller may write to `piece`. If the copy is never used, the graph drops it.
  impl->keep_moved(r.to, piece.clone());
  return given_out(r, start, std::move(piece));
}

std::vector<at::Tensor> moved_pieces(const std::vector<MoveRequest>& requests, std::vector<comm::InFlight>* rests) {
  std::vector<at::Tensor> out(requests.size());
  if (rests) {
    rests->resize(requests.size());
  }
  if (requests.size() == 1) {
    out[0] = moved_piece(requests[0], rests ? rests->data() : nullptr);
    return out;
  }
  std::vector<PieceMove> moves;
  std::vector<MoveStart> starts;
  std::vector<size_t> index;
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto& r = requests[i];
    if (is_in_graph(r)) {
      out[i] = moved_piece(r);
      continue;
    }
    auto& start = starts.emplace_back(start_of(r));
    const auto sizes = r.tensor.sizes();
    moves.push_back({start.at.local, start.at.layout, r.to, Sizes(sizes.begin(), sizes.end())});
    index.push_back(i);
  }
  if (moves.empty()) {
    return out;
  }
  std::vector<comm::InFlight> started;
  auto pieces = run_for(requests[index[0]].cause, [&] {
    for (size_t n = 0; n < moves.size(); ++n) {
      tell(requests[index[n]], *moves[n].from);
    }
    return redistribute_all(moves, rests ? &started : nullptr);
  });
  for (size_t n = 0; n < moves.size(); ++n) {
    out[index[n]] = given_out(requests[index[n]], starts[n], std::move(pieces[n]));
    if (rests) {
      (*rests)[index[n]] = std::move(started[n]);
    }
  }
  return out;
}

at::Tensor moved_piece(const PieceInLayout& from, const Layout& to, c10::SymIntArrayRef sizes, const MoveCause& cause) {
  if (from.layout.get() == &to) {
    return from.local;
  }
  return run_for(cause, [&] {
    tell_watcher(cause, *from.layout, to, sizes, from.local.element_size());
    return redistribute(from.local, *from.layout, to, sizes);
  });
}

at::Tensor with_piece(const at::Tensor& t, at::Tensor local, const LayoutPtr& layout) {
  const auto order = order_like(t, t.dim());
  local = in_dim_order(std::move(local), order);
  return is_symbolic(t) ? wrap_symbolic(std::move(local), layout, t.sym_sizes(), dense_strides(t.sym_sizes(), order))
                        : wrap(std::move(local), layout, t.sizes(), dense_strides(t.sizes(), order));
}

namespace {

// `async`: the piece's data may be on their way, so it cannot be copied into another order. It is contiguous.
at::Tensor with_moved(const at::Tensor& t, at::Tensor local, const LayoutPtr& layout, bool async, comm::InFlight rest) {
  if (!async || is_symbolic(t)) {
    return with_piece(t, std::move(local), layout);
  }
  const auto strides = dense_strides(t.sizes(), {});
  auto out = wrap(rest ? std::move(local) : in_dim_order(std::move(local), DimOrder()), layout, t.sizes(), strides);
  if (rest) {
    as_shard_tensor(out)->set_pending(c10::make_intrusive<PendingWork>(std::move(rest)));
  }
  return out;
}

} // namespace

at::Tensor moved(const at::Tensor& t, const LayoutPtr& to, const std::optional<MoveCause>& cause, bool async) {
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  if (shard_tensor(t, "redistribute").layout_ptr() == to) {
    return t;
  }
  comm::InFlight rest;
  auto local = moved_piece({t, to, cause}, async ? &rest : nullptr);
  return with_moved(t, std::move(local), to, async, std::move(rest));
}

std::vector<at::Tensor> moved(
    const std::vector<at::Tensor>& tensors,
    const std::vector<LayoutPtr>& layouts,
    const std::optional<MoveCause>& cause,
    bool async) {
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  std::vector<MoveRequest> requests;
  for (size_t i = 0; i < tensors.size(); ++i) {
    requests.push_back({tensors[i], layouts[i], cause});
  }
  std::vector<comm::InFlight> rests;
  auto pieces = moved_pieces(requests, async ? &rests : nullptr);
  rests.resize(tensors.size());
  std::vector<at::Tensor> out;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const bool stays = shard_tensor(tensors[i], "redistribute").layout_ptr() == layouts[i];
    out.push_back(stays ? tensors[i] : with_moved(tensors[i], std::move(pieces[i]), layouts[i], async, std::move(rests[i])));
  }
  return out;
}

} // namespace shardtensor
