#include "comm/comm.h"

#include "comm/backend.h"
#include "comm/bytes.h"
#include "comm/calls.h"
#include "comm/coalescing.h"
#include "comm/counts.h"
#include "comm/reducible.h"
#include "comm/tensor_kind.h"
#include "comm/traced.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>

namespace shardtensor::comm {

namespace {

MeshPtr held(const Mesh& mesh) {
  return MeshPtr::reclaim_copy(&mesh);
}

Backend backend_along(const Mesh& mesh, int64_t mesh_dim, c10::Device device, const char* what) {
  return backend_of(*c10d::resolve_process_group(group_name(mesh, mesh_dim, what)), device);
}

// Whether the process group would be called.
bool is_called(const at::Tensor& t, const Mesh& mesh, int64_t mesh_dim) {
  return !is_traced(t) && has_values(t) && !is_alone(mesh, mesh_dim);
}

bool needs_no_other(const Collective& c) {
  return c.is_between_any() ? c.callers == 1 : is_alone(*c.mesh, c.mesh_dim);
}

// Whether this rank's own part has to be copied from one tensor to another.
bool has_own_part(const Collective& c) {
  return c.kind == CollectiveKind::AllGather || c.kind == CollectiveKind::Scatter ||
         (c.kind == CollectiveKind::AllToAll && !c.is_between_any());
}

// Lists the places of the gathered pieces, unless the backend takes the whole buffer.
void list_pieces(Collective& c) {
  c.out = c.out.view(-1);
  const bool of_one_size = std::equal(c.out_sizes.begin() + 1, c.out_sizes.end(), c.out_sizes.begin());
  if (!of_one_size || c.in.numel() == 0 || CoalescedCalls::open() || !gathers_as_one(c.in, *c.mesh, c.mesh_dim)) {
    c.pieces = c.out.split_with_sizes(c.out_sizes);
  }
}

void keep_own(Collective& c, bool alone) {
  if (c.kind == CollectiveKind::AllGather) {
    const auto n = c.in.numel();
    const auto own = c.pieces.empty() ? c.out.narrow(0, c.me() * n, n) : c.pieces[c.me()];
    if (is_traced(c.in) || own.data_ptr() != c.in.data_ptr()) {
      own.view_as(c.in).copy_(c.in);
    }
    c.in = own;
  } else if (c.kind == CollectiveKind::AllToAll && alone) {
    c.out.copy_(c.in.reshape(-1).view_as(c.out)); // else it copies its own part with the others
  } else if (c.kind == CollectiveKind::Scatter && c.me() == c.from) {
    c.out.copy_(c.pieces[c.from]);
  }
}

// Pieces of any size travel in buffers of the largest piece's size.
void record_gather(const Collective& c) {
  auto most = c.pieces[0].sym_numel();
  for (const auto& piece : c.pieces) {
    most = piece.sym_numel() > most ? piece.sym_numel() : most;
  }
  const auto padded = at::constant_pad_nd_symint(c.in.reshape(-1), {0, most - c.in.sym_numel()});
  const auto arrived = traced::all_gather(padded, *c.mesh, c.mesh_dim).chunk(c.mesh->size(c.mesh_dim));
  for (size_t i = 0; i < c.pieces.size() && most > 0; ++i) {
    c.pieces[i].copy_(arrived[i].narrow_symint(0, 0, c.pieces[i].sym_numel()).view_symint(c.pieces[i].sym_sizes()));
  }
}

at::Tensor recorded_exchange(const Collective& c) {
  if (!c.is_between_any()) {
    return traced::all_to_all(c.in.reshape(-1), symbols(c.out_sizes), symbols(c.in_sizes), *c.mesh, c.mesh_dim).view_as(c.out);
  }
  const auto n = size_of_world(*c.mesh);
  TORCH_CHECK_NOT_IMPLEMENTED(
      all_ranks_call(c), "shardtensor: a move between only some ranks of the default process group (", c.callers, " of ", n,
      ") cannot be traced into a graph: the others would have to take part. Call redistribute() outside of the compiled function "
      "(rank ",
      c.mesh->rank(), ", ", c.mesh->str(), ")");
  return traced::all_to_all_of_world(
      c.in, symbols(sizes_by_rank(c.out_sizes, c.peers, n)), symbols(sizes_by_rank(c.in_sizes, c.peers, n)), *c.mesh);
}

void record(const Collective& c) {
  switch (c.kind) {
    case CollectiveKind::AllReduce:
      c.out.copy_(traced::all_reduce(c.out, *c.mesh, c.mesh_dim, c.op));
      break;
    case CollectiveKind::AllGather:
      record_gather(c);
      break;
    case CollectiveKind::AllToAll:
      c.out.copy_(recorded_exchange(c));
      break;
    case CollectiveKind::Broadcast:
      c.out.copy_(traced::broadcast(c.out, *c.mesh, c.mesh_dim, c.from));
      break;
    default:
      has_values(c.local()); // raises
  }
}

// Whether this rank knows that it need not call.
bool moves_nothing(const Collective& c) {
  if (c.kind == CollectiveKind::AllReduce) { // also if it is empty here: other ranks' may not be
    TORCH_CHECK(
        can_reduce(c.out.scalar_type(), c.op),
        "shardtensor: a complex tensor can be reduced over ranks only by sum or avg, not by ", shardtensor::name_of(c.op));
  }
  if ((c.kind == CollectiveKind::AllReduce || c.kind == CollectiveKind::Broadcast) && c.out.numel() == 0) {
    tell(c, 0);
    return true;
  }
  return c.is_between_any() && !all_ranks_call(c) && c.peers.empty();
}

void turn_into_bytes(Collective& c) {
  const auto item = static_cast<int64_t>(c.local().element_size());
  c.dtype = c.local().scalar_type();
  for (auto* t : {&c.in, &c.out}) {
    *t = t->defined() ? as_bytes(*t) : *t;
  }
  if (c.kind == CollectiveKind::AllGather) {
    std::transform(c.pieces.begin(), c.pieces.end(), c.pieces.begin(), as_bytes);
  }
  for (auto* sizes : {&c.in_sizes, &c.out_sizes}) {
    std::transform(sizes->begin(), sizes->end(), sizes->begin(), [&](int64_t n) { return n * item; });
  }
  c.spacing = c.spacing > 1 ? c.spacing * item : 1;
}

} // namespace

InFlight start(Collective c) {
  const bool alone = needs_no_other(c);
  if (alone && !has_own_part(c)) {
    return {};
  }
  const bool traced = is_traced(c.local());
  if (!traced && !has_values(c.local())) {
    return {};
  }
  if (c.kind == CollectiveKind::AllGather && c.pieces.empty()) {
    list_pieces(c);
  }
  if (alone || !traced) {
    keep_own(c, alone);
  }
  if (traced && !alone) {
    record(c);
  }
  if (traced || alone || moves_nothing(c)) {
    return {};
  }
  if (!c.reduces()) {
    turn_into_bytes(c);
  }
  auto* together = CoalescedCalls::open();
  const bool is_noted = together && !c.apart && c.kind != CollectiveKind::Broadcast && c.kind != CollectiveKind::Scatter;
  return is_noted ? together->note(std::move(c)) : call_group(std::move(c));
}

void all_reduce(at::Tensor& tensor, const Mesh& mesh, int64_t mesh_dim, ReduceOp op) {
  start({.kind = CollectiveKind::AllReduce, .mesh = held(mesh), .mesh_dim = mesh_dim, .op = op, .out = tensor}).wait();
}

void all_reduce_over(at::Tensor& tensor, const Mesh& mesh, uint64_t mesh_dims, ReduceOp op) {
  for (int64_t m = 0; m < mesh.ndim(); ++m) {
    if (mesh_dims >> m & 1) {
      all_reduce(tensor, mesh, m, op);
    }
  }
}

void all_gather(std::vector<at::Tensor>& pieces, const at::Tensor& mine, const Mesh& mesh, int64_t mesh_dim) {
  start({.kind = CollectiveKind::AllGather, .mesh = held(mesh), .mesh_dim = mesh_dim, .in = mine, .pieces = pieces}).wait();
}

void broadcast(at::Tensor& tensor, const Mesh& mesh, int64_t mesh_dim, int64_t from) {
  start({.kind = CollectiveKind::Broadcast, .mesh = held(mesh), .mesh_dim = mesh_dim, .out = tensor, .from = from}).wait();
}

void scatter(at::Tensor& mine, std::vector<at::Tensor>& pieces, const Mesh& mesh, int64_t mesh_dim, int64_t from) {
  start({.kind = CollectiveKind::Scatter, .mesh = held(mesh), .mesh_dim = mesh_dim, .out = mine, .pieces = pieces, .from = from})
      .wait();
}

bool can_sum_apart(c10::Device device, const Mesh& mesh, int64_t mesh_dim) {
  if (mesh.group(mesh_dim).empty()) {
    return false;
  }
  const auto rules = backend_along(mesh, mesh_dim, device, "all_reduce");
  return rules.blocks && rules.sends;
}

bool gathers_as_one(const at::Tensor& mine, const Mesh& mesh, int64_t mesh_dim) {
  return is_called(mine, mesh, mesh_dim) && !mesh.is_reordered(mesh_dim) &&
         backend_along(mesh, mesh_dim, mine.device(), "all_gather").gathers;
}

bool can_reduce_scatter(const at::Tensor& summand, const Mesh& mesh, int64_t mesh_dim, ReduceOp op) {
  return is_called(summand, mesh, mesh_dim) && !mesh.is_reordered(mesh_dim) &&
         scatters(backend_along(mesh, mesh_dim, summand.device(), "reduce_scatter"), summand.scalar_type(), op);
}

int64_t spacing(const at::Tensor& like, const Mesh& mesh, int64_t mesh_dim, StagingKind what) {
  const auto item = static_cast<int64_t>(like.element_size());
  if (kStart % item != 0 || is_traced(like) || !has_values(like) ||
      CoalescedCalls::open()) { // CoalescedCalls copies, with gaps of its own
    return 1;
  }
  const bool between = what == StagingKind::Messages;
  if (between ? mesh.description().world.empty() : is_alone(mesh, mesh_dim)) {
    return 1;
  }
  const auto group = c10d::resolve_process_group(group_name(mesh, between ? -1 : mesh_dim, "all_to_all"));
  const auto rules = backend_of(*group, like.device());
  // In an all-to-all, other ranks may send in place, without gaps. Only single messages may start anywhere.
  const bool any_start = what != StagingKind::AllToAll || (rules.batches && ready_for_some(rules, *group, like.device()));
  return rules.aligned && any_start ? kStart / item : 1;
}

} // namespace shardtensor::comm
