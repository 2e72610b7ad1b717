// Brings to every rank what it reads of a tensor: its piece and a halo, or any other box. Such boxes overlap, so no layout
// describes them. The messages are found once, for all ranks alike; then each call sends them.
#pragma once

#include "comm/in_flight.h"
#include "layout/layout.h"
#include "layout/reach.h"

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

namespace shardtensor {

// What a rank reads, dim by dim: a box of the tensor, with padding beyond the edges of the whole. Where it goes round the edges,
// the same again.
using Stretches = c10::SmallVector<Stretch, 5>;

class Fetch {
 public:
  // `from`: where the pieces are; no strided shards. `of` gives what the rank at a coordinate reads. Ranks with other summands
  // (Partial in `from`) send each other nothing.
  Fetch(const Layout& from, c10::IntArrayRef sizes, c10::function_ref<Stretches(const Coordinate&)> of);

  // `local`: this rank's piece. Every rank of the mesh calls it. Returns what this rank reads, with these strides and `beyond` in
  // its cells of padding, or `local` itself if that is the same.
  at::Tensor operator()(const at::Tensor& local, c10::IntArrayRef strides, const at::Scalar& beyond) const;

  // The same in two steps: while the messages travel, the caller computes on its piece. Every rank of the mesh starts; what a
  // rank then takes of it is its own affair.
  struct Arriving {
    at::Tensor piece;
    at::Tensor beside = {}; // what other ranks send, if there are messages at all
    int64_t spacing = 1;    // of the messages in it
    comm::InFlight messages = {};
  };
  Arriving start(const at::Tensor& local) const;
  // Once the messages have arrived: a box of what this rank reads, in indices of its cells. Not in graphs.
  at::Tensor box(const Arriving& from, const Box& cells, c10::IntArrayRef strides, const at::Scalar& beyond) const;

  const Stretches& mine() const { // what this rank reads
    return mine_;
  }
  const Sizes& sizes() const { // of that, with its padding
    return made_;
  }

 private:
  at::Tensor by_gathering(const at::Tensor& local) const;
  void pad(const at::Tensor& out, c10::IntArrayRef first, const at::Scalar& beyond) const;

  LayoutPtr from_;
  Sizes sizes_; // of the whole tensor
  Stretches mine_;
  Sizes made_;
  std::vector<int64_t> peers_, sent_, received_;
  std::vector<Box> packed_, unpacked_, kept_from_, kept_to_;
  bool stays_ = false;   // this rank reads its piece and nothing else
  bool travels_ = false; // some rank sends something
};

} // namespace shardtensor
