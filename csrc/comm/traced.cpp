#include "comm/traced.h"

#include "comm/ranks.h"
#include "comm/reducible.h"
#include "comm/tensor_kind.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace shardtensor::comm::traced {

namespace {

template <typename... Args>
at::Tensor functional(const char* name, const at::Tensor& t, Args&&... args) {
  auto& dispatcher = c10::Dispatcher::singleton();
  torch::jit::Stack stack{t, c10::IValue(std::forward<Args>(args))...};
  dispatcher.findSchemaOrThrow((std::string("_c10d_functional::") + name).c_str(), "").callBoxed(&stack);
  dispatcher.findSchemaOrThrow("_c10d_functional::wait_tensor", "").callBoxed(&stack);
  return stack[0].toTensor();
}

// Converts to a dtype that every backend can send: complex numbers as pairs, others to a dtype of the same size or wider.
at::Tensor carried(const at::Tensor& t) {
  const auto dtype = t.scalar_type();
  if (t.is_complex()) {
    return at::view_as_real(t);
  }
  if (dtype == at::kBool || c10::isFloat8Type(dtype)) {
    return t.view(at::kByte);
  }
  if (dtype == at::kShort || dtype == at::kUInt16) {
    return t.to(at::kInt);
  }
  return dtype == at::kUInt32 ? t.view(at::kInt) : dtype == at::kUInt64 ? t.view(at::kLong) : t;
}
at::Tensor as_it_was(const at::Tensor& t, at::ScalarType dtype) {
  if (c10::isComplexType(dtype)) {
    return at::view_as_complex(t);
  }
  return dtype == at::kShort || dtype == at::kUInt16 ? t.to(dtype) : t.scalar_type() == dtype ? t : t.view(dtype);
}

const std::string& group_of(const Mesh& mesh, int64_t mesh_dim) {
  return group_name(mesh, mesh_dim, "a traced collective");
}

// Reorders the pieces along dim 0 from the order of the group's ranks to the order of the coordinates, or back.
at::Tensor reordered(const at::Tensor& t, const Mesh& mesh, int64_t mesh_dim, bool to_coordinates) {
  if (!mesh.is_reordered(mesh_dim)) {
    return t;
  }
  const auto n = mesh.size(mesh_dim);
  const auto pieces = t.chunk(n, 0);
  std::vector<at::Tensor> out(n);
  for (int64_t c = 0; c < n; ++c) {
    const auto r = mesh.group_rank(mesh_dim, c);
    (to_coordinates ? out[c] : out[r]) = pieces[to_coordinates ? r : c];
  }
  return at::cat(out, 0);
}

SymSizes by_group_rank(const SymSizes& sizes, const Mesh& mesh, int64_t mesh_dim) {
  auto out = sizes;
  for (size_t c = 0; c < sizes.size(); ++c) {
    out[mesh.group_rank(mesh_dim, static_cast<int64_t>(c))] = sizes[c];
  }
  return out;
}

at::Tensor exchanged(const at::Tensor& in, const SymSizes& out_sizes, const SymSizes& in_sizes, const std::string& group) {
  const auto out = functional(
      "all_to_all_single", carried(in.contiguous()), c10::SymIntArrayRef(out_sizes), c10::SymIntArrayRef(in_sizes), group);
  return as_it_was(out, in.scalar_type());
}

at::Tensor copied(const at::Tensor& t, at::TensorList) {
  return t.clone();
}
at::Tensor copied_meta(const at::Tensor& t, at::TensorList) {
  return at::empty_like(t);
}

TORCH_LIBRARY_FRAGMENT(shardtensor, m) {
  m.def("after(Tensor t, Tensor[] others) -> Tensor");
}
TORCH_LIBRARY_IMPL(shardtensor, CPU, m) {
  m.impl("after", copied);
}
TORCH_LIBRARY_IMPL(shardtensor, CUDA, m) {
  m.impl("after", copied);
}
TORCH_LIBRARY_IMPL(shardtensor, Meta, m) {
  m.impl("after", copied_meta);
}

} // namespace

at::Tensor after(const at::Tensor& t, at::TensorList others) {
  if (!is_recording() || !t.defined()) {
    return t;
  }
  c10::List<at::Tensor> of_graph; // without tensors that are constants
  for (const auto& other : others) {
    if (is_traced(other)) {
      of_graph.push_back(other);
    }
  }
  torch::jit::Stack stack{t, std::move(of_graph)};
  c10::Dispatcher::singleton().findSchemaOrThrow("shardtensor::after", "").callBoxed(&stack);
  return stack[0].toTensor();
}

at::Tensor all_reduce(const at::Tensor& t, const Mesh& mesh, int64_t mesh_dim, ReduceOp op) {
  if (is_alone(mesh, mesh_dim)) {
    return t;
  }
  const auto word = std::string(shardtensor::name_of(backend_op(op, t.scalar_type())));
  const auto out = functional("all_reduce", reducible(t, op).contiguous(), word, group_of(mesh, mesh_dim));
  return from_reducible(out, t, op, mesh.size(mesh_dim));
}

at::Tensor all_gather(const at::Tensor& mine, const Mesh& mesh, int64_t mesh_dim) {
  const auto out =
      functional("all_gather_into_tensor", carried(mine.contiguous()), mesh.size(mesh_dim), group_of(mesh, mesh_dim));
  return reordered(as_it_was(out, mine.scalar_type()), mesh, mesh_dim, /*to_coordinates=*/true);
}

bool can_reduce_scatter(ReduceOp op, at::ScalarType dtype) {
  return (op == ReduceOp::Sum || op == ReduceOp::Avg) && c10::isFloatingType(dtype) && !c10::isFloat8Type(dtype);
}

at::Tensor reduce_scatter(const at::Tensor& in, const Mesh& mesh, int64_t mesh_dim, ReduceOp op) {
  const auto sent = reordered(in, mesh, mesh_dim, /*to_coordinates=*/false).contiguous();
  const auto out = functional("reduce_scatter_tensor", sent, std::string("sum"), mesh.size(mesh_dim), group_of(mesh, mesh_dim));
  return op == ReduceOp::Avg ? out.div(mesh.size(mesh_dim)) : out;
}

at::Tensor all_to_all(
    const at::Tensor& in, const SymSizes& out_sizes, const SymSizes& in_sizes, const Mesh& mesh, int64_t mesh_dim) {
  const auto& group = group_of(mesh, mesh_dim);
  if (!mesh.is_reordered(mesh_dim)) {
    return exchanged(in, out_sizes, in_sizes, group);
  }
  const auto n = mesh.size(mesh_dim);
  const auto pieces = in.split_with_sizes_symint(in_sizes, 0);
  std::vector<at::Tensor> sent(n), arrived(n);
  for (int64_t c = 0; c < n; ++c) {
    sent[mesh.group_rank(mesh_dim, c)] = pieces[c];
  }
  const auto out_order = by_group_rank(out_sizes, mesh, mesh_dim);
  const auto out = exchanged(at::cat(sent, 0), out_order, by_group_rank(in_sizes, mesh, mesh_dim), group);
  const auto by_rank = out.split_with_sizes_symint(out_order, 0);
  for (int64_t c = 0; c < n; ++c) {
    arrived[c] = by_rank[mesh.group_rank(mesh_dim, c)];
  }
  return at::cat(arrived, 0);
}

at::Tensor all_to_all_of_world(const at::Tensor& in, const SymSizes& out_sizes, const SymSizes& in_sizes, const Mesh& mesh) {
  return exchanged(in, out_sizes, in_sizes, mesh.description().world);
}

at::Tensor broadcast(const at::Tensor& t, const Mesh& mesh, int64_t mesh_dim, int64_t from_coordinate) {
  const auto out =
      functional("broadcast", carried(t.contiguous()), mesh.group_rank(mesh_dim, from_coordinate), group_of(mesh, mesh_dim));
  return as_it_was(out, t.scalar_type());
}

} // namespace shardtensor::comm::traced
