#include "dispatch/gather.h"

#include "autograd/functions.h"
#include "dispatch/call.h"

namespace shardtensor {

namespace {

at::Tensor whole(const at::Tensor& t) {
  const auto* impl = as_shard_tensor(t);
  return impl ? to_local(redistribute(t, Layout::replicated(impl->layout().mesh_ptr()))) : t;
}

c10::IValue whole(const c10::IValue& value) {
  if (value.isTensor() && value.toTensor().defined()) {
    return whole(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& t : value.toTensorList()) {
      out.push_back(whole(t));
    }
    return out;
  }
  return value;
}

} // namespace

void handle_gathered(const Op& op, torch::jit::Stack* stack_ptr) {
  auto& stack = *stack_ptr;
  const auto base = stack.size() - op.kinds.size();
  const auto refs = collect(op, stack, base);
  check_plain(op, refs);
  const auto layout = find_solution(op, stack, base, refs)->replicated;
  for (size_t i = base; i < stack.size(); ++i) {
    stack[i] = whole(stack[i]);
  }
  op.handle.callBoxed(stack_ptr);
  for (size_t i = stack.size() - op.returns_argument.size(); i < stack.size(); ++i) {
    if (stack[i].isTensor() && stack[i].toTensor().defined()) {
      const auto t = stack[i].toTensor();
      stack[i] = from_local(t, layout, t.sizes(), t.strides());
    }
  }
}

} // namespace shardtensor
