#include "comm/comm.h"

#include <ATen/ATen.h>
#include <torch/headeronly/version.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <limits>

namespace shardtensor::comm {

namespace {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr size_t kKinds = static_cast<size_t>(Kind::kCount);
std::array<std::atomic<int64_t>, kKinds> g_calls{};
std::array<std::atomic<int64_t>, kKinds> g_bytes{};

int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const auto& t : tensors) {
    bytes += static_cast<int64_t>(t.nbytes());
  }
  return bytes;
}

// By name, each time: a group destroyed and made anew under the same name is found, and none is kept alive.
GroupPtr group_of(const Mesh& mesh, int64_t mesh_dim, const char* what) {
  const auto& name = mesh.group(mesh_dim);
  TORCH_CHECK(
      !name.empty(), "shardtensor: ", what, " along mesh dim ", mesh_dim, " of ", mesh.str(), ", but rank ", mesh.rank(),
      " has no process group there; the mesh was made without groups, or does not hold this rank");
  return c10d::resolve_process_group(name);
}

// One byte buffer for all ranks, cut by sizes.
c10::intrusive_ptr<c10d::Work> exchange_bytes(
    c10d::ProcessGroup& group,
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& output_sizes,
    std::vector<int64_t>& input_sizes) {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 15
  return group.alltoall_base(output, input, output_sizes, input_sizes);
#else
  return group.all_to_all_single(output, input, output_sizes, input_sizes);
#endif
}

void wait(const c10::intrusive_ptr<c10d::Work>& work) {
  if (work) {
    work->wait();
  }
}

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
      return c10d::ReduceOp::BXOR;
  }
  return c10d::ReduceOp::SUM;
}

// Backends move bytes of some dtypes only; data that is not added up travels as bytes. `t` is contiguous (its strides along
// dims of size 1 may be anything).
at::Tensor as_bytes(const at::Tensor& t) {
  return t.numel() ? at::detach(t).as_strided({t.numel()}, {1}).view(at::kByte) : at::empty({0}, t.options().dtype(at::kByte));
}

bool by_order(const at::Tensor& t, ReduceOp op) {
  return (op == ReduceOp::Max || op == ReduceOp::Min) && t.is_floating_point();
}

// Integers in the order of the floats' bits, and back: the negative ones run the other way.
at::Tensor mirror(const at::Tensor& bits) {
  const int64_t all_but_sign =
      bits.scalar_type() == at::kLong ? std::numeric_limits<int64_t>::max() : std::numeric_limits<int32_t>::max();
  return at::where(bits.lt(0), bits.bitwise_xor(all_but_sign), bits);
}

// Backends lose NaN in max and min. As integers in the floats' order, NaN beyond every number, it wins as in torch.
at::Tensor ordered(const at::Tensor& t, ReduceOp op) {
  const auto x = t.scalar_type() == at::kDouble ? t : t.to(at::kFloat);
  auto out = mirror(x.view(x.scalar_type() == at::kDouble ? at::kLong : at::kInt));
  const bool max = op == ReduceOp::Max;
  if (out.scalar_type() == at::kLong) {
    out.masked_fill_(x.isnan(), max ? std::numeric_limits<int64_t>::max() : std::numeric_limits<int64_t>::min());
  } else {
    out.masked_fill_(x.isnan(), max ? std::numeric_limits<int32_t>::max() : std::numeric_limits<int32_t>::min());
  }
  return out;
}

at::Tensor from_ordered(const at::Tensor& t) {
  return mirror(t).view(t.scalar_type() == at::kLong ? at::kDouble : at::kFloat);
}

// A tensor the backend can reduce that shares or stands for `t`: complex as pairs, bool and small ints widened.
at::Tensor reducible(const at::Tensor& t, ReduceOp op) {
  if (by_order(t, op)) {
    return ordered(t, op);
  }
  if (t.is_complex()) {
    TORCH_CHECK(
        op == ReduceOp::Sum || op == ReduceOp::Avg,
        "shardtensor: a complex tensor can be reduced over ranks by sum or avg alone, not by ", shardtensor::name_of(op));
    return at::view_as_real(t);
  }
  if (t.scalar_type() == at::kBool) {
    return op == ReduceOp::Sum || op == ReduceOp::Bxor ? t.to(at::kInt) : t.to(at::kByte);
  }
  const auto dtype = t.scalar_type();
  if (dtype == at::kShort || dtype == at::kUInt16) {
    return t.to(at::kInt);
  }
  if (t.device().is_cpu() && (c10::isFloat8Type(dtype))) {
    return t.to(at::kFloat);
  }
  return t;
}

} // namespace

const char* name_of(Kind kind) {
  static constexpr std::array<const char*, kKinds> names = {"all_reduce",     "all_gather", "all_to_all",
                                                            "reduce_scatter", "broadcast",  "scatter"};
  return names[static_cast<size_t>(kind)];
}

void count(Kind kind, int64_t bytes) {
  g_calls[static_cast<size_t>(kind)].fetch_add(1, std::memory_order_relaxed);
  g_bytes[static_cast<size_t>(kind)].fetch_add(bytes, std::memory_order_relaxed);
}

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

void all_reduce(at::Tensor& tensor, const Mesh& mesh, int64_t mesh_dim, ReduceOp op) {
  if (mesh.size(mesh_dim) == 1 || tensor.numel() == 0) {
    return;
  }
  auto group = group_of(mesh, mesh_dim, "all_reduce");
  auto buffer = reducible(tensor, op);
  std::vector<at::Tensor> tensors{buffer};
  c10d::AllreduceOptions options;
  options.reduceOp = op_for(op, tensor.scalar_type());
  count(Kind::AllReduce, static_cast<int64_t>(buffer.nbytes()));
  wait(group->allreduce(tensors, options));
  if (op == ReduceOp::Avg) {
    buffer.div_(mesh.size(mesh_dim));
  }
  if (tensor.scalar_type() == at::kBool && op == ReduceOp::Bxor) {
    buffer = buffer.remainder(2);
  }
  if (by_order(tensor, op)) {
    tensor.copy_(from_ordered(buffer));
  } else if (!tensor.is_complex() && buffer.scalar_type() != tensor.scalar_type()) {
    tensor.copy_(buffer);
  }
}

void all_reduce_over(at::Tensor& tensor, const Mesh& mesh, uint64_t mesh_dims, ReduceOp op) {
  for (int64_t m = 0; m < mesh.ndim(); ++m) {
    if (mesh_dims >> m & 1) {
      all_reduce(tensor, mesh, m, op);
    }
  }
}

void all_gather(std::vector<at::Tensor>& pieces, const at::Tensor& mine, const Mesh& mesh, int64_t mesh_dim) {
  const auto me = mesh.coordinate()[mesh_dim];
  if (pieces[me].data_ptr() != mine.data_ptr()) {
    pieces[me].copy_(mine);
  }
  if (mesh.size(mesh_dim) == 1) {
    return;
  }
  auto group = group_of(mesh, mesh_dim, "all_gather");
  count(Kind::AllGather, static_cast<int64_t>(mine.nbytes()));
  // One broadcast per piece, straight into its place: any sizes, no padding, no copy afterwards.
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::vector<std::vector<at::Tensor>> holders;
  holders.reserve(pieces.size());
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (pieces[i].numel() == 0) {
      continue;
    }
    holders.push_back({as_bytes(pieces[i])});
    c10d::BroadcastOptions options;
    options.rootRank = mesh.group_rank(mesh_dim, static_cast<int64_t>(i));
    works.push_back(group->broadcast(holders.back(), options));
  }
  for (const auto& work : works) {
    wait(work);
  }
}

namespace {

std::vector<int64_t> coordinates_by_group_rank(const Mesh& mesh, int64_t mesh_dim) {
  std::vector<int64_t> out(mesh.size(mesh_dim));
  for (int64_t c = 0; c < mesh.size(mesh_dim); ++c) {
    out[mesh.group_rank(mesh_dim, c)] = c;
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

// exchange_bytes() of buffers in the order of the coordinates, where the group's ranks have another.
void exchange_reordered(
    c10d::ProcessGroup& group,
    at::Tensor& output,
    const at::Tensor& input,
    const std::vector<int64_t>& out_cut,
    const std::vector<int64_t>& in_cut,
    const std::vector<int64_t>& order) {
  auto arrived = at::empty_like(output), sent = at::empty_like(input);
  auto out_sizes = picked(out_cut, order), in_sizes = picked(in_cut, order);
  const auto sources = input.split_with_sizes(in_cut), targets = sent.split_with_sizes(in_sizes);
  for (size_t r = 0; r < order.size(); ++r) {
    at::Tensor(targets[r]).copy_(sources[order[r]]);
  }
  wait(exchange_bytes(group, arrived, sent, out_sizes, in_sizes));
  const auto pieces = arrived.split_with_sizes(out_sizes), places = output.split_with_sizes(out_cut);
  for (size_t r = 0; r < order.size(); ++r) {
    at::Tensor(places[order[r]]).copy_(pieces[r]);
  }
}

void exchange(
    Kind kind,
    at::Tensor& out,
    at::IntArrayRef out_sizes,
    const at::Tensor& in,
    at::IntArrayRef in_sizes,
    const Mesh& mesh,
    int64_t mesh_dim) {
  auto group = group_of(mesh, mesh_dim, name_of(kind));
  const auto in_bytes = [item = in.element_size()](at::IntArrayRef sizes) {
    auto bytes = sizes.vec();
    for (auto& b : bytes) {
      b *= item;
    }
    return bytes;
  };
  auto out_cut = in_bytes(out_sizes), in_cut = in_bytes(in_sizes);
  auto output = as_bytes(out), input = as_bytes(in);
  count(kind, input.numel() - in_cut[mesh.coordinate()[mesh_dim]]);
  if (mesh.is_reordered(mesh_dim)) {
    return exchange_reordered(*group, output, input, out_cut, in_cut, coordinates_by_group_rank(mesh, mesh_dim));
  }
  wait(exchange_bytes(*group, output, input, out_cut, in_cut));
}

} // namespace

void all_to_all(
    at::Tensor& out,
    at::IntArrayRef out_sizes,
    const at::Tensor& in,
    at::IntArrayRef in_sizes,
    const Mesh& mesh,
    int64_t mesh_dim) {
  if (mesh.size(mesh_dim) > 1) {
    exchange(Kind::AllToAll, out, out_sizes, in, in_sizes, mesh, mesh_dim);
  }
}

void exchange_summands(at::Tensor& out, const at::Tensor& in, at::IntArrayRef in_sizes, const Mesh& mesh, int64_t mesh_dim) {
  const auto n = mesh.size(mesh_dim);
  if (n == 1) {
    out.copy_(in);
    return;
  }
  const std::vector<int64_t> out_sizes(n, out.numel() / n);
  exchange(Kind::ReduceScatter, out, out_sizes, in, in_sizes, mesh, mesh_dim);
}

void broadcast(at::Tensor& tensor, const Mesh& mesh, int64_t mesh_dim, int64_t from_coordinate) {
  if (mesh.size(mesh_dim) == 1 || tensor.numel() == 0) {
    return;
  }
  auto group = group_of(mesh, mesh_dim, "broadcast");
  std::vector<at::Tensor> tensors{as_bytes(tensor)};
  c10d::BroadcastOptions options;
  options.rootRank = mesh.group_rank(mesh_dim, from_coordinate);
  count(Kind::Broadcast, mesh.coordinate()[mesh_dim] == from_coordinate ? bytes_of(tensors) : 0);
  wait(group->broadcast(tensors, options));
}

void scatter(at::Tensor& mine, std::vector<at::Tensor>& pieces, const Mesh& mesh, int64_t mesh_dim, int64_t from_coordinate) {
  const auto n = mesh.size(mesh_dim);
  const auto me = mesh.coordinate()[mesh_dim];
  if (me == from_coordinate) {
    mine.copy_(pieces[me]);
  }
  if (n == 1) {
    return;
  }
  // Every rank along the dim calls, whatever it receives: no rank may know that another's piece is empty.
  auto group = group_of(mesh, mesh_dim, "scatter");
  const auto options = mine.options().dtype(at::kByte);
  std::vector<int64_t> in_sizes(n, 0), out_sizes(n, 0);
  std::vector<at::Tensor> outgoing;
  if (me == from_coordinate) {
    for (auto i : coordinates_by_group_rank(mesh, mesh_dim)) {
      if (i != me && pieces[i].numel()) {
        in_sizes[mesh.group_rank(mesh_dim, i)] = static_cast<int64_t>(pieces[i].nbytes());
        outgoing.push_back(as_bytes(pieces[i]));
      }
    }
  } else {
    out_sizes[mesh.group_rank(mesh_dim, from_coordinate)] = static_cast<int64_t>(mine.nbytes());
  }
  auto input = outgoing.empty() ? at::empty({0}, options) : at::cat(outgoing);
  auto output = at::empty({me == from_coordinate ? 0 : static_cast<int64_t>(mine.nbytes())}, options);
  count(Kind::Scatter, input.numel());
  wait(exchange_bytes(*group, output, input, out_sizes, in_sizes));
  if (output.numel()) {
    as_bytes(mine).copy_(output);
  }
}

} // namespace shardtensor::comm
