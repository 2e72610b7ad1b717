#include "dispatch/special.h"

#include "comm/comm.h"
#include "dispatch/ask.h"
#include "dispatch/call.h"
#include "dispatch/excluded.h"
#include "dispatch/key.h"
#include "dispatch/lists.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <unordered_map>

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

struct HashOfKey {
  size_t operator()(const Key& key) const {
    return key.hash();
  }
};
thread_local std::unordered_map<Key, Order, HashOfKey> t_orders;

// The dims of the op's result in memory, as torch orders them. It depends on the orders of the tensors, and on the other
// arguments.
Order order_of_result(const Op& op, Stack& stack) {
  const auto base = stack.size() - op.kinds.size();
  const auto refs = collect(op, stack, base);
  const auto ask = [&] {
    const auto call = laid_out(op, stack, base, refs);
    return call ? order_with_ones((*call)[0].toTensor().sizes(), (*call)[0].toTensor().strides()) : Order();
  };
  if (any_symbolic(refs)) {
    return ask();
  }
  constexpr size_t kMost = 1024;
  auto key = key_of(op, refs);
  push(key, static_cast<int64_t>(op.id));
  for (size_t i = 0; i < op.kinds.size(); ++i) {
    if (op.kinds[i] == ArgKind::Other) {
      push(key, stack[base + i]);
    }
  }
  const auto found = t_orders.find(key);
  if (found != t_orders.end()) {
    return found->second;
  }
  auto order = ask(); // it may run Python
  if (t_orders.size() >= kMost) {
    t_orders.clear();
  }
  t_orders.emplace(std::move(key), order);
  return order;
}

// A copy, if the dims are not in this order.
at::Tensor in_order(const at::Tensor& t, const Order& order) {
  const auto dense = [](const at::Tensor& t) { // dims of size 1 too have their strides
    const bool is = is_symbolic(t) ? t.is_contiguous() : t.strides() == c10::IntArrayRef(dense_strides(t.sizes(), {}));
    return is ? t : t.clone(at::MemoryFormat::Contiguous);
  };
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

// The entry's own calls, if it has any for these arguments.
std::optional<at::Tensor> made_in_stages(const Op& op, const Stack& stack) {
  const auto calls = op.entry->options.in_stages;
  return calls ? calls(torch::jit::last(stack, op.kinds.size())) : std::nullopt;
}

void give(const Op& op, Stack* stack, at::Tensor out) {
  torch::jit::drop(*stack, op.kinds.size());
  stack->emplace_back(std::move(out));
}

void handle_decomposed(const Op& op, Stack* stack) {
  if (const auto out = made_in_stages(op, *stack)) {
    return give(op, stack, *out);
  }
  using c10::DispatchKey;
  const bool usual = op.handle.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd);
  op.handle.callBoxedForDispatchKey(
      usual ? DispatchKey::CompositeExplicitAutograd : DispatchKey::CompositeExplicitAutogradNonFunctional, *stack);
}

void handle_stages(const Op& op, Stack* stack) {
  const auto out = made_in_stages(op, *stack);
  out ? give(op, stack, in_order(*out, order_of_result(op, *stack))) : handle(op, stack);
}

} // namespace

void handle_specially(const Op& op, Stack* stack) {
  if (op.is(rules::Way::Decomposed)) {
    handle_decomposed(op, stack);
  } else if (op.is(rules::Way::FoundInf)) {
    handle_found_inf(op, stack);
  } else if (op.is(rules::Way::Stages)) {
    handle_stages(op, stack);
  } else {
    handle_lists(op, stack);
  }
}

} // namespace shardtensor
