#include "rules/owner_exchange.h"

#include "redistribute/messages.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace shardtensor::rules {

namespace {

// The coordinates that differ from this rank's along the mesh dims that cut dim d only, in the order of their pieces.
std::vector<Coordinate> pieces_along(const Layout& layout, int64_t d, const Coordinate& from) {
  std::vector<Coordinate> out{from};
  for (int64_t m = 0; m < layout.ndim(); ++m) {
    if (!layout.placement(m).is_shard(d)) {
      continue;
    }
    std::vector<Coordinate> next;
    for (auto at : out) {
      for (at[m] = 0; at[m] < layout.mesh().size(m); ++at[m]) {
        next.push_back(at);
      }
    }
    out = std::move(next);
  }
  return out;
}

} // namespace

std::vector<at::Tensor> exchange_parts(
    const std::vector<at::Tensor>& parts,
    const std::vector<int64_t>& received,
    const std::vector<int64_t>& ranks,
    const Mesh& mesh) {
  std::vector<int64_t> peers, to_peers, from_peers;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] != mesh.rank()) {
      peers.push_back(ranks[i]);
      to_peers.push_back(parts[i].numel());
      from_peers.push_back(received[i]);
    }
  }
  auto mail = messages(parts[0], peers, to_peers, from_peers, mesh, mesh.size());
  const auto slots = kernels::parts_of(mail.in, message_spacing(mail));
  for (size_t i = 0, next = 0; i < ranks.size(); ++i) {
    if (ranks[i] != mesh.rank()) {
      slots[next++].view(parts[i].sizes()).copy_(parts[i]);
    }
  }
  const auto coming = mail.out;
  const kernels::Spacing arriving{from_peers, mail.spacing};
  comm::start(std::move(mail)).wait();
  auto arrived = kernels::parts_of(coming, arriving);
  const auto me = std::find(ranks.begin(), ranks.end(), mesh.rank()) - ranks.begin();
  arrived.insert(arrived.begin() + me, parts[me].flatten());
  return arrived;
}

OwnerExchange::OwnerExchange(const Layout& layout, int64_t lead, c10::IntArrayRef sizes, const std::vector<at::Tensor>& at)
    : layout_(LayoutPtr::reclaim_copy(&layout)) {
  const auto& mesh = layout.mesh();
  const auto options = at[0].options();
  std::vector<Coordinate> owners{mesh.coordinate()};
  auto owner = at::zeros_like(at[0]);
  auto outside = at::zeros_like(at[0], options.dtype(at::kBool));
  for (size_t i = 0; i < sizes.size(); ++i) {
    outside = outside.logical_or(at[i].lt(0)).logical_or(at[i].ge(sizes[i]));
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto d = lead + static_cast<int64_t>(i);
    std::vector<int64_t> ends;
    for (const auto& c : pieces_along(layout, d, mesh.coordinate())) {
      const auto run = layout.intervals(d, sizes[i], c)[0];
      ends.push_back(run.end());
    }
    if (ends.size() == 1) {
      continue;
    }
    const auto piece = at::bucketize(at[i].clamp(0, sizes[i] - 1), at::tensor(ends, at::kLong).to(options.device()), false, true);
    owner = owner.mul(static_cast<int64_t>(ends.size())).add(piece);
    std::vector<Coordinate> next;
    for (const auto& c : owners) {
      const auto more = pieces_along(layout, d, c);
      next.insert(next.end(), more.begin(), more.end());
    }
    owners = std::move(next);
  }
  std::vector<int64_t> rank_of;
  for (const auto& c : owners) {
    rank_of.push_back(mesh.rank_at(c));
  }
  ranks_ = rank_of;
  std::sort(ranks_.begin(), ranks_.end());
  const auto nth = [&](int64_t rank) { return std::lower_bound(ranks_.begin(), ranks_.end(), rank) - ranks_.begin(); };
  if (!std::is_sorted(rank_of.begin(), rank_of.end())) {
    std::vector<int64_t> places;
    for (const auto rank : rank_of) {
      places.push_back(nth(rank));
    }
    owner = at::tensor(places, at::kLong).to(options.device()).index_select(0, owner);
  }
  order_ = std::get<1>(owner.sort(/*stable=*/true, 0, false));
  const auto n = static_cast<int64_t>(ranks_.size());
  const auto counts = at::stack({at::bincount(owner, {}, n), outside.any().to(at::kLong).expand(n)}, 1);
  const std::vector<int64_t> two(ranks_.size(), 2);
  const auto come = exchanged(counts.flatten(), two, two);
  const auto both = at::cat({counts.flatten(), come}).cpu();
  const auto* numbers = both.const_data_ptr<int64_t>();
  for (int64_t k = 0; k < n; ++k) {
    TORCH_CHECK(
        numbers[2 * (n + k) + 1] == 0, "an index of rank ", ranks_[k], " lies outside of the planes of ", sizes, " (rank ",
        mesh.rank(), ")");
    sent_.push_back(numbers[2 * k]);
    arrived_.push_back(numbers[2 * (n + k)]);
  }
}

// Sends out[i] of the `rows` to the i-th rank, in order, and receives in[i] rows from it.
at::Tensor OwnerExchange::exchanged(
    const at::Tensor& rows, const std::vector<int64_t>& out, const std::vector<int64_t>& in) const {
  return ranks_.size() == 1 ? rows : at::cat(exchange_parts(kernels::parts_of(rows, {out}), in, ranks_, layout_->mesh()));
}

at::Tensor OwnerExchange::there(const at::Tensor& rows) const {
  return exchanged(rows.index_select(0, order_), sent_, arrived_);
}

at::Tensor OwnerExchange::back(const at::Tensor& rows) const {
  const auto sorted = exchanged(rows, arrived_, sent_);
  return at::empty_like(sorted).index_copy_(0, order_, sorted);
}

} // namespace shardtensor::rules
