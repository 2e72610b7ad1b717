#include "comm/comm.h"

#include "comm/backend.h"
#include "comm/bytes.h"
#include "comm/doing.h"
#include "comm/faults.h"
#include "comm/range.h"
#include "comm/reducible.h"
#include "comm/together.h"
#include "comm/traced.h"
#include "comm/values.h"
#include "comm/where.h"

#include <ATen/ATen.h>
#include <torch/headeronly/version.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <atomic>
#include <limits>
#include <stdexcept>

namespace shardtensor::comm {

namespace {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

std::array<std::atomic<int64_t>, kKinds> g_calls{};
std::array<std::atomic<int64_t>, kKinds> g_bytes{};

std::atomic<Listener> g_listener{nullptr};
thread_local int64_t t_telling = 0;
thread_local int64_t t_aside = 0;

struct Raised {
  explicit Raised(int64_t& n) : n_(n) {
    ++n_;
  }
  ~Raised() {
    --n_;
  }
  Raised(const Raised&) = delete;
  Raised& operator=(const Raised&) = delete;

 private:
  int64_t& n_;
};

// Tells the listener what is about to be called, even if this rank has nothing to send.
void tell(Kind kind, int64_t bytes, const Mesh& mesh, int64_t mesh_dim) {
  auto* listener = g_listener.load(std::memory_order_relaxed);
  if (C10_LIKELY(!listener) || t_telling || t_aside) {
    return;
  }
  const Raised telling(t_telling);
  listener(kind, bytes, mesh, mesh_dim);
}

// The call lasts as long as what this returns.
[[nodiscard]] Range begin(Kind kind, int64_t bytes, const Mesh& mesh, int64_t mesh_dim) {
  tell(kind, bytes, mesh, mesh_dim);
  if (C10_LIKELY(!t_aside)) {
    g_calls[static_cast<size_t>(kind)].fetch_add(1, std::memory_order_relaxed);
    g_bytes[static_cast<size_t>(kind)].fetch_add(bytes, std::memory_order_relaxed);
  }
  return Range(kind, bytes);
}

// Looks the group up by name each time: this finds a group that was destroyed and made again under its name, and keeps no group
// alive.
GroupPtr group_of(const Mesh& mesh, int64_t mesh_dim, const char* what) {
  const auto& name = mesh.group(mesh_dim);
  TORCH_CHECK(
      !name.empty(), "shardtensor: ", what, " along mesh dim ", mesh_dim, " of ", mesh.str(), ", but rank ", mesh.rank(),
      " has no process group there; the mesh was made without groups, or does not hold this rank");
  return c10d::resolve_process_group(name);
}

std::vector<int64_t> times(at::IntArrayRef sizes, int64_t factor) {
  auto out = sizes.vec();
  for (auto& n : out) {
    n *= factor;
  }
  return out;
}

constexpr int kTag = 0x5d; // for messages between two ranks, different from users' tags
constexpr int kTagApart = 0x5e;

bool stays(const at::Tensor& t, const Mesh& mesh, int64_t mesh_dim) {
  return is_alone(mesh, mesh_dim) || !has_values(t);
}

// The calls that take one flat buffer; torch 2.15 renamed them.
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 15
constexpr auto kExchange = &c10d::ProcessGroup::alltoall_base;
constexpr auto kGather = &c10d::ProcessGroup::_allgather_base;
constexpr auto kReduce = &c10d::ProcessGroup::_reduce_scatter_base;
#else
constexpr auto kExchange = &c10d::ProcessGroup::all_to_all_single;
constexpr auto kGather = &c10d::ProcessGroup::all_gather_single;
constexpr auto kReduce = &c10d::ProcessGroup::reduce_scatter_single;
#endif

// What travels between ranks, as bytes: `in` holds the parts for rank or peer 0, 1, ... one after the other, `out` those from
// each. Parts start at multiples of `start`.
struct Parcel {
  at::Tensor out, in;
  std::vector<int64_t> out_sizes, in_sizes;
  int64_t start = 1;

  int64_t sent() const {
    return c10::sum_integers(in_sizes);
  }
};

Parcel parcel_of(
    const at::Tensor& out, at::IntArrayRef out_sizes, const at::Tensor& in, at::IntArrayRef in_sizes, int64_t spacing) {
  const auto item = out.element_size();
  return {as_bytes(out), as_bytes(in), times(out_sizes, item), times(in_sizes, item), spacing > 1 ? spacing * item : 1};
}

WorkPtr exchange_bytes(c10d::ProcessGroup& group, Parcel& p) {
  return (group.*kExchange)(p.out, p.in, p.out_sizes, p.in_sizes, {});
}

InFlight nothing() {
  return {};
}

// All ranks of the group are about to make this call. facts(): a hash of what all of them know about it. `needs_all`: none of
// them gets a result before all have begun.
template <typename Facts>
void enter(
    Where& where, const GroupPtr& group, const Backend& backend, const Mesh& mesh, const Facts& facts, bool needs_all = true) {
  if (C10_LIKELY(backend.blocks && faults::notice())) {
    where.ticket = faults::enter(
        group, mesh, where.mesh_dim, c10::get_hash(where.kind, where.mesh_dim, facts()), needs_all, [&] { return where.str(); });
  }
}

// Messages between two ranks of a group: parts of buffers of bytes. Empty ones are not sent. If the backend has batches, they are
// only recorded, to be made as one by start().
class Messages {
 public:
  Messages(const Where& where, c10d::ProcessGroup& group, const Backend& rules, int tag = kTag)
      : where_(where), group_(group), rules_(rules), tag_(tag) {}
  // After an error: a batch that nobody ends makes all later ones raise, and peers wait for what has been sent.
  ~Messages() {
    if (open_ || !works_.empty()) {
      try {
        start();
      } catch (...) { // there is one error already
      }
    }
  }
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  void send(const at::Tensor& bytes, int64_t at, int64_t count, int64_t rank) {
    add(bytes, at, count, [&](auto& part) { return group_.send(part, static_cast<int>(rank), tag_); });
  }
  void receive(const at::Tensor& bytes, int64_t at, int64_t count, int64_t rank) {
    add(bytes, at, count, [&](auto& part) { return group_.recv(part, static_cast<int>(rank), tag_); });
  }
  InFlight start() {
    if (!open_ && works_.empty()) {
      return nothing();
    }
    if (std::exchange(open_, false)) {
      works_ = {guarded(where_, [&] { return group_.endCoalescing(device_); })};
    }
    return started(where_, rules_, std::move(works_), std::move(buffers_));
  }

 private:
  template <typename F>
  void add(const at::Tensor& bytes, int64_t at, int64_t count, const F& call) {
    if (count == 0) {
      return;
    }
    std::vector<at::Tensor> part{bytes.narrow(0, at, count)};
    if (rules_.batches && !open_) {
      device_ = bytes.device().type();
      guarded(where_, [&] { group_.startCoalescing(device_); });
      open_ = true;
    }
    works_.push_back(guarded(where_, [&] { return call(part); }));
    buffers_.push_back(std::move(part[0]));
  }

  const Where& where_;
  c10d::ProcessGroup& group_;
  const Backend& rules_;
  const int tag_;
  c10::DeviceType device_ = c10::DeviceType::CPU;
  bool open_ = false;
  std::vector<WorkPtr> works_;
  std::vector<at::Tensor> buffers_;
};

c10d::ReduceOp op_for(ReduceOp op, at::ScalarType dtype) {
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Avg:
    case ReduceOp::Norm:
      return c10d::ReduceOp::SUM;
    case ReduceOp::Product:
      return c10d::ReduceOp::PRODUCT;
    case ReduceOp::Min:
      return c10d::ReduceOp::MIN;
    case ReduceOp::Max:
      return c10d::ReduceOp::MAX;
    case ReduceOp::Band:
      return dtype == at::kBool ? c10d::ReduceOp::MIN : c10d::ReduceOp::BAND;
    case ReduceOp::Bor:
      return dtype == at::kBool ? c10d::ReduceOp::MAX : c10d::ReduceOp::BOR;
    case ReduceOp::Bxor:
      return dtype == at::kBool ? c10d::ReduceOp::SUM : c10d::ReduceOp::BXOR;
  }
  return c10d::ReduceOp::SUM;
}

} // namespace

Counts counts() {
  Counts out;
  for (size_t i = 0; i < kKinds; ++i) {
    out.calls[i] = g_calls[i].load(std::memory_order_relaxed);
    out.bytes[i] = g_bytes[i].load(std::memory_order_relaxed);
  }
  return out;
}

void reset_counts() {
  for (size_t i = 0; i < kKinds; ++i) {
    g_calls[i] = 0;
    g_bytes[i] = 0;
  }
}

Aside::Aside() {
  ++t_aside;
}
Aside::~Aside() {
  --t_aside;
}

void set_listener(Listener listener) {
  g_listener = listener;
}

namespace {

bool of_one_size(const std::vector<at::Tensor>& pieces) {
  return std::all_of(pieces.begin(), pieces.end(), [&](const auto& p) { return p.numel() == pieces[0].numel(); });
}

std::vector<int64_t> coordinates_by_group_rank(const Mesh& mesh, int64_t mesh_dim) {
  std::vector<int64_t> out(mesh.size(mesh_dim));
  for (int64_t c = 0; c < mesh.size(mesh_dim); ++c) {
    out[mesh.group_rank(mesh_dim, c)] = c;
  }
  return out;
}

std::vector<int64_t> group_ranks(const Mesh& mesh, int64_t mesh_dim) {
  std::vector<int64_t> out(mesh.size(mesh_dim));
  for (int64_t c = 0; c < mesh.size(mesh_dim); ++c) {
    out[c] = mesh.group_rank(mesh_dim, c);
  }
  return out;
}

InFlight gather_at_once(
    const Where& where,
    c10d::ProcessGroup& group,
    const std::vector<at::Tensor>& pieces,
    const Mesh& mesh,
    bool as_one,
    const Backend& rules) {
  std::vector<at::Tensor> own{as_bytes(pieces[mesh.coordinate()[where.mesh_dim]])};
  if (as_one && of_one_size(pieces) && !mesh.is_reordered(where.mesh_dim)) {
    const auto first = as_bytes(pieces[0]);
    auto whole = first.as_strided({own[0].numel() * static_cast<int64_t>(pieces.size())}, {1}, first.storage_offset());
    return started(where, rules, {guarded(where, [&] { return (group.*kGather)(whole, own[0], {}); })}, {whole});
  }
  std::vector<std::vector<at::Tensor>> places(1);
  for (const auto c : coordinates_by_group_rank(mesh, where.mesh_dim)) {
    places[0].push_back(as_bytes(pieces[c]));
  }
  return started(where, rules, {guarded(where, [&] { return group.allgather(places, own); })}, places[0]);
}

// One broadcast per piece, directly into its place: any sizes, no padding, no copy afterwards.
InFlight gather_by_broadcasts(
    const Where& where,
    c10d::ProcessGroup& group,
    const std::vector<at::Tensor>& pieces,
    const Mesh& mesh,
    const Backend& rules) {
  std::vector<WorkPtr> works;
  std::vector<at::Tensor> buffers;
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (pieces[i].numel() == 0) {
      continue;
    }
    std::vector<at::Tensor> buffer{as_bytes(pieces[i])};
    buffers.push_back(buffer[0]);
    c10d::BroadcastOptions options;
    options.rootRank = mesh.group_rank(where.mesh_dim, static_cast<int64_t>(i));
    works.push_back(guarded(where, [&] { return group.broadcast(buffer, options); }));
  }
  return started(where, rules, std::move(works), std::move(buffers));
}

// Whether the list begins with two empty pieces, in the order of the group's ranks.
bool begins_empty(const std::vector<at::Tensor>& pieces, const Mesh& mesh, int64_t mesh_dim) {
  return std::all_of(pieces.begin(), pieces.end(), [&](const at::Tensor& piece) {
    return piece.numel() == 0 || mesh.group_rank(mesh_dim, &piece - pieces.data()) > 1;
  });
}

InFlight gather_from(
    const Where& where,
    c10d::ProcessGroup& group,
    const std::vector<at::Tensor>& pieces,
    const Mesh& mesh,
    bool as_one,
    const Backend& rules) {
  const bool at_once = rules.gathers && !(rules.by_address && begins_empty(pieces, mesh, where.mesh_dim));
  return at_once ? gather_at_once(where, group, pieces, mesh, as_one, rules)
                 : gather_by_broadcasts(where, group, pieces, mesh, rules);
}

bool is_bitwise(ReduceOp op) {
  return op == ReduceOp::Band || op == ReduceOp::Bor || op == ReduceOp::Bxor;
}

void combine(at::Tensor& into, const at::Tensor& piece, const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::PRODUCT:
      into.mul_(piece);
      break;
    case c10d::ReduceOp::MIN:
      at::minimum_out(into, into, piece);
      break;
    case c10d::ReduceOp::MAX:
      at::maximum_out(into, into, piece);
      break;
    case c10d::ReduceOp::BAND:
      into.bitwise_and_(piece);
      break;
    case c10d::ReduceOp::BOR:
      into.bitwise_or_(piece);
      break;
    case c10d::ReduceOp::BXOR:
      into.bitwise_xor_(piece);
      break;
    default:
      into.add_(piece);
  }
}

// Every rank gathers and combines all summands, in the same order: for an `op` that the backend does not support, and for few
// bytes.
InFlight reduce_by_gathering(
    const Where& where,
    c10d::ProcessGroup& group,
    at::Tensor& buffer,
    const Mesh& mesh,
    const c10d::ReduceOp& op,
    const Backend& backend) {
  const auto n = mesh.size(where.mesh_dim);
  auto pieces = at::empty({n, buffer.numel()}, buffer.options()).unbind();
  pieces[mesh.coordinate()[where.mesh_dim]].copy_(buffer.view(-1));
  auto gathered = gather_from(where, group, pieces, mesh, /*as_one=*/true, backend);
  buffer = pieces[0].view(buffer.sizes());
  gathered.then(
      [pieces, op]() mutable {
        for (size_t c = 1; c < pieces.size(); ++c) {
          combine(pieces[0], pieces[c], op);
        }
      },
      pieces);
  return gathered;
}

InFlight reduce_at_once(
    const Where& where, c10d::ProcessGroup& group, const at::Tensor& buffer, const c10d::ReduceOp& op, const Backend& rules) {
  std::vector<at::Tensor> tensors{buffer};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  return started(where, rules, {guarded(where, [&] { return group.allreduce(tensors, options); })}, tensors);
}

} // namespace

InFlight start_all_reduce(at::Tensor tensor, const Mesh& mesh, int64_t mesh_dim, ReduceOp op) {
  if (is_traced(tensor)) {
    tensor.copy_(traced::all_reduce(tensor, mesh, mesh_dim, op));
    return nothing();
  }
  if (stays(tensor, mesh, mesh_dim)) {
    return nothing();
  }
  TORCH_CHECK(
      can_reduce(tensor.scalar_type(), op), "shardtensor: a complex tensor can be reduced over ranks only by sum or avg, not by ",
      shardtensor::name_of(op)); // also if it is empty here: other ranks' may not be
  if (tensor.numel() == 0) {
    tell(Kind::AllReduce, 0, mesh, mesh_dim);
    return nothing();
  }
  if (auto* together = Together::open()) {
    return together->note(
        {.what = Together::Call::What::Reduce,
         .mesh = MeshPtr::reclaim_copy(&mesh),
         .mesh_dim = mesh_dim,
         .op = op,
         .out = tensor});
  }
  auto group = group_of(mesh, mesh_dim, "all_reduce");
  Where where(Kind::AllReduce, mesh, mesh_dim);
  auto buffer = reducible(tensor, op);
  const auto range = begin(Kind::AllReduce, static_cast<int64_t>(buffer.nbytes()), mesh, mesh_dim);
  const auto backend = backend_of(*group, tensor.device());
  enter(where, group, backend, mesh, [&] { return c10::get_hash(op, tensor.scalar_type(), tensor.numel()); });
  const auto how = op_for(op, tensor.scalar_type());
  const bool gathers = (is_bitwise(op) && tensor.scalar_type() != at::kBool && !backend.bitwise) ||
                       static_cast<int64_t>(buffer.nbytes()) * mesh.size(mesh_dim) <= backend.latency;
  auto reduced = gathers ? reduce_by_gathering(where, *group, buffer, mesh, how, backend)
                         : reduce_at_once(where, *group, buffer, how, backend);
  const std::vector<at::Tensor> used{tensor, buffer};
  reduced.then(
      [tensor = std::move(tensor), buffer = std::move(buffer), op, n = mesh.size(mesh_dim)] {
        const auto made = from_reducible(buffer, tensor, op, n);
        if (!made.is_alias_of(tensor)) {
          tensor.copy_(made);
        }
      },
      used);
  return reduced;
}

bool can_sum_apart(c10::Device device, const Mesh& mesh, int64_t mesh_dim) {
  if (mesh.group(mesh_dim).empty()) {
    return false;
  }
  const auto rules = backend_of(*group_of(mesh, mesh_dim, "all_reduce"), device);
  return rules.blocks && rules.sends;
}

InFlight start_sum_apart(at::Tensor tensor, const Mesh& mesh, int64_t mesh_dim) {
  auto group = group_of(mesh, mesh_dim, "all_reduce");
  Where where(Kind::AllReduce, mesh, mesh_dim);
  const auto n = tensor.numel(), ranks = mesh.size(mesh_dim), me = mesh.coordinate()[mesh_dim];
  const auto range = begin(Kind::AllReduce, static_cast<int64_t>(tensor.nbytes()), mesh, mesh_dim);
  const auto backend = backend_of(*group, tensor.device());
  enter(where, group, backend, mesh, [&] { return c10::get_hash(kTagApart, tensor.scalar_type(), n); });
  where.ticket.by_messages = true;
  const auto all = at::empty({ranks * n}, tensor.options());
  all.narrow(0, me * n, n).copy_(tensor);
  Messages messages(where, *group, backend, kTagApart);
  const auto in_group = group_ranks(mesh, mesh_dim);
  for (int64_t c = 0; c < ranks; ++c) {
    if (c != me) {
      messages.receive(all, c * n, n, in_group[c]);
      messages.send(all, me * n, n, in_group[c]);
    }
  }
  auto moving = messages.start();
  moving.then(
      [tensor, all, ranks, n] {
        auto sum = all.narrow(0, 0, n);
        for (int64_t c = 1; c < ranks; ++c) {
          sum.add_(all.narrow(0, c * n, n)); // at::sum would begin with 0.0, and lose the sign of -0.0
        }
        tensor.copy_(sum.view(tensor.sizes()));
      },
      {tensor, all});
  return moving;
}

void all_reduce(at::Tensor& tensor, const Mesh& mesh, int64_t mesh_dim, ReduceOp op) {
  start_all_reduce(tensor, mesh, mesh_dim, op).wait();
}

void all_reduce_over(at::Tensor& tensor, const Mesh& mesh, uint64_t mesh_dims, ReduceOp op) {
  for (int64_t m = 0; m < mesh.ndim(); ++m) {
    if (mesh_dims >> m & 1) {
      all_reduce(tensor, mesh, m, op);
    }
  }
}

namespace {

// Pieces of any size travel in buffers of the largest piece's size.
void gather_in_graph(std::vector<at::Tensor>& pieces, const at::Tensor& mine, const Mesh& mesh, int64_t mesh_dim) {
  if (is_alone(mesh, mesh_dim)) {
    pieces[0].copy_(mine);
    return;
  }
  auto most = pieces[0].sym_numel();
  for (const auto& piece : pieces) {
    most = piece.sym_numel() > most ? piece.sym_numel() : most;
  }
  const auto padded = at::constant_pad_nd_symint(mine.reshape(-1), {0, most - mine.sym_numel()});
  const auto arrived = traced::all_gather(padded, mesh, mesh_dim).chunk(mesh.size(mesh_dim));
  for (size_t c = 0; c < pieces.size() && most > 0; ++c) {
    pieces[c].copy_(arrived[c].narrow_symint(0, 0, pieces[c].sym_numel()).view_symint(pieces[c].sym_sizes()));
  }
}

} // namespace

bool gathers_as_one(const at::Tensor& mine, const Mesh& mesh, int64_t mesh_dim) {
  return !is_traced(mine) && !stays(mine, mesh, mesh_dim) && !mesh.is_reordered(mesh_dim) &&
         backend_of(*group_of(mesh, mesh_dim, "all_gather"), mine.device()).gathers;
}

InFlight start_all_gather(
    std::vector<at::Tensor>& pieces, const at::Tensor& mine, const Mesh& mesh, int64_t mesh_dim, bool as_one) {
  const auto me = mesh.coordinate()[mesh_dim];
  if (is_traced(mine)) {
    gather_in_graph(pieces, mine, mesh, mesh_dim);
    return nothing();
  }
  if (!has_values(mine)) {
    return nothing();
  }
  if (pieces[me].data_ptr() != mine.data_ptr()) {
    pieces[me].copy_(mine);
  }
  if (is_alone(mesh, mesh_dim)) {
    return nothing();
  }
  if (auto* together = Together::open()) {
    Together::Call call{
        .what = Together::Call::What::Gather, .mesh = MeshPtr::reclaim_copy(&mesh), .mesh_dim = mesh_dim, .as_one = as_one};
    for (const auto& piece : pieces) {
      call.pieces.push_back(as_bytes(piece));
    }
    return together->note(std::move(call));
  }
  auto group = group_of(mesh, mesh_dim, "all_gather");
  Where where(Kind::AllGather, mesh, mesh_dim);
  const auto range = begin(Kind::AllGather, static_cast<int64_t>(mine.nbytes()), mesh, mesh_dim);
  if (std::all_of(pieces.begin(), pieces.end(), [](const auto& p) { return p.numel() == 0; })) {
    return nothing();
  }
  const bool all_send = std::all_of(pieces.begin(), pieces.end(), [](const auto& p) { return p.numel() != 0; });
  const auto facts = [&] {
    auto out = c10::get_hash(mine.scalar_type());
    for (const auto& piece : pieces) {
      out = c10::hash_combine(out, piece.numel());
    }
    return out;
  };
  const auto backend = backend_of(*group, mine.device());
  enter(where, group, backend, mesh, facts, all_send);
  return gather_from(where, *group, pieces, mesh, as_one, backend);
}

InFlight start_all_gather(at::Tensor& whole, at::IntArrayRef sizes, const at::Tensor& mine, const Mesh& mesh, int64_t mesh_dim) {
  const auto me = mesh.coordinate()[mesh_dim];
  const auto flat = whole.view(-1);
  const bool of_one_size = std::equal(sizes.begin() + 1, sizes.end(), sizes.begin());
  if (!of_one_size || mine.numel() == 0 || Together::open() || !gathers_as_one(mine, mesh, mesh_dim)) {
    auto pieces = flat.split_with_sizes(sizes);
    pieces[me] = pieces[me].view(mine.sizes());
    return start_all_gather(pieces, mine, mesh, mesh_dim, /*as_one=*/true);
  }
  const auto own = flat.narrow(0, me * sizes[me], sizes[me]);
  if (own.data_ptr() != mine.data_ptr()) {
    own.view(mine.sizes()).copy_(mine);
  }
  auto group = group_of(mesh, mesh_dim, "all_gather");
  Where where(Kind::AllGather, mesh, mesh_dim);
  const auto range = begin(Kind::AllGather, static_cast<int64_t>(mine.nbytes()), mesh, mesh_dim);
  const auto rules = backend_of(*group, mine.device());
  enter(where, group, rules, mesh, [&] { return c10::get_hash(mine.scalar_type(), whole.numel()); });
  auto out = as_bytes(flat), in = as_bytes(own);
  return started(where, rules, {guarded(where, [&] { return ((*group).*kGather)(out, in, {}); })}, {out, in});
}

void all_gather(std::vector<at::Tensor>& pieces, const at::Tensor& mine, const Mesh& mesh, int64_t mesh_dim) {
  start_all_gather(pieces, mine, mesh, mesh_dim).wait();
}

namespace {

std::vector<int64_t> by_rank(at::IntArrayRef sizes, at::IntArrayRef peers, int64_t ranks) {
  std::vector<int64_t> out(ranks, 0);
  for (size_t i = 0; i < peers.size(); ++i) {
    out[peers[i]] = sizes[i];
  }
  return out;
}

std::vector<int64_t> picked(const std::vector<int64_t>& sizes, const std::vector<int64_t>& order) {
  std::vector<int64_t> out;
  for (auto c : order) {
    out.push_back(sizes[c]);
  }
  return out;
}

// Between all ranks of the group; all of them call. Gaps travel too: the call takes sizes and no starts.
InFlight exchange_with_all(const Where& where, c10d::ProcessGroup& group, const Backend& rules, Parcel parcel) {
  if (parcel.start > 1) {
    for (auto* sizes : {&parcel.out_sizes, &parcel.in_sizes}) {
      for (auto& size : *sizes) {
        size = rounded_up(size, parcel.start);
      }
    }
  }
  return started(where, rules, {guarded(where, [&] { return exchange_bytes(group, parcel); })}, {parcel.out, parcel.in});
}

// Message by message, in an order that cannot deadlock even if a backend does them one after the other: pairs of ranks in
// ascending order, the lower rank sends first. In one batch only if the backend supports it. This rank's own part is copied.
InFlight exchange_with_peers(
    const Where& where, c10d::ProcessGroup& group, const Backend& rules, const Parcel& p, at::IntArrayRef peers) {
  const auto me = group.getRank();
  Messages messages(where, group, rules);
  int64_t out_at = 0, in_at = 0;
  for (size_t i = 0; i < peers.size(); ++i) {
    const auto in = std::exchange(in_at, in_at + rounded_up(p.in_sizes[i], p.start));
    const auto out = std::exchange(out_at, out_at + rounded_up(p.out_sizes[i], p.start));
    const auto send = [&] { messages.send(p.in, in, p.in_sizes[i], peers[i]); };
    if (peers[i] == me) {
      p.out.narrow(0, out, p.out_sizes[i]).copy_(p.in.narrow(0, in, p.in_sizes[i]));
      continue;
    }
    if (me < peers[i]) {
      send();
    }
    messages.receive(p.out, out, p.out_sizes[i], peers[i]);
    if (me > peers[i]) {
      send();
    }
  }
  return messages.start();
}

// exchange_with_all() of parts in the order of the coordinates, if the group's ranks have another order.
InFlight exchange_reordered(
    const Where& where, c10d::ProcessGroup& group, const Backend& rules, const Parcel& p, const std::vector<int64_t>& order) {
  Parcel moved{at::empty_like(p.out), at::empty_like(p.in), picked(p.out_sizes, order), picked(p.in_sizes, order)};
  const auto sources = p.in.split_with_sizes(p.in_sizes), targets = moved.in.split_with_sizes(moved.in_sizes);
  for (size_t r = 0; r < order.size(); ++r) {
    at::Tensor(targets[r]).copy_(sources[order[r]]);
  }
  auto moving = exchange_with_all(where, group, rules, moved);
  moving.then(
      [p, arrived = moved.out, out_sizes = moved.out_sizes, order] {
        const auto pieces = arrived.split_with_sizes(out_sizes), places = p.out.split_with_sizes(p.out_sizes);
        for (size_t r = 0; r < order.size(); ++r) {
          at::Tensor(places[order[r]]).copy_(pieces[r]);
        }
      },
      {p.out});
  return moving;
}

} // namespace

int64_t spacing(const at::Tensor& like, const Mesh& mesh, int64_t mesh_dim, Staged what) {
  const auto item = static_cast<int64_t>(like.element_size());
  if (kStart % item != 0 || is_traced(like) || !has_values(like) || Together::open()) { // which copies, with gaps of its own
    return 1;
  }
  const bool between = what == Staged::Messages;
  const auto& world = mesh.description().world;
  if (between ? world.empty() : is_alone(mesh, mesh_dim)) {
    return 1;
  }
  const auto group = between ? c10d::resolve_process_group(world) : group_of(mesh, mesh_dim, "all_to_all");
  const auto rules = backend_of(*group, like.device());
  // In an all-to-all, other ranks may send in place, without gaps: only single messages may start anywhere.
  const bool any_start = what != Staged::AllToAll || (rules.batches && ready_for_some(rules, *group, like.device()));
  return rules.aligned && any_start ? kStart / item : 1;
}

InFlight start_all_to_all(
    at::Tensor& out,
    at::IntArrayRef out_sizes,
    const at::Tensor& in,
    at::IntArrayRef in_sizes,
    const Mesh& mesh,
    int64_t mesh_dim,
    bool of_summands,
    int64_t spacing) {
  const auto kind = of_summands ? Kind::ReduceScatter : Kind::AllToAll;
  if (is_traced(in)) {
    const auto flat = in.reshape(-1);
    const auto arrived =
        is_alone(mesh, mesh_dim) ? flat : traced::all_to_all(flat, symbols(out_sizes), symbols(in_sizes), mesh, mesh_dim);
    out.copy_(arrived.view(out.sizes()));
    return nothing();
  }
  if (!has_values(in)) {
    return nothing();
  }
  if (is_alone(mesh, mesh_dim)) {
    as_bytes(out).copy_(as_bytes(in));
    return nothing();
  }
  auto parcel = parcel_of(out, out_sizes, in, in_sizes, spacing);
  if (auto* together = Together::open()) {
    return together->note(
        {.what = Together::Call::What::Exchange,
         .mesh = MeshPtr::reclaim_copy(&mesh),
         .mesh_dim = mesh_dim,
         .of_summands = of_summands,
         .in = parcel.in,
         .out = parcel.out,
         .in_sizes = std::move(parcel.in_sizes),
         .out_sizes = std::move(parcel.out_sizes)});
  }
  auto group = group_of(mesh, mesh_dim, name_of(kind));
  const auto range = begin(kind, parcel.sent() - parcel.in_sizes[mesh.coordinate()[mesh_dim]], mesh, mesh_dim);
  Where where(kind, mesh, mesh_dim);
  const auto rules = backend_of(*group, in.device());
  enter(where, group, rules, mesh, [&] { return c10::get_hash(in.scalar_type()); });
  if (rules.batches && ready_for_some(rules, *group, in.device())) {
    return exchange_with_peers(where, *group, rules, parcel, group_ranks(mesh, mesh_dim));
  }
  if (mesh.is_reordered(mesh_dim)) {
    return exchange_reordered(where, *group, rules, parcel, coordinates_by_group_rank(mesh, mesh_dim));
  }
  return exchange_with_all(where, *group, rules, std::move(parcel));
}

bool adds_up(const at::Tensor& summand, const Mesh& mesh, int64_t mesh_dim, ReduceOp op) {
  return !is_traced(summand) && !stays(summand, mesh, mesh_dim) && !mesh.is_reordered(mesh_dim) &&
         scatters(backend_of(*group_of(mesh, mesh_dim, "reduce_scatter"), summand.device()), summand.scalar_type(), op);
}

InFlight start_reduce_scatter(
    at::Tensor out,
    const at::Tensor& in,
    at::IntArrayRef in_sizes,
    const Mesh& mesh,
    int64_t mesh_dim,
    ReduceOp op,
    int64_t spacing) {
  if (auto* together = Together::open()) {
    return together->note(
        {.what = Together::Call::What::Scatter,
         .mesh = MeshPtr::reclaim_copy(&mesh),
         .mesh_dim = mesh_dim,
         .op = op,
         .in = in,
         .out = out,
         .in_sizes = in_sizes.vec()});
  }
  auto group = group_of(mesh, mesh_dim, "reduce_scatter");
  c10d::ReduceScatterOptions options;
  options.reduceOp = op_for(op, in.scalar_type());
  auto input = in.view(-1), output = out.view(-1);
  const auto numel = c10::sum_integers(in_sizes);
  const auto range = begin(Kind::ReduceScatter, (numel - out.numel()) * static_cast<int64_t>(out.element_size()), mesh, mesh_dim);
  Where where(Kind::ReduceScatter, mesh, mesh_dim);
  const auto facts = [&] { return c10::get_hash(op, in.scalar_type(), numel); };
  const auto rules = backend_of(*group, in.device());
  enter(where, group, rules, mesh, facts);
  WorkPtr work;
  if (std::equal(in_sizes.begin() + 1, in_sizes.end(), in_sizes.begin())) {
    work = guarded(where, [&] { return ((*group).*kReduce)(output, input, options); });
  } else {
    std::vector<at::Tensor> outputs{output};
    std::vector<std::vector<at::Tensor>> inputs(1);
    int64_t at = 0;
    for (const auto size : in_sizes) {
      inputs[0].push_back(input.narrow(0, std::exchange(at, at + rounded_up(size, spacing)), size));
    }
    work = guarded(where, [&] { return group->reduce_scatter(outputs, inputs, options); });
  }
  auto reduced = started(where, rules, {std::move(work)}, {input, output});
  if (op == ReduceOp::Avg) {
    reduced.then([out = std::move(out), n = mesh.size(mesh_dim)] { out.div_(n); });
  }
  return reduced;
}

InFlight start_send_receive(
    at::Tensor& out,
    at::IntArrayRef out_sizes,
    const at::Tensor& in,
    at::IntArrayRef in_sizes,
    at::IntArrayRef peers,
    const Mesh& mesh,
    int64_t callers,
    int64_t spacing) {
  if (callers == 1 || (!is_traced(out) && !has_values(out))) {
    return nothing();
  }
  const auto& name = mesh.description().world;
  TORCH_CHECK(
      !name.empty(), "shardtensor: pieces move between ranks of ", mesh.str(), ", but rank ", mesh.rank(),
      " had no default process group when the mesh was made; call init_process_group first");
  auto group = c10d::resolve_process_group(name);
  const bool all = callers == group->getSize();
  if (is_traced(out)) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        all, "shardtensor: a move between only some ranks of the default process group (", callers, " of ", group->getSize(),
        ") cannot be traced into a graph: the others would have to take part. Call redistribute() outside of "
        "the compiled function (rank ",
        mesh.rank(), ", ", mesh.str(), ")");
    const auto n = group->getSize();
    out.copy_(traced::all_to_all_of_world(in, symbols(by_rank(out_sizes, peers, n)), symbols(by_rank(in_sizes, peers, n)), mesh));
    return nothing();
  }
  if (!all && peers.empty()) {
    return nothing();
  }
  auto parcel = parcel_of(out, out_sizes, in, in_sizes, spacing);
  if (auto* together = Together::open()) {
    return together->note(
        {.what = Together::Call::What::Send,
         .mesh = MeshPtr::reclaim_copy(&mesh),
         .callers = callers,
         .in = parcel.in,
         .out = parcel.out,
         .in_sizes = std::move(parcel.in_sizes),
         .out_sizes = std::move(parcel.out_sizes),
         .peers = peers.vec()});
  }
  Where where(Kind::AllToAll, mesh, -1);
  const auto range = begin(Kind::AllToAll, parcel.sent(), mesh, -1);
  const auto backend = backend_of(*group, out.device());
  const bool in_a_batch = backend.batches && ready_for_some(backend, *group, out.device());
  if (all && !in_a_batch) {
    enter(where, group, backend, mesh, [&] { return c10::get_hash(out.scalar_type()); });
    parcel.out_sizes = by_rank(parcel.out_sizes, peers, group->getSize());
    parcel.in_sizes = by_rank(parcel.in_sizes, peers, group->getSize());
    return exchange_with_all(where, *group, backend, std::move(parcel));
  }
  if (peers.empty()) {
    return nothing();
  }
  TORCH_CHECK(
      !backend.at_once || in_a_batch, "shardtensor: a move between ", callers, " of ", group->getSize(),
      " ranks is the first use of the default process group, ", backend.name,
      ", which makes its communicator then, and all ranks would have to take part. Pass device_id= to init_process_group instead "
      "of lazy_init, or call torch.distributed.barrier() on all ranks before (rank ",
      mesh.rank(), ", ", mesh.str(), ")");
  if (backend.blocks) {
    where.ticket = faults::enter_messages(mesh, peers);
  }
  if (!backend.by_host) {
    return exchange_with_peers(where, *group, backend, parcel, peers);
  }
  const auto output = std::exchange(parcel.out, parcel.out.cpu());
  parcel.in = parcel.in.cpu();
  auto arrival = exchange_with_peers(where, *group, backend, parcel, peers);
  arrival.then([output, landing = parcel.out] { output.copy_(landing); }, {output});
  return arrival;
}

namespace {
// A call as a whole. A rank that fails before it has begun leaves it out.
template <typename F>
void whole(Kind kind, const Mesh& mesh, int64_t mesh_dim, const F& run) {
  const auto before = begun();
  doing(
      mesh, [&] { return Where(kind, mesh, mesh_dim).call(); }, run,
      [&] { return begun() == before ? uint64_t{1} << mesh_dim : 0; });
}

void broadcast_now(at::Tensor& tensor, const Mesh& mesh, int64_t mesh_dim, int64_t from_coordinate) {
  auto group = group_of(mesh, mesh_dim, "broadcast");
  std::vector<at::Tensor> tensors{as_bytes(tensor)};
  c10d::BroadcastOptions options;
  options.rootRank = mesh.group_rank(mesh_dim, from_coordinate);
  const auto range = begin(
      Kind::Broadcast, mesh.coordinate()[mesh_dim] == from_coordinate ? static_cast<int64_t>(tensor.nbytes()) : 0, mesh,
      mesh_dim);
  Where where(Kind::Broadcast, mesh, mesh_dim);
  const auto facts = [&] { return c10::get_hash(from_coordinate, tensor.scalar_type(), tensor.numel()); };
  enter(where, group, backend_of(*group, tensor.device()), mesh, facts, /*needs_all=*/false);
  wait(where, guarded(where, [&] { return group->broadcast(tensors, options); }));
}
} // namespace

void broadcast(at::Tensor& tensor, const Mesh& mesh, int64_t mesh_dim, int64_t from_coordinate) {
  if (is_traced(tensor)) {
    if (!is_alone(mesh, mesh_dim)) {
      tensor.copy_(traced::broadcast(tensor, mesh, mesh_dim, from_coordinate));
    }
    return;
  }
  if (stays(tensor, mesh, mesh_dim)) {
    return;
  }
  if (tensor.numel() == 0) {
    return tell(Kind::Broadcast, 0, mesh, mesh_dim);
  }
  whole(Kind::Broadcast, mesh, mesh_dim, [&] { broadcast_now(tensor, mesh, mesh_dim, from_coordinate); });
}

namespace {

// Sends directly from the pieces: nothing is packed, and ranks that get nothing make no call.
void scatter_by_sends(
    const Where& where,
    c10d::ProcessGroup& group,
    const Backend& rules,
    at::Tensor& mine,
    const std::vector<at::Tensor>& pieces,
    int64_t me,
    int64_t from) {
  Messages messages(where, group, rules);
  const auto n = me == from ? static_cast<int64_t>(pieces.size()) : 0;
  for (int64_t i = 0; i < n; ++i) {
    if (i != me) {
      messages.send(as_bytes(pieces[i].contiguous()), 0, static_cast<int64_t>(pieces[i].nbytes()), i);
    }
  }
  if (me != from) {
    messages.receive(as_bytes(mine), 0, static_cast<int64_t>(mine.nbytes()), from);
  }
  messages.start().wait();
}

// One packed buffer on the rank that sends. Every rank calls, even if it receives nothing: ranks may not know that another's
// piece is empty.
void scatter_by_exchange(
    const Where& where,
    c10d::ProcessGroup& group,
    at::Tensor& mine,
    const std::vector<at::Tensor>& pieces,
    int64_t me,
    int64_t from) {
  const auto n = static_cast<int64_t>(pieces.size());
  const auto nowhere = at::empty({0}, mine.options().dtype(at::kByte));
  Parcel parcel{nowhere, nowhere, std::vector<int64_t>(n, 0), std::vector<int64_t>(n, 0)};
  if (me == from) {
    int64_t numel = 0, at = 0;
    for (int64_t i = 0; i < n; ++i) {
      numel += i == me ? 0 : pieces[i].numel();
    }
    const auto packed = at::empty({numel}, mine.options());
    for (int64_t i = 0; i < n; ++i) {
      if (i != me) {
        packed.narrow(0, at, pieces[i].numel()).view(pieces[i].sizes()).copy_(pieces[i]);
        at += pieces[i].numel();
        parcel.in_sizes[i] = static_cast<int64_t>(pieces[i].nbytes());
      }
    }
    parcel.in = as_bytes(packed);
  } else {
    parcel.out = as_bytes(mine);
    parcel.out_sizes[from] = parcel.out.numel();
  }
  wait(where, guarded(where, [&] { return exchange_bytes(group, parcel); }));
}

void scatter_now(at::Tensor& mine, std::vector<at::Tensor>& pieces, const Mesh& mesh, int64_t mesh_dim, int64_t from_coordinate) {
  const auto me = mesh.coordinate()[mesh_dim];
  auto group = group_of(mesh, mesh_dim, "scatter");
  int64_t sent = 0;
  for (size_t i = 0; me == from_coordinate && i < pieces.size(); ++i) {
    sent += static_cast<int64_t>(i) == me ? 0 : static_cast<int64_t>(pieces[i].nbytes());
  }
  const auto range = begin(Kind::Scatter, sent, mesh, mesh_dim);
  const auto backend = backend_of(*group, mine.device());
  Where where(Kind::Scatter, mesh, mesh_dim);
  const auto facts = [&] { return c10::get_hash(from_coordinate, mine.scalar_type()); };
  enter(where, group, backend, mesh, facts, /*needs_all=*/false);
  where.ticket.by_messages = backend.sends;
  std::vector<at::Tensor> by_rank;
  for (auto c : coordinates_by_group_rank(mesh, mesh_dim)) {
    by_rank.push_back(me == from_coordinate ? pieces[c] : at::Tensor());
  }
  const auto my_rank = mesh.group_rank(mesh_dim, me), from_rank = mesh.group_rank(mesh_dim, from_coordinate);
  if (backend.sends) {
    scatter_by_sends(where, *group, backend, mine, by_rank, my_rank, from_rank);
  } else {
    scatter_by_exchange(where, *group, mine, by_rank, my_rank, from_rank);
  }
}

} // namespace

void scatter(at::Tensor& mine, std::vector<at::Tensor>& pieces, const Mesh& mesh, int64_t mesh_dim, int64_t from_coordinate) {
  const auto me = mesh.coordinate()[mesh_dim];
  if (me == from_coordinate) {
    mine.copy_(pieces[me]);
  }
  if (stays(mine, mesh, mesh_dim)) {
    return;
  }
  whole(Kind::Scatter, mesh, mesh_dim, [&] { scatter_now(mine, pieces, mesh, mesh_dim, from_coordinate); });
}

} // namespace shardtensor::comm
