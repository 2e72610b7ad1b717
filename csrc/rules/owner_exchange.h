// Sends items to the ranks that own them, if values say which ranks those are: where a pooled value came from, for example.
// Answers come back the same way. The number of items is exchanged first, so a graph cannot do this.
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

class OwnerExchange {
 public:
  // The owners: ranks with pieces of `layout`, a tensor whose dims from `lead` on have these sizes, cut into one run per rank.
  // `at`: the items' indices along each of those dims. Ranks that differ along other dims do not meet. Every rank of the mesh
  // calls it. Raises on all ranks that meet if an index is out of range.
  OwnerExchange(const Layout& layout, int64_t lead, c10::IntArrayRef sizes, const std::vector<at::Tensor>& at);

  // From one row for each of this rank's items to the rows of the items that this rank owns, ordered by the rank that they come
  // from.
  at::Tensor there(const at::Tensor& rows) const;
  // The reverse: from one row for each item that this rank owns to the rows of its own items, in their order.
  at::Tensor back(const at::Tensor& rows) const;

 private:
  at::Tensor exchanged(const at::Tensor& rows, const std::vector<int64_t>& out, const std::vector<int64_t>& in) const;

  LayoutPtr layout_;
  std::vector<int64_t> ranks_;          // ascending, this rank among them
  at::Tensor order_;                    // the items, sorted by owner
  std::vector<int64_t> sent_, arrived_; // items to and from each of the ranks
};

} // namespace shardtensor::rules
