#include "dispatch/alternative_paths.h"

#include "dispatch/call.h"
#include "dispatch/excluded_keys.h"
#include "dispatch/key.h"
#include "dispatch/lists.h"
#include "dispatch/meta_probe.h"
#include "layout/thread_owned.h"

#include <ATen/ATen.h>

namespace shardtensor {

namespace {

using torch::jit::Stack;

struct Orders : ThreadTable<CacheKey, DimOrder> {
  Orders() : ThreadTable(1024) {}
};

// The order in which torch would lay out the dims of the op's result. It depends on the orders of the tensors, and on the other
// arguments.
DimOrder order_of_result(const Op& op, Stack& stack) {
  const auto base = stack.size() - op.kinds.size();
  const auto refs = collect(op, stack, base);
  const auto ask = [&] {
    const auto call = probe_results(op, stack, base, refs);
    return call ? order_with_ones((*call)[0].toTensor().sizes(), (*call)[0].toTensor().strides()) : DimOrder();
  };
  if (any_symbolic(refs)) {
    return ask();
  }
  auto key = key_of(op, refs);
  push(key, static_cast<int64_t>(op.id));
  for (size_t i = 0; i < op.kinds.size(); ++i) {
    if (op.kinds[i] == ArgKind::Other) {
      push(key, stack[base + i]);
    }
  }
  if (const auto* found = of_thread<Orders>().find(key)) {
    return *found;
  }
  auto order = ask(); // it may run Python
  of_thread<Orders>().put(std::move(key), order);
  return order;
}

// The tensor with its dims in this order, copied if need be.
at::Tensor in_order(const at::Tensor& t, const DimOrder& order) {
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

void take_alternative_path(const Op& op, Stack* stack) {
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
