#include "autograd/gathered.h"

#include "autograd/functions.h"
#include "dispatch/outputs.h"
#include "dispatch/plain.h"
#include "redistribute/watch.h"

#include <torch/library.h>

namespace shardtensor {

namespace {

void tell_of_gathers(const Op& op, const Refs& refs, const Layout& replicated) {
  for (const auto& r : refs) {
    if (r.impl && &r.impl->layout() != &replicated) {
      tell_watcher(op.name, op.schema().arguments()[r.arg].name(), why_moved(op), r.impl->layout(), replicated, *r.tensor);
    }
  }
}

c10::IValue gathered(const c10::IValue& value) {
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

// A rank that the mesh does not hold has nothing of the results; the graph goes on through it, as everywhere.
void stand_aside(const Op& op, torch::jit::Stack& stack, size_t base, const Refs& refs, const LayoutPtr& layout) {
  auto results = on_meta(op, stack, base, refs);
  {
    c10::impl::ExcludeDispatchKeyGuard below(kBelow);
    op.handle.callBoxed(&results);
  }
  at::Tensor nothing;
  for (const auto& r : refs) {
    if (!nothing.defined() || r.tensor->requires_grad()) {
      const auto one = whole(*r.tensor).flatten().narrow(0, 0, 0);
      nothing = nothing.defined() ? nothing.add(one) : one;
    }
  }
  stack.resize(base);
  for (const auto& value : results) {
    const auto& t = value.toTensor();
    stack.emplace_back(t.defined() ? from_local(nothing.to(t.scalar_type()), layout, t.sizes(), t.strides()) : t);
  }
}

void handle_gathered(const Op& op, torch::jit::Stack* stack_ptr) {
  auto& stack = *stack_ptr;
  const auto base = stack.size() - op.kinds.size();
  const auto refs = collect(op, stack, base);
  check_plain(op, refs);
  const auto layout = find_solution(op, stack, base, refs)->replicated;
  if (!layout->mesh().has_me()) {
    return stand_aside(op, stack, base, refs, layout);
  }
  tell_of_gathers(op, refs, *layout);
  for (size_t i = base; i < stack.size(); ++i) {
    stack[i] = gathered(stack[i]);
  }
  op.handle.callBoxed(stack_ptr);
  for (size_t i = stack.size() - op.returns_argument.size(); i < stack.size(); ++i) {
    if (stack[i].isTensor() && stack[i].toTensor().defined()) {
      const auto t = stack[i].toTensor();
      stack[i] = from_local(t, layout, t.sizes(), t.strides());
    }
  }
}

struct Handler final : c10::OperatorKernel {
  explicit Handler(const Op* op) : op_(op) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    handle_gathered(*op_, stack);
  }
  const Op* op_;
};

} // namespace

void install_gathered() {
  static torch::Library library(torch::Library::IMPL, "aten", kAutogradKey, __FILE__, __LINE__);
  for (const auto& op : installed_ops()) {
    if (op.entry && op.entry->options.gather) {
      library.impl(op.name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Handler>(&op)));
    }
  }
}

} // namespace shardtensor
