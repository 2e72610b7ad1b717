// Sends items to the ranks that own them, if values say which ranks those are: where a pooled value came from, for example.
// Answers come back the same way. The number of items is exchanged first, so a graph cannot do this.
#pragma once

#include "layout/layout.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace shardtensor::rules {

// Sends parts[i] to ranks[i]. All of `ranks`, this rank among them, make the same call. Returns the flat parts that they send to
// this rank: received[i] elements from ranks[i].
std::vector<at::Tensor> exchange_parts(
    const std::vector<at::Tensor>& parts,
    const std::vector<int64_t>& received,
    const std::vector<int64_t>& ranks,
    const Mesh& mesh);

class OwnerExchange {
 public:
  // The owners: ranks with pieces of `layout`, a tensor whose dims from `lead` on have these sizes, cut into one run per rank.
  // `at`: the items' indices along each of those dims. Only ranks with the same indices along the other dims exchange items.
  // Every rank of the mesh calls it. If an index is out of range, all ranks that exchange items raise.
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
