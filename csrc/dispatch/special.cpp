#include "dispatch/special.h"

#include "dispatch/ask.h"
#include "dispatch/call.h"
#include "dispatch/excluded.h"
#include "dispatch/key.h"
#include "dispatch/lists.h"

#include <ATen/ATen.h>

#include <unordered_map>

namespace shardtensor {

namespace {

using torch::jit::Stack;

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

// As torch decomposes it.
void decompose(const Op& op, Stack* stack) {
  using c10::DispatchKey;
  const bool usual = op.handle.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd);
  op.handle.callBoxedForDispatchKey(
      usual ? DispatchKey::CompositeExplicitAutograd : DispatchKey::CompositeExplicitAutogradNonFunctional, *stack);
}

} // namespace

void handle_specially(const Op& op, Stack* stack) {
  if (op.is(rules::Way::Lists)) {
    return handle_lists(op, stack);
  }
  const auto calls = op.entry->options.calls;
  auto out = calls ? calls(torch::jit::last(*stack, op.kinds.size())) : std::nullopt;
  if (!out) {
    return op.entry->rule ? handle(op, stack) : decompose(op, stack);
  }
  if (op.entry->rule) {
    out = in_order(*out, order_of_result(op, *stack));
  }
  torch::jit::drop(*stack, op.kinds.size());
  if (!op.schema().returns().empty()) {
    stack->emplace_back(std::move(*out));
  }
}

} // namespace shardtensor
