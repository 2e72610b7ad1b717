// Moves a tensor from one list of boxes at ranks to another, in one exchange. The boxes may be at places that no layout
// describes.
#pragma once

#include "layout/layout.h"

#include <ATen/core/Tensor.h>

namespace shardtensor {

// Whether the boxes share an element.
bool meet(const Box& a, const Box& b);
// The boxes must meet.
Box intersection(const Box& a, const Box& b);
// The box in indices that are counted from `origin`.
Box within(Box box, c10::IntArrayRef origin);
// Appends the part of `box` outside `hole`: a slab before and one after the hole along each dim.
void subtract(Box box, const Box& hole, std::vector<Box>& out);

struct RankBox {
  int64_t rank; // global
  Box box;
};

// Part `box`, in global indices, goes from held[from] to wanted[to].
struct BoxMove {
  size_t from, to;
  Box box;
};
// Every element of every wanted box, once: from the rank itself if it holds the element, else from one of its holders. Sorted
// by `from`, then `to`. Throws if no rank holds an element.
std::vector<BoxMove> match(const std::vector<RankBox>& held, const std::vector<RankBox>& wanted);

// Every rank of the mesh calls it with equal lists. `pieces` are this rank's boxes of `held`, in order. Returns this rank's
// boxes of `wanted`, in new memory. Each element arrives once, from this rank itself if it holds the element. An element that
// no rank holds raises on all ranks. Time grows as the product of the lists' lengths.
std::vector<at::Tensor> exchange(
    const std::vector<at::Tensor>& pieces,
    const std::vector<RankBox>& held,
    const std::vector<RankBox>& wanted,
    const Mesh& mesh,
    const at::TensorOptions& options);

} // namespace shardtensor
