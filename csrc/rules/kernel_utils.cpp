#include "rules/kernel_utils.h"

#include "comm/comm.h"
#include "comm/tensor_kind.h"
#include "comm/traced.h"
#include "redistribute/neutral_value.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <limits>

namespace shardtensor::rules {

namespace {

int64_t position(const c10::FunctionSchema& schema, const char* name) {
  const auto i = schema.argumentIndexWithName(name);
  return i ? *i : -1;
}

} // namespace

int64_t argument(const Call& call, const char* name) {
  return position(call.schema, name);
}
int64_t argument(const KernelRun& run, const char* name) {
  return position(run.op.schema(), name);
}

void add_outputs(const Call& call, Rule& rule) {
  size_t nth = 0;
  for (const auto& t : call.tensors) {
    if (!t.output) {
      continue;
    }
    TORCH_INTERNAL_ASSERT(nth < rule.results.size(), call.schema.name(), ": more out= arguments than results");
    const auto& result = rule.results[nth++];
    TORCH_CHECK(
        t.dim() == static_cast<int64_t>(result.dims.size()), call.schema.name(), ": argument '",
        call.schema.arguments()[t.arg].name(), "' has ", t.dim(), " dims, the result ", result.dims.size(),
        "; out= tensors are not resized, pass one that has the result's sizes");
    Operand operand(result.dims);
    operand.reduce = result.reduce;
    rule.operands.push_back(std::move(operand));
  }
}

OperandSet with_outputs(const Call& call, OperandSet operands) {
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    if (call.tensors[i].output) {
      operands.add(i);
    }
  }
  return operands;
}

Rule whole_along(const Call& call, uint64_t mask) {
  Rule rule;
  Dims dims;
  for (int64_t d = 0; d < call.tensors[0].dim(); ++d) {
    dims.push_back(mask >> d & 1 ? Dim(kNone) : Dim(rule.factor()));
  }
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    rule.operands.emplace_back(dims);
  }
  rule.results.emplace_back(std::move(dims));
  rule.passes_partial(OperandSet::first(call.tensors.size()));
  return rule;
}

Rule unread(const Call& call, Kernel kernel) {
  auto rule = replicate(call);
  for (auto& operand : rule.operands) {
    operand.free = true;
  }
  rule.always(kernel);
  return rule;
}

void return_results(const KernelRun& run, const std::vector<at::Tensor>& results) {
  const auto& arguments = run.op.schema().arguments();
  std::vector<c10::IValue> out;
  size_t nth = 0;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].alias_info() && arguments[i].alias_info()->isWrite()) {
      auto into = run.arg(i).toTensor();
      const auto& value = results[nth++];
      TORCH_CHECK(
          into.sym_sizes() == value.sym_sizes(), run.op.schema().name(), ": argument '", arguments[i].name(), "' has sizes ",
          into.sym_sizes(), " on rank ", run.mesh().rank(), ", the result ", value.sym_sizes(),
          "; out= tensors are not resized, pass one that has the result's sizes");
      out.emplace_back(into.copy_(value));
    }
  }
  if (out.empty()) {
    out.assign(results.begin(), results.end());
  }
  run.returns(std::move(out));
}

void add_bias_once(const KernelRun& run, size_t arg, int64_t contracted) {
  const auto over = run.mesh_dims(contracted);
  bool first = true;
  for (int64_t m = 0; m < run.mesh().ndim(); ++m) {
    first &= !(over >> m & 1) || run.mesh().coordinate()[m] == 0;
  }
  if (first || run.arg(arg).isNone()) {
    return;
  }
  const auto bias = run.arg(arg).toTensor();
  run.arg(arg) = is_traced(bias) ? c10::IValue(comm::traced::after(at::zeros_like(bias), bias)) : c10::IValue();
}

uint64_t mesh_dims_of(const KernelRun& run, uint64_t factors) {
  uint64_t out = 0;
  for (size_t f = 0; f < run.solution.factor_mesh_dims.size(); ++f) {
    if (factors >> f & 1) {
      out |= run.mesh_dims(static_cast<int64_t>(f));
    }
  }
  return out;
}

at::Tensor over_ranks(const at::Tensor& t, const KernelRun& run, uint64_t mesh_dims, ReduceOp op) {
  auto out = t.contiguous();
  comm::all_reduce_over(out, run.mesh(), mesh_dims, op);
  return out;
}

at::Tensor gather_slices(const at::Tensor& mine, int64_t dim, const Mesh& mesh, int64_t mesh_dim) {
  const auto slice = mine.contiguous();
  std::vector<at::Tensor> slices(mesh.size(mesh_dim));
  for (auto& s : slices) {
    s = at::empty_like(slice);
  }
  comm::all_gather(slices, slice, mesh, mesh_dim);
  return at::cat(slices, dim);
}

at::Tensor extreme(const at::Tensor& piece, c10::IntArrayRef dims, ReduceOp op) {
  if (count_along(piece.sym_sizes(), dims) > 0) {
    return op == ReduceOp::Max ? at::amax(piece, dims, true) : at::amin(piece, dims, true);
  }
  auto sizes = piece.sym_sizes().vec();
  for (auto d : dims) {
    sizes[d] = 1;
  }
  return at::full_symint(sizes, neutral_value(op, piece.scalar_type()), piece.options());
}

Factor normed(double order) {
  constexpr auto infinity = std::numeric_limits<double>::infinity();
  Factor f;
  f.reduce = order == infinity ? ReduceOp::Max : order == -infinity ? ReduceOp::Min : order == 0 ? ReduceOp::Sum : ReduceOp::Norm;
  f.norm_order = order;
  return f;
}

SymInterval mine(const KernelRun& run, size_t i, int64_t dim) {
  return shardtensor::mine(*run.operands[i].layout, dim, run.operands[i].symbols[dim]);
}

LocalIndex inside(const at::Tensor& index, const SymInterval& piece, const at::Scalar& otherwise) {
  auto local = index - at::Scalar(piece.start);
  auto outside = local.lt(0).logical_or_(local.ge(at::Scalar(piece.length)));
  return {local.masked_fill_(outside, otherwise), std::move(outside)};
}

at::ScalarType accumulate_type(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
}

Sizes dims_in(uint64_t mask, int64_t ndim) {
  Sizes out;
  for (int64_t d = 0; d < ndim; ++d) {
    if (mask >> d & 1) {
      out.push_back(d);
    }
  }
  return out;
}

at::Tensor squeeze_dims(const at::Tensor& t, c10::IntArrayRef dims, bool keepdim) {
  return keepdim ? t : at::squeeze(t, dims);
}

c10::SymInt count_along(c10::SymIntArrayRef sizes, c10::IntArrayRef dims) {
  c10::SymInt n = 1;
  for (auto d : dims) {
    n = n * sizes[d];
  }
  return n;
}

} // namespace shardtensor::rules
