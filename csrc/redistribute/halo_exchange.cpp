#include "redistribute/halo_exchange.h"

#include "comm/comm.h"
#include "comm/tensor_kind.h"
#include "comm/traced.h"
#include "kernels/boxes.h"
#include "redistribute/exchange.h"
#include "redistribute/messages.h"
#include "redistribute/redistribute.h"
#include "redistribute/traced.h"
#include "redistribute/watch.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <map>

namespace shardtensor {

namespace {

// A box of the tensor that a rank reads. `origin`: the indices at its first cells.
struct ReadBox {
  Box box;
  Sizes origin;
};

// One box if no read goes round the edges.
std::vector<ReadBox> reads_of(const PaddedBox& stretches, c10::IntArrayRef sizes) {
  std::vector<ReadBox> out(1);
  for (size_t d = 0; d < stretches.size(); ++d) {
    std::vector<ReadBox> next;
    for (const auto& turn : wrapped_runs(stretches[d].inside, sizes[d])) {
      for (auto one : out) {
        one.box.offsets.push_back(turn.inside.start);
        one.box.sizes.push_back(turn.inside.length);
        one.origin.push_back(stretches[d].start() - turn.first);
        next.push_back(std::move(one));
      }
    }
    out = std::move(next);
  }
  return out;
}

// Whether both hold the same summands.
bool same_summands(const Layout& layout, const Coordinate& a, const Coordinate& b) {
  return !layout.any_mesh_dim([&](int64_t m) { return layout.placement(m).is_partial() && a[m] != b[m]; });
}

} // namespace

HaloExchange::HaloExchange(const Layout& from, c10::IntArrayRef sizes, c10::function_ref<PaddedBox(const Coordinate&)> of)
    : from_(LayoutPtr::reclaim_copy(&from)), sizes_(sizes.begin(), sizes.end()) {
  const auto& mesh = from.mesh();
  if (!mesh.has_this_rank()) {
    return;
  }
  const auto me = mesh.rank();
  std::vector<RankBox> held, wanted, again; // again: wanted too, from beyond the edges
  std::vector<Sizes> origins, origins_again;
  for (int64_t i = 0; i < mesh.size(); ++i) {
    const auto at = mesh.coordinate_at(i);
    if (!same_summands(from, at, mesh.coordinate())) {
      continue;
    }
    const auto rank = mesh.rank_at(at);
    Box piece;
    for (size_t d = 0; d < sizes.size(); ++d) {
      const auto runs = from.intervals(static_cast<int64_t>(d), sizes[d], at);
      TORCH_INTERNAL_ASSERT(runs.size() == 1, "fetch: from ", from.str(), ", whose pieces have several runs");
      piece.offsets.push_back(runs[0].start);
      piece.sizes.push_back(runs[0].length);
    }
    held.push_back({rank, std::move(piece)});
    auto stretches = of(at);
    bool first = true;
    for (auto& read : reads_of(stretches, sizes)) {
      (first ? wanted : again).push_back({rank, std::move(read.box)});
      (first ? origins : origins_again).push_back(std::move(read.origin));
      first = false;
    }
    if (rank == me) {
      mine_ = std::move(stretches);
    }
  }
  std::move(again.begin(), again.end(), std::back_inserter(wanted)); // after the others, so that those keep the order of `held`
  std::move(origins_again.begin(), origins_again.end(), std::back_inserter(origins));
  Sizes held_at;
  for (const auto& p : held) {
    if (p.rank == me) {
      held_at = p.box.offsets;
      stays_ = true;
      for (size_t d = 0; d < mine_.size(); ++d) {
        made_.push_back(mine_[d].length());
        stays_ = stays_ && made_[d] == p.box.sizes[d] && (mine_[d].start() == held_at[d] || made_[d] == 0);
      }
    }
  }
  struct PeerBoxes {
    std::vector<Box> sent, received;
  };
  std::map<int64_t, PeerBoxes> messages; // by rank, in an order that both ends know
  for (const auto& part : match(held, wanted)) {
    const auto source = held[part.from].rank, target = wanted[part.to].rank;
    travels_ = travels_ || source != target;
    if (source == me && target == me) {
      kept_from_.push_back(within(part.box, held_at));
      kept_to_.push_back(within(part.box, origins[part.to]));
    } else if (source == me) {
      messages[target].sent.push_back(within(part.box, held_at));
    } else if (target == me) {
      messages[source].received.push_back(within(part.box, origins[part.to]));
    }
  }
  const auto append = [](const std::vector<Box>& boxes, std::vector<Box>& all, std::vector<int64_t>& numels) {
    all.insert(all.end(), boxes.begin(), boxes.end());
    numels.push_back(numel_of(boxes));
  };
  for (const auto& [rank, message] : messages) {
    peers_.push_back(rank);
    append(message.sent, packed_, sent_);
    append(message.received, unpacked_, received_);
  }
}

// `first`: the cell at which `out` begins.
void HaloExchange::pad(const at::Tensor& out, c10::IntArrayRef first, const at::Scalar& beyond) const {
  for (size_t d = 0; d < mine_.size(); ++d) {
    const auto dim = static_cast<int64_t>(d);
    const auto& s = mine_[d];
    const auto size = out.size(dim);
    const auto before = std::clamp<int64_t>(s.before - first[d], 0, size);
    const auto after = std::clamp<int64_t>(first[d] + size - (s.length() - s.after), 0, size);
    if (before) {
      out.narrow(dim, 0, before).fill_(beyond);
    }
    if (after) {
      out.narrow(dim, size - after, after).fill_(beyond);
    }
  }
}

// The box without its padding, in a graph, which cannot send single messages: dims in which a rank reads other ranks' indices
// become whole.
at::Tensor HaloExchange::by_gathering(const at::Tensor& local) const {
  auto placements = from_->placements();
  for (auto& p : placements) {
    p = p.is_partial() ? p : Placement::replicate();
  }
  const auto whole = Layout::make(from_->mesh_ptr(), std::move(placements));
  auto out = redistribute(local, *from_, *whole, sizes_);
  for (size_t d = 0; d < mine_.size(); ++d) {
    const auto dim = static_cast<int64_t>(d);
    const auto [start, length] = mine_[d].inside;
    if (length && (start < 0 || start + length > sizes_[d])) {
      const auto at = at::arange(start, start + length, out.options().dtype(at::kLong));
      out = out.index_select(dim, at.remainder(sizes_[d]));
    } else {
      out = out.narrow(dim, length ? start : 0, length);
    }
  }
  return out;
}

HaloExchange::HaloInFlight HaloExchange::start(const at::Tensor& given) const {
  if (!is_traced(given)) {
    has_values(given); // or throws
  }
  HaloInFlight out{kernels::resolved(given)};
  if (!travels_) {
    return out;
  }
  on_halo({*from_, sizes_, peers_, sent_, received_, static_cast<int64_t>(out.piece.element_size())});
  auto boxes = messages(out.piece, peers_, sent_, received_, from_->mesh(), from_->mesh().size());
  pack(boxes, out.piece, packed_);
  out.spacing = boxes.spacing;
  out.beside = boxes.out;
  out.messages = comm::start(std::move(boxes));
  return out;
}

at::Tensor HaloExchange::box(
    const HaloInFlight& from, const Box& cells, c10::IntArrayRef strides, const at::Scalar& beyond) const {
  auto out = at::empty_strided(cells.sizes, strides, from.piece.options());
  pad(out, cells.offsets, beyond);
  const auto take = [&](const at::Tensor& source, const Box& given,
                        const Box& at) { // `given` is the box of the source, `at` its cells
    if (meet(at, cells)) {
      const auto common = intersection(at, cells);
      auto here = within(common, at.offsets);
      for (size_t d = 0; d < here.offsets.size(); ++d) {
        here.offsets[d] += given.offsets[d];
      }
      kernels::copy(source, here, out, within(common, cells.offsets));
    }
  };
  for (size_t i = 0; i < kept_from_.size(); ++i) {
    take(from.piece, kept_from_[i], kept_to_[i]);
  }
  auto box = unpacked_.begin();
  for (const auto& message : kernels::parts_of(from.beside, {received_, from.spacing})) {
    for (int64_t at = 0; at < message.numel(); ++box) {
      const auto numel = box->numel();
      take(
          message.narrow(0, std::exchange(at, at + numel), numel).view(box->sizes), {Sizes(box->sizes.size(), 0), box->sizes},
          *box);
    }
  }
  return out;
}

at::Tensor HaloExchange::operator()(const at::Tensor& given, c10::IntArrayRef strides, const at::Scalar& beyond) const {
  if (!travels_ && stays_) {
    return given;
  }
  const bool traced = is_traced(given);
  const Sizes from_first(made_.size(), 0);
  if (traced && travels_ && !may_transfer_in_graph(from_->mesh())) {
    const auto local = kernels::resolved(given);
    auto out = at::empty_strided(made_, strides, local.options());
    auto inside = out;
    for (size_t d = 0; d < mine_.size(); ++d) {
      inside = inside.narrow(static_cast<int64_t>(d), mine_[d].before, mine_[d].inside.length);
    }
    inside.copy_(by_gathering(local));
    pad(out, from_first, beyond);
    return out;
  }
  auto arriving = start(given);
  arriving.messages.wait();
  const auto &local = arriving.piece, &arrived = arriving.beside;
  if (stays_) {
    return traced ? comm::traced::after(local, {arrived}) : local;
  }
  auto out = at::empty_strided(made_, strides, local.options());
  pad(out, from_first, beyond);
  if (!kept_from_.empty()) {
    kernels::copy(local, kept_from_, out, kept_to_);
  }
  if (!unpacked_.empty()) {
    kernels::unpack(arrived, unpacked_, out, {received_, arriving.spacing});
  }
  if (traced && travels_) {
    return comm::traced::after(out, {arrived}); // also on a rank that receives nothing
  }
  return out;
}

} // namespace shardtensor
