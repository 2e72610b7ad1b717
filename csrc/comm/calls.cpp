#include "comm/calls.h"

#include "comm/backend.h"
#include "comm/bytes.h"
#include "comm/collective_call.h"
#include "comm/counts.h"
#include "comm/error_context.h"
#include "comm/range.h"
#include "comm/ranks.h"
#include "comm/reducible.h"

#include <ATen/ATen.h>
#include <torch/headeronly/version.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <utility>

namespace shardtensor::comm {

namespace {

constexpr int kTag = 0x5d; // for messages between two ranks, different from users' tags
constexpr int kTagApart = 0x5e;

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

// The call of a process group for one collective. The constructor tells observers and counts. The profiler's range lasts as long
// as the object.
struct ProcessGroupCall {
  // `bytes`: what this rank contributes. Looks the group up by name each time: this finds a group that was destroyed and made
  // again under its name, and keeps no group alive.
  ProcessGroupCall(const Collective& c, int64_t bytes)
      : mesh(*c.mesh),
        where(c),
        group(c10d::resolve_process_group(group_name(mesh, c.mesh_dim, name_of(c.counted())))),
        rules(backend_of(*group, c.local().device())),
        device(c.local().device()),
        range_(begin(c, bytes)) {}

  // All ranks of the group are about to make this call. facts(): a hash of what all of them know about it. `needs_all`: none of
  // them gets a result before all have begun.
  template <typename Facts>
  void enter(const Facts& facts, bool needs_all = true) {
    if (C10_LIKELY(rules.blocks && desync::notice())) {
      where.ticket = desync::enter(
          group, mesh, where.mesh_dim, c10::get_hash(where.kind, where.mesh_dim, facts()), needs_all,
          [&] { return where.str(); });
    }
  }
  // f(group) calls it; errors say where.
  template <typename F>
  auto make(const F& f) const {
    return guarded(where, [&] { return f(*group); });
  }
  // `buffers`: all that the works read or write.
  InFlight in_flight(std::vector<WorkPtr> works, std::vector<at::Tensor> buffers) const {
    return started(where, rules, std::move(works), std::move(buffers));
  }
  int64_t me() const {
    return mesh.coordinate()[where.mesh_dim];
  }
  bool may_call_some() const {
    return ready_for_some(rules, *group, device);
  }

  const Mesh& mesh;
  CollectiveCall where;
  const c10::intrusive_ptr<c10d::ProcessGroup> group;
  const Backend rules;
  const c10::Device device;

 private:
  const Range range_;
};

// Messages between this rank and other ranks of a group: parts of buffers of bytes. Empty ones are not sent. If the backend has
// batches, messages are only recorded, and start() sends all of them as one.
class MessageBatch {
 public:
  explicit MessageBatch(const ProcessGroupCall& call, int tag = kTag) : call_(call), tag_(tag) {}
  // After an error: a batch that nobody ends makes all later ones raise, and peers wait for what has been sent.
  ~MessageBatch() {
    if (open_ || !works_.empty()) {
      try {
        start();
      } catch (...) { // there is one error already
      }
    }
  }
  MessageBatch(const MessageBatch&) = delete;
  MessageBatch& operator=(const MessageBatch&) = delete;

  void send(const at::Tensor& bytes, int64_t at, int64_t count, int64_t rank) {
    add(bytes, at, count, [&](auto& group, auto& part) { return group.send(part, static_cast<int>(rank), tag_); });
  }
  void receive(const at::Tensor& bytes, int64_t at, int64_t count, int64_t rank) {
    add(bytes, at, count, [&](auto& group, auto& part) { return group.recv(part, static_cast<int>(rank), tag_); });
  }
  InFlight start() {
    if (!open_ && works_.empty()) {
      return {};
    }
    if (std::exchange(open_, false)) {
      works_ = {call_.make([&](auto& group) { return group.endCoalescing(call_.device.type()); })};
    }
    return call_.in_flight(std::move(works_), std::move(buffers_));
  }

 private:
  template <typename F>
  void add(const at::Tensor& bytes, int64_t at, int64_t count, const F& make) {
    if (count == 0) {
      return;
    }
    std::vector<at::Tensor> part{bytes.narrow(0, at, count)};
    if (call_.rules.batches && !open_) {
      call_.make([&](auto& group) { group.startCoalescing(call_.device.type()); });
      open_ = true;
    }
    works_.push_back(call_.make([&](auto& group) { return make(group, part); }));
    buffers_.push_back(std::move(part[0]));
  }

  const ProcessGroupCall& call_;
  const int tag_;
  bool open_ = false;
  std::vector<WorkPtr> works_;
  std::vector<at::Tensor> buffers_;
};

std::vector<int64_t> group_ranks(const Mesh& mesh, int64_t mesh_dim) {
  std::vector<int64_t> out(mesh.size(mesh_dim));
  for (int64_t c = 0; c < mesh.size(mesh_dim); ++c) {
    out[c] = mesh.group_rank(mesh_dim, c);
  }
  return out;
}

// A list in the order of the coordinates, put into the order of the group's ranks.
template <typename T>
std::vector<T> in_group_order(const std::vector<T>& by_coordinate, const Mesh& mesh, int64_t mesh_dim) {
  std::vector<T> out(by_coordinate.size());
  for (size_t c = 0; c < out.size(); ++c) {
    out[mesh.group_rank(mesh_dim, static_cast<int64_t>(c))] = by_coordinate[c];
  }
  return out;
}

// ---- gathers ----

InFlight gather_into(const ProcessGroupCall& call, at::Tensor whole, at::Tensor own) {
  auto work = call.make([&](auto& group) { return (group.*kGather)(whole, own, {}); });
  return call.in_flight({std::move(work)}, {whole, own});
}

InFlight gather_at_once(const ProcessGroupCall& call, const std::vector<at::Tensor>& pieces, const at::Tensor& whole) {
  const auto& own = pieces[call.me()];
  const bool of_one_size =
      std::all_of(pieces.begin(), pieces.end(), [&](const auto& p) { return p.numel() == pieces[0].numel(); });
  if (whole.defined() && of_one_size && !call.mesh.is_reordered(call.where.mesh_dim)) {
    return gather_into(call, whole, own);
  }
  std::vector<at::Tensor> given{own};
  std::vector<std::vector<at::Tensor>> places{in_group_order(pieces, call.mesh, call.where.mesh_dim)};
  auto work = call.make([&](auto& group) { return group.allgather(places, given); });
  return call.in_flight({std::move(work)}, std::move(places[0]));
}

WorkPtr broadcast_from(const ProcessGroupCall& call, const at::Tensor& bytes, int64_t coordinate) {
  std::vector<at::Tensor> tensors{bytes};
  c10d::BroadcastOptions options;
  options.rootRank = call.mesh.group_rank(call.where.mesh_dim, coordinate);
  return call.make([&](auto& group) { return group.broadcast(tensors, options); });
}

// One broadcast per piece, directly into its place: any sizes, no padding, no copy afterwards.
InFlight gather_by_broadcasts(const ProcessGroupCall& call, const std::vector<at::Tensor>& pieces) {
  std::vector<WorkPtr> works;
  std::vector<at::Tensor> buffers;
  for (size_t c = 0; c < pieces.size(); ++c) {
    if (pieces[c].numel()) {
      buffers.push_back(pieces[c]);
      works.push_back(broadcast_from(call, pieces[c], static_cast<int64_t>(c)));
    }
  }
  return call.in_flight(std::move(works), std::move(buffers));
}

// Whether the list begins with two empty pieces, in the order of the group's ranks.
bool begins_empty(const std::vector<at::Tensor>& pieces, const Mesh& mesh, int64_t mesh_dim) {
  return std::all_of(pieces.begin(), pieces.end(), [&](const at::Tensor& piece) {
    return piece.numel() == 0 || mesh.group_rank(mesh_dim, &piece - pieces.data()) > 1;
  });
}

// `pieces`: bytes. `whole`: where they lie one after the other on every rank, or undefined.
InFlight gather_from(const ProcessGroupCall& call, const std::vector<at::Tensor>& pieces, const at::Tensor& whole) {
  const bool at_once = call.rules.gathers && !(call.rules.by_address && begins_empty(pieces, call.mesh, call.where.mesh_dim));
  return at_once ? gather_at_once(call, pieces, whole) : gather_by_broadcasts(call, pieces);
}

InFlight gather(const Collective& c) {
  ProcessGroupCall call(c, c.in.numel());
  if (c.pieces.empty()) { // it takes no time that grows with their number
    call.enter([&] { return c10::get_hash(c.dtype, c.out.numel()); });
    return gather_into(call, c.out, c.in);
  }
  const auto empty = std::count_if(c.pieces.begin(), c.pieces.end(), [](const auto& p) { return p.numel() == 0; });
  if (empty == static_cast<int64_t>(c.pieces.size())) {
    return {};
  }
  const auto facts = [&] {
    auto out = c10::get_hash(c.dtype);
    for (const auto& piece : c.pieces) {
      out = c10::hash_combine(out, piece.numel());
    }
    return out;
  };
  call.enter(facts, /*needs_all=*/empty == 0);
  return gather_from(call, c.pieces, c.out);
}

// ---- reductions ----

// A reduction as backends name it, and as a function that combines two summands without a backend.
struct BackendReduction {
  c10d::ReduceOp::RedOpType name;
  void (*combine)(at::Tensor& into, const at::Tensor& piece);
};

BackendReduction backend_reduction(ReduceOp op) {
  switch (op) {
    case ReduceOp::Product:
      return {c10d::ReduceOp::PRODUCT, [](auto& into, auto& piece) { into.mul_(piece); }};
    case ReduceOp::Min:
      return {c10d::ReduceOp::MIN, [](auto& into, auto& piece) { at::minimum_out(into, into, piece); }};
    case ReduceOp::Max:
      return {c10d::ReduceOp::MAX, [](auto& into, auto& piece) { at::maximum_out(into, into, piece); }};
    case ReduceOp::Band:
      return {c10d::ReduceOp::BAND, [](auto& into, auto& piece) { into.bitwise_and_(piece); }};
    case ReduceOp::Bor:
      return {c10d::ReduceOp::BOR, [](auto& into, auto& piece) { into.bitwise_or_(piece); }};
    case ReduceOp::Bxor:
      return {c10d::ReduceOp::BXOR, [](auto& into, auto& piece) { into.bitwise_xor_(piece); }};
    default:
      return {c10d::ReduceOp::SUM, [](auto& into, auto& piece) { into.add_(piece); }};
  }
}

bool is_bitwise(ReduceOp op) {
  return op == ReduceOp::Band || op == ReduceOp::Bor || op == ReduceOp::Bxor;
}

// Every rank gathers and combines all summands, in the same order: for an `op` that the backend does not support, and for few
// bytes.
InFlight reduce_by_gathering(const ProcessGroupCall& call, at::Tensor& buffer, ReduceOp op) {
  const auto n = call.mesh.size(call.where.mesh_dim);
  const auto all = at::empty({n, buffer.numel()}, buffer.options()), bytes = as_bytes(all);
  auto pieces = all.unbind();
  pieces[call.me()].copy_(buffer.view(-1));
  auto gathered = gather_from(call, bytes.chunk(n), bytes);
  buffer = pieces[0].view(buffer.sizes());
  gathered.then(
      [pieces, combine = backend_reduction(op).combine]() mutable {
        for (size_t c = 1; c < pieces.size(); ++c) {
          combine(pieces[0], pieces[c]);
        }
      },
      pieces);
  return gathered;
}

InFlight reduce_at_once(const ProcessGroupCall& call, const at::Tensor& buffer, ReduceOp op) {
  std::vector<at::Tensor> tensors{buffer};
  c10d::AllreduceOptions options;
  options.reduceOp = backend_reduction(op).name;
  auto work = call.make([&](auto& group) { return group.allreduce(tensors, options); });
  return call.in_flight({std::move(work)}, std::move(tensors));
}

InFlight reduce(const Collective& c) {
  auto buffer = reducible(c.out, c.op);
  const auto bytes = static_cast<int64_t>(buffer.nbytes());
  ProcessGroupCall call(c, bytes);
  call.enter([&] { return c10::get_hash(c.op, c.out.scalar_type(), c.out.numel()); });
  const auto n = c.mesh->size(c.mesh_dim);
  const auto op = backend_op(c.op, c.out.scalar_type());
  const bool gathers = (is_bitwise(op) && !call.rules.bitwise) || bytes * n <= call.rules.latency;
  auto reduced = gathers ? reduce_by_gathering(call, buffer, op) : reduce_at_once(call, buffer, op);
  reduced.then(
      [out = c.out, buffer, op = c.op, n] {
        const auto made = from_reducible(buffer, out, op, n);
        if (!made.is_alias_of(out)) {
          out.copy_(made);
        }
      },
      {c.out, buffer});
  return reduced;
}

InFlight sum_apart(const Collective& c) {
  const auto n = c.out.numel(), ranks = c.mesh->size(c.mesh_dim), me = c.me();
  ProcessGroupCall call(c, static_cast<int64_t>(c.out.nbytes()));
  call.enter([&] { return c10::get_hash(kTagApart, c.out.scalar_type(), n); });
  call.where.ticket.by_messages = true;
  const auto all = at::empty({ranks * n}, c.out.options());
  all.narrow(0, me * n, n).copy_(c.out);
  MessageBatch messages(call, kTagApart);
  for (int64_t i = 0; i < ranks; ++i) {
    if (i != me) {
      const auto rank = c.mesh->group_rank(c.mesh_dim, i);
      messages.receive(all, i * n, n, rank);
      messages.send(all, me * n, n, rank);
    }
  }
  auto moving = messages.start();
  moving.then(
      [out = c.out, all, ranks, n] {
        auto sum = all.narrow(0, 0, n);
        for (int64_t i = 1; i < ranks; ++i) {
          sum.add_(all.narrow(0, i * n, n)); // at::sum would begin with 0.0, and lose the sign of -0.0
        }
        out.copy_(sum.view(out.sizes()));
      },
      {c.out, all});
  return moving;
}

InFlight reduce_scatter(const Collective& c) {
  c10d::ReduceScatterOptions options;
  options.reduceOp = backend_reduction(backend_op(c.op, c.in.scalar_type())).name;
  auto input = c.in.view(-1), output = c.out.view(-1);
  const auto numel = c10::sum_integers(c.in_sizes);
  ProcessGroupCall call(c, (numel - c.out.numel()) * static_cast<int64_t>(c.out.element_size()));
  call.enter([&] { return c10::get_hash(c.op, c.in.scalar_type(), numel); });
  WorkPtr work;
  if (std::equal(c.in_sizes.begin() + 1, c.in_sizes.end(), c.in_sizes.begin())) {
    work = call.make([&](auto& group) { return (group.*kReduce)(output, input, options); });
  } else {
    std::vector<at::Tensor> outputs{output};
    std::vector<std::vector<at::Tensor>> inputs(1);
    int64_t at = 0;
    for (const auto size : c.in_sizes) {
      inputs[0].push_back(input.narrow(0, std::exchange(at, at + rounded_up(size, c.spacing)), size));
    }
    work = call.make([&](auto& group) { return group.reduce_scatter(outputs, inputs, options); });
  }
  auto reduced = call.in_flight({std::move(work)}, {input, output});
  if (c.op == ReduceOp::Avg) {
    reduced.then([out = c.out, n = c.mesh->size(c.mesh_dim)] { out.div_(n); });
  }
  return reduced;
}

// ---- exchanges ----

WorkPtr exchange_bytes(const ProcessGroupCall& call, Collective& c) {
  return call.make([&](auto& group) { return (group.*kExchange)(c.out, c.in, c.out_sizes, c.in_sizes, {}); });
}

// Between all ranks of the group; all of them call. Gaps travel too: the call takes sizes and no starts.
InFlight exchange_with_all(const ProcessGroupCall& call, Collective c) {
  for (auto* sizes : {&c.out_sizes, &c.in_sizes}) {
    std::transform(sizes->begin(), sizes->end(), sizes->begin(), [&](int64_t n) { return rounded_up(n, c.spacing); });
  }
  auto work = exchange_bytes(call, c);
  return call.in_flight({std::move(work)}, {c.out, c.in});
}

// Message by message, in an order that cannot deadlock even if a backend does them one after the other: pairs of ranks in
// ascending order, the lower rank sends first. In one batch only if the backend supports it. This rank's own part is copied.
InFlight exchange_with_peers(const ProcessGroupCall& call, const Collective& c, at::IntArrayRef peers) {
  const auto me = call.group->getRank();
  MessageBatch messages(call);
  int64_t out_at = 0, in_at = 0;
  for (size_t i = 0; i < peers.size(); ++i) {
    const auto in = std::exchange(in_at, in_at + rounded_up(c.in_sizes[i], c.spacing));
    const auto out = std::exchange(out_at, out_at + rounded_up(c.out_sizes[i], c.spacing));
    const auto send = [&] { messages.send(c.in, in, c.in_sizes[i], peers[i]); };
    if (peers[i] == me) {
      c.out.narrow(0, out, c.out_sizes[i]).copy_(c.in.narrow(0, in, c.in_sizes[i]));
      continue;
    }
    if (me < peers[i]) {
      send();
    }
    messages.receive(c.out, out, c.out_sizes[i], peers[i]);
    if (me > peers[i]) {
      send();
    }
  }
  return messages.start();
}

// exchange_with_all() of parts in the order of the coordinates, if the group's ranks have another order.
InFlight exchange_reordered(const ProcessGroupCall& call, const Collective& c) {
  auto moved = c;
  moved.out = at::empty_like(c.out);
  moved.out_sizes = in_group_order(c.out_sizes, call.mesh, c.mesh_dim);
  moved.in_sizes = in_group_order(c.in_sizes, call.mesh, c.mesh_dim);
  moved.in = at::cat(in_group_order(c.in.split_with_sizes(c.in_sizes), call.mesh, c.mesh_dim));
  auto moving = exchange_with_all(call, moved);
  moving.then(
      [mesh = c.mesh, mesh_dim = c.mesh_dim, arrived = moved.out, arrived_sizes = moved.out_sizes, out = c.out,
       out_sizes = c.out_sizes] {
        const auto pieces = arrived.split_with_sizes(arrived_sizes);
        const auto places = in_group_order(out.split_with_sizes(out_sizes), *mesh, mesh_dim);
        for (size_t r = 0; r < pieces.size(); ++r) {
          places[r].copy_(pieces[r]);
        }
      },
      {c.out});
  return moving;
}

InFlight exchange(const Collective& c) {
  ProcessGroupCall call(c, c10::sum_integers(c.in_sizes) - c.in_sizes[c.me()]);
  call.enter([&] { return c10::get_hash(c.dtype); });
  if (call.rules.batches && call.may_call_some()) {
    return exchange_with_peers(call, c, group_ranks(call.mesh, c.mesh_dim));
  }
  return c.mesh->is_reordered(c.mesh_dim) ? exchange_reordered(call, c) : exchange_with_all(call, c);
}

InFlight send(Collective& c) {
  const bool all = all_ranks_call(c);
  ProcessGroupCall call(c, c10::sum_integers(c.in_sizes));
  const bool in_a_batch = call.rules.batches && call.may_call_some();
  if (all && !in_a_batch) {
    call.enter([&] { return c10::get_hash(c.dtype); });
    c.out_sizes = sizes_by_rank(c.out_sizes, c.peers, c.callers);
    c.in_sizes = sizes_by_rank(c.in_sizes, c.peers, c.callers);
    return exchange_with_all(call, std::move(c));
  }
  if (c.peers.empty()) {
    return {};
  }
  TORCH_CHECK(
      !call.rules.at_once || in_a_batch, "shardtensor: a move between ", c.callers, " of ", call.group->getSize(),
      " ranks is the first use of the default process group, ", call.rules.name,
      ", which makes its communicator then, and all ranks would have to take part. Pass device_id= to init_process_group instead "
      "of lazy_init, or call torch.distributed.barrier() on all ranks before (rank ",
      c.mesh->rank(), ", ", c.mesh->str(), ")");
  if (call.rules.blocks) {
    call.where.ticket = desync::enter_messages(*c.mesh, c.peers);
  }
  if (!call.rules.by_host) {
    return exchange_with_peers(call, c, c.peers);
  }
  const auto output = std::exchange(c.out, c.out.cpu());
  c.in = c.in.cpu();
  auto arrival = exchange_with_peers(call, c, c.peers);
  arrival.then([output, landing = c.out] { output.copy_(landing); }, {output});
  return arrival;
}

// ---- from one rank to all ----

void broadcast_now(const Collective& c) {
  ProcessGroupCall call(c, c.me() == c.from ? c.out.numel() : 0);
  call.enter([&] { return c10::get_hash(c.from, c.dtype, c.out.numel()); }, /*needs_all=*/false);
  wait(call.where, broadcast_from(call, c.out, c.from));
}

// Sends directly from the pieces: nothing is packed, and ranks that get nothing make no call.
void scatter_by_sends(const ProcessGroupCall& call, const Collective& c) {
  MessageBatch messages(call);
  const auto me = c.me(), n = me == c.from ? static_cast<int64_t>(c.pieces.size()) : 0;
  for (int64_t i = 0; i < n; ++i) {
    if (i != me) {
      const auto bytes = as_bytes(c.pieces[i].contiguous());
      messages.send(bytes, 0, bytes.numel(), call.mesh.group_rank(c.mesh_dim, i));
    }
  }
  if (me != c.from) {
    messages.receive(c.out, 0, c.out.numel(), call.mesh.group_rank(c.mesh_dim, c.from));
  }
  messages.start().wait();
}

// One packed buffer on the rank that sends. Every rank calls, even if it receives nothing: ranks may not know that another's
// piece is empty.
void scatter_by_exchange(const ProcessGroupCall& call, const Collective& c, int64_t sent) {
  const std::vector<int64_t> none(c.mesh->size(c.mesh_dim), 0);
  Collective parcel{
      .kind = CollectiveKind::AllToAll,
      .in = at::empty({sent}, c.out.options()),
      .out = c.out.narrow(0, 0, 0),
      .in_sizes = none,
      .out_sizes = none};
  if (c.me() == c.from) {
    auto pieces = in_group_order(c.pieces, call.mesh, c.mesh_dim);
    pieces[call.group->getRank()] = at::Tensor();
    int64_t at = 0;
    for (size_t r = 0; r < pieces.size(); ++r) {
      if (const auto& piece = pieces[r]; piece.defined() && piece.numel()) {
        const auto bytes = parcel.in_sizes[r] = static_cast<int64_t>(piece.nbytes());
        const auto place = parcel.in.narrow(0, std::exchange(at, at + bytes), bytes).view(piece.scalar_type());
        place.view(piece.sizes()).copy_(piece);
      }
    }
  } else {
    parcel.out = c.out;
    parcel.out_sizes[call.mesh.group_rank(c.mesh_dim, c.from)] = c.out.numel();
  }
  wait(call.where, exchange_bytes(call, parcel));
}

void scatter_now(const Collective& c) {
  int64_t sent = 0;
  for (size_t i = 0; c.me() == c.from && i < c.pieces.size(); ++i) {
    sent += static_cast<int64_t>(i) == c.from ? 0 : static_cast<int64_t>(c.pieces[i].nbytes());
  }
  ProcessGroupCall call(c, sent);
  call.enter([&] { return c10::get_hash(c.from, c.dtype); }, /*needs_all=*/false);
  call.where.ticket.by_messages = call.rules.sends;
  call.rules.sends ? scatter_by_sends(call, c) : scatter_by_exchange(call, c, sent);
}

// Makes a collective and waits for its end. A rank that fails before the collective has begun skips it.
InFlight run_blocking(const Collective& c, void (*run)(const Collective&)) {
  const auto before = begun();
  with_error_context(
      *c.mesh, [&] { return CollectiveCall(c).call(); }, [&] { run(c); },
      [&] { return begun() == before ? uint64_t{1} << c.mesh_dim : 0; });
  return {};
}

} // namespace

bool all_ranks_call(const Collective& c) {
  return c.callers == c10d::resolve_process_group(group_name(*c.mesh, -1, "a move"))->getSize();
}

std::vector<int64_t> sizes_by_rank(at::IntArrayRef sizes, at::IntArrayRef peers, int64_t ranks) {
  std::vector<int64_t> out(ranks, 0);
  for (size_t i = 0; i < peers.size(); ++i) {
    out[peers[i]] = sizes[i];
  }
  return out;
}

InFlight call_group(Collective c) {
  switch (c.kind) {
    case CollectiveKind::AllReduce:
      return c.apart ? sum_apart(c) : reduce(c);
    case CollectiveKind::AllGather:
      return gather(c);
    case CollectiveKind::AllToAll:
      return c.is_between_any() ? send(c) : exchange(c);
    case CollectiveKind::ReduceScatter:
      return reduce_scatter(c);
    case CollectiveKind::Broadcast:
      return run_blocking(c, broadcast_now);
    default:
      return run_blocking(c, scatter_now);
  }
}

} // namespace shardtensor::comm
