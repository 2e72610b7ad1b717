// Items that belong to pieces of other ranks, as values say: where a pooled value came from, what a grid reads. Each rank sends
// its items to their owners, and answers come back. How many there are travels first, so a graph cannot do this.
#pragma once

#include "layout/layout.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace shardtensor::rules {

// Sends part i to ranks[i], which all do the same; this rank is among them. Returns what they send to it: received[i] elements of
// each, flat.
std::vector<at::Tensor> exchange_parts(
    const std::vector<at::Tensor>& parts,
    const std::vector<int64_t>& received,
    const std::vector<int64_t>& ranks,
    const Mesh& mesh);

class Routed {
 public:
  // The owners: ranks with pieces of `layout`, a tensor whose dims from `lead` on have these sizes, cut into one run per rank.
  // `at`: the items' indices along each of those dims. Ranks that differ along other dims do not meet. Every rank of the mesh
  // calls it. Raises if an index lies outside, on all ranks that meet.
  Routed(const Layout& layout, int64_t lead, c10::IntArrayRef sizes, const std::vector<at::Tensor>& at);

  // A row for each of this rank's items -> the rows of the items that this rank owns, ordered by the rank they come from.
  at::Tensor there(const at::Tensor& rows) const;
  // A row for each item that this rank owns -> those of its own items, in their order.
  at::Tensor back(const at::Tensor& rows) const;

 private:
  at::Tensor exchanged(const at::Tensor& rows, const std::vector<int64_t>& out, const std::vector<int64_t>& in) const;

  LayoutPtr layout_;
  std::vector<int64_t> ranks_;          // ascending, this rank among them
  at::Tensor order_;                    // the items, sorted by owner
  std::vector<int64_t> sent_, arrived_; // items to and from each of the ranks
};

} // namespace shardtensor::rules
