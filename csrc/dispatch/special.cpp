#include "dispatch/special.h"

#include "comm/comm.h"
#include "dispatch/ask.h"
#include "dispatch/call.h"
#include "dispatch/lists.h"
#include "dispatch/traced.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>

namespace shardtensor {

namespace {

using torch::jit::Stack;

// GradScaler's check: a bad value in any rank's piece counts on all ranks.
void handle_found_inf(const Op& op, Stack* stack_ptr) {
  auto& stack = *stack_ptr;
  const auto base = stack.size() - op.kinds.size();
  const auto refs = collect(op, stack, base);
  c10::impl::ExcludeDispatchKeyGuard below(kBelow);
  std::vector<MeshPtr> meshes;
  const auto local_of = [&](const at::Tensor& t) {
    const auto* impl = as_shard_tensor(t);
    if (!impl) {
      return t;
    }
    const auto& mesh = impl->layout().mesh_ptr();
    if (std::find(meshes.begin(), meshes.end(), mesh) == meshes.end()) {
      meshes.push_back(mesh);
    }
    return impl->local();
  };
  std::vector<at::Tensor> gradients;
  for (const auto& r : refs) {
    if (r.index >= 0) {
      gradients.push_back(local_of(*r.tensor));
    }
  }
  auto found = local_of(stack[base + 1].toTensor());
  const auto scale = local_of(stack[base + 2].toTensor());
  at::_amp_foreach_non_finite_check_and_unscale_(gradients, found, scale);
  note_writes(op, refs);
  for (const auto& mesh : meshes) {
    for (int64_t m = 0; m < mesh->ndim(); ++m) {
      comm::all_reduce(found, *mesh, m, ReduceOp::Max);
    }
  }
  stack.erase(stack.begin() + static_cast<int64_t>(base), stack.end());
}

thread_local std::map<std::vector<int64_t>, Order> t_orders;

// The dims of a transform's result in memory, as torch orders them. It depends on the order of self's and on which are
// transformed.
Order order_of_result(const Op& op, Stack& stack, const Sizes& dims) {
  const auto base = stack.size() - op.kinds.size();
  const auto refs = collect(op, stack, base);
  const bool symbolic = any_symbolic(refs);
  const auto ask = [&] { // its meta kernel is in Python
    auto call = on_meta(op, stack, base, refs, symbolic);
    c10::impl::ExcludeDispatchKeyGuard aside(kAside);
    op.handle.callBoxed(&call);
    return order_of(call[0].toTensor().strides());
  };
  if (symbolic) {
    return ask();
  }
  constexpr size_t kMost = 1024;
  const auto& self = *refs[0].tensor;
  const auto order = order_of(self.strides());
  std::vector<int64_t> key{reinterpret_cast<int64_t>(&op), static_cast<int64_t>(self.device().type()), self.dim()};
  key.insert(key.end(), dims.begin(), dims.end());
  key.push_back(-1);
  key.insert(key.end(), order.begin(), order.end());
  const auto found = t_orders.find(key);
  if (found != t_orders.end()) {
    return found->second;
  }
  if (t_orders.size() == kMost) {
    t_orders.clear();
  }
  return t_orders[key] = ask();
}

// A copy, if the dims are not in this order.
at::Tensor in_order(const at::Tensor& t, const Order& order) {
  const auto dense = [](const at::Tensor& t) { return t.is_contiguous() ? t : t.clone(at::MemoryFormat::Contiguous); };
  if (order.empty()) {
    return dense(t);
  }
  const std::vector<int64_t> dims(order.begin(), order.end());
  std::vector<int64_t> back(dims.size());
  for (size_t i = 0; i < dims.size(); ++i) {
    back[dims[i]] = static_cast<int64_t>(i);
  }
  return dense(t.permute(dims)).permute(back);
}

// Arguments of a Fourier transform: (self, dims, normalization, forward or onesided or the result's last size).
void handle_transform(const Op& op, Stack* stack) {
  using rules::Transform;
  const auto& last = op.handle.schema().arguments()[3].name();
  const auto kind = last == "forward" ? Transform::C2C : last == "onesided" ? Transform::R2C : Transform::C2R;
  const auto self = torch::jit::peek(*stack, 0, 4).toTensor();
  const auto* impl = as_shard_tensor(self);
  Sizes dims;
  bool known = impl;
  for (const auto& given : known ? torch::jit::peek(*stack, 1, 4).toSymIntVector() : std::vector<c10::SymInt>()) {
    const auto d = given.guard_int(__FILE__, __LINE__), at = d < 0 ? d + self.dim() : d;
    known = known && at >= 0 && at < self.dim() && std::find(dims.begin(), dims.end(), at) == dims.end();
    dims.push_back(at);
  }
  const auto stages = known ? rules::stages_of(kind, impl->layout(), self.sym_sizes(), dims) : std::nullopt;
  if (!stages) {
    return handle(op, stack);
  }
  const auto order = order_of_result(op, *stack, dims);
  const auto normalization = torch::jit::peek(*stack, 2, 4).toInt();
  const auto more = torch::jit::pop(*stack);
  torch::jit::drop(*stack, 3);
  const auto c2c = [&](const at::Tensor& t, const Sizes& along, bool forward) {
    return at::_fft_c2c(t, along, normalization, forward);
  };
  at::Tensor out;
  if (kind == Transform::C2C) {
    out = c2c(c2c(self, stages->first, more.toBool()), stages->rest, more.toBool());
  } else if (kind == Transform::R2C) {
    out = c2c(at::_fft_r2c(self, stages->first, normalization, more.toBool()), stages->rest, true);
  } else {
    out = at::_fft_c2r_symint(c2c(self, stages->first, false), stages->rest, normalization, more.toSymInt());
  }
  stack->emplace_back(in_order(out, order));
}

} // namespace

void handle_specially(const Op& op, Stack* stack) {
  if (op.is(rules::Way::Decomposed)) {
    using c10::DispatchKey;
    const bool usual = op.handle.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd);
    op.handle.callBoxedForDispatchKey(
        usual ? DispatchKey::CompositeExplicitAutograd : DispatchKey::CompositeExplicitAutogradNonFunctional, *stack);
  } else if (op.is(rules::Way::FoundInf)) {
    handle_found_inf(op, stack);
  } else if (is_transform(op)) {
    handle_transform(op, stack);
  } else {
    handle_lists(op, stack);
  }
}

} // namespace shardtensor
