// Brings every rank the box of a tensor that it reads: its piece and a halo, or any other box. Such boxes overlap, so no layout
// describes them. The messages are found once, alike on all ranks; each call then sends them.
#pragma once

#include "comm/in_flight.h"
#include "layout/layout.h"
#include "layout/reach.h"

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

namespace shardtensor {

// The box that a rank reads, dim by dim, with padding beyond the edges of the whole; a circular read may go round the edges.
using PaddedBox = c10::SmallVector<PaddedInterval, 5>;

class HaloExchange {
 public:
  // `from`: the layout of the pieces, without strided shards. `of` returns the box that the rank at a coordinate reads. If
  // `from` has Partial, only ranks with the same summands send to each other.
  HaloExchange(const Layout& from, c10::IntArrayRef sizes, c10::function_ref<PaddedBox(const Coordinate&)> of);

  // `local`: this rank's piece. Every rank of the mesh must call it. Returns the box that this rank reads, with these strides
  // and with `beyond` as padding; or `local` itself if this rank reads only its piece.
  at::Tensor operator()(const at::Tensor& local, c10::IntArrayRef strides, const at::Scalar& beyond) const;

  // The same in two steps, so that the caller can compute on its piece while the messages travel. Every rank of the mesh must
  // call start(); box() is local and optional.
  struct HaloInFlight {
    at::Tensor piece;
    at::Tensor beside = {}; // receives the data of other ranks, if there are messages at all
    int64_t spacing = 1;    // of the messages in it
    comm::InFlight messages = {};
  };
  HaloInFlight start(const at::Tensor& local) const;
  // After the messages have arrived: a box within the box that this rank reads, in its indices. Not in graphs.
  at::Tensor box(const HaloInFlight& from, const Box& cells, c10::IntArrayRef strides, const at::Scalar& beyond) const;

  const PaddedBox& mine() const { // the box that this rank reads
    return mine_;
  }
  const Sizes& sizes() const { // of the box mine(), with its padding
    return made_;
  }

 private:
  at::Tensor by_gathering(const at::Tensor& local) const;
  void pad(const at::Tensor& out, c10::IntArrayRef first, const at::Scalar& beyond) const;

  LayoutPtr from_;
  Sizes sizes_; // of the whole tensor
  PaddedBox mine_;
  Sizes made_;
  std::vector<int64_t> peers_, sent_, received_;
  std::vector<Box> packed_, unpacked_, kept_from_, kept_to_;
  bool stays_ = false;   // this rank reads only its piece
  bool travels_ = false; // some rank sends something
};

} // namespace shardtensor
