#include "dispatch/handler.h"

#include "dispatch/alternative_paths.h"
#include "dispatch/call.h"
#include "dispatch/foreign_ops.h"
#include "dispatch/lists.h"
#include "dispatch/op.h"
#include "dispatch/plain_tensors.h"
#include "dispatch/typed.h"

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <unordered_map>

namespace shardtensor {

namespace {

using torch::jit::Stack;

template <void (*run)(const Op&, c10::DispatchKeySet, Stack*)>
c10::KernelFunction boxed(const Op& op) {
  return c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<BoxedKernel<run>>(op));
}

void run_usual(const Op& op, c10::DispatchKeySet, Stack* stack) {
  handle(op, stack);
}
void run_special(const Op& op, c10::DispatchKeySet, Stack* stack) {
  take_alternative_path(op, stack);
}

// The schemas of collectives do not say what they write, and on gathered copies a collective would do nothing.
void refuse_collective(const std::string& name) {
  const bool collective =
      name.rfind("c10d::", 0) == 0 || name.rfind("_c10d_functional::", 0) == 0 || name.rfind("c10d_functional::", 0) == 0;
  TORCH_CHECK_NOT_IMPLEMENTED(
      !collective, name,
      ": a collective on a ShardTensor, which is already one tensor for all ranks. Pass this rank's piece, to_local(), or move "
      "the pieces with redistribute() or full_tensor().");
}

// Ops that are defined after the import (torch.library).
struct LateOpTable {
  std::mutex mutex;
  std::unordered_map<std::string, const Op*> known;
};
LateOpTable& late_ops() {
  static auto* late = new LateOpTable();
  return *late;
}

// An op of the same name may be defined again, for example if a notebook cell runs twice.
struct DeregistrationListener final : c10::OpRegistrationListener {
  void onOperatorRegistered(const c10::OperatorHandle&) override {}
  void onOperatorDeregistered(const c10::OperatorHandle& op) override {
    auto& late = late_ops();
    std::lock_guard<std::mutex> lock(late.mutex);
    late.known.erase(text_of(op.operator_name()));
  }
};

// Late ops reach the key's fallback. Each is described once.
void fallback(const c10::OperatorHandle& handle_, c10::DispatchKeySet, Stack* stack) {
  const Op* op = nullptr;
  {
    auto& late = late_ops();
    std::lock_guard<std::mutex> lock(late.mutex);
    auto name = text_of(handle_.operator_name());
    auto it = late.known.find(name);
    if (it == late.known.end()) {
      refuse_collective(name);
      it = late.known.emplace(std::move(name), &add_op(handle_)).first;
    }
    op = it->second;
  }
  handle(*op, stack);
}

// Ops of other libraries that have a kernel for all backends. That kernel would come before the key's fallback and get the
// ShardTensors themselves, so the fallback is also registered as the op's own kernel. It stays registered if the op's definition
// goes away.
struct FallbackKernels {
  std::mutex mutex;
  std::unordered_map<std::string, c10::RegistrationHandleRAII> known;
};
FallbackKernels& fallback_kernels() {
  static auto* taken = new FallbackKernels();
  return *taken;
}

// A plain sparse tensor among ShardTensors, or a sparse result of an op on them.
void refuse_sparse(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, op.operator_name(),
      ": cannot be done on a ShardTensor: it holds dense pieces, but an argument is sparse. Use to_dense() on that argument, or "
      "full_tensor() or to_local() on the ShardTensors.");
}

bool takes_tensors(const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  return std::any_of(arguments.begin(), arguments.end(), [](const auto& a) { return kind_of(*a.type()) != ArgKind::Other; });
}

} // namespace

void update_foreign_op(const std::string& name, const std::string& overload) {
  if (is_known(name)) {
    return;
  }
  auto& dispatcher = c10::Dispatcher::singleton();
  const c10::OperatorName whole(name, overload);
  const auto op = dispatcher.findSchema(whole);
  const auto has = [&](c10::DispatchKey key) { return op->hasKernelForDispatchKey(key); };
  auto& taken = fallback_kernels();
  std::lock_guard<std::mutex> lock(taken.mutex);
  const auto found = taken.known.find(text_of(whole));
  const bool held = found != taken.known.end();
  const bool wanted = op && takes_tensors(op->schema()) && has(c10::DispatchKey::CompositeExplicitAutograd) &&
                      !has(c10::DispatchKey::CompositeImplicitAutograd);
  if (held && op && !wanted) {
    taken.known.erase(found);
  } else if (!held && wanted && !has(kKey)) {
    taken.known.emplace(
        text_of(whole),
        dispatcher.registerImpl(
            whole, kKey, c10::KernelFunction::makeFromBoxedFunction<&fallback>(), std::nullopt, nullptr, "shardtensor"));
  }
}

int64_t install_handler() {
  static std::deque<torch::Library> libraries;
  static std::deque<c10::RegistrationHandleRAII> registrations;
  auto& dispatcher = c10::Dispatcher::singleton();
  registrations.push_back(dispatcher.addRegistrationListener(std::make_unique<DeregistrationListener>()));
  auto& rest = libraries.emplace_back(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
  rest.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  for (const auto key : {c10::DispatchKey::SparsePrivateUse2, c10::DispatchKey::SparseCsrPrivateUse2}) {
    libraries.emplace_back(torch::Library::IMPL, "_", key, __FILE__, __LINE__)
        .fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_sparse>());
  }
  // As torch does for its own devices: an op without a derivative raises when its derivative is needed.
  auto& autograd = libraries.emplace_back(torch::Library::IMPL, "_", kAutogradKey, __FILE__, __LINE__);
  autograd.fallback(torch::autograd::basicAutogradNotImplementedFallback());
  auto& at_key = libraries.emplace_back(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  auto& at_autograd = libraries.emplace_back(torch::Library::IMPL, "aten", kAutogradKey, __FILE__, __LINE__);
  int64_t count = 0;
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (!is_known(name.name)) {
      continue;
    }
    const auto handle_ = dispatcher.findOp(name);
    if (!handle_ || !handle_->hasSchema() || !takes_tensors(handle_->schema())) {
      continue;
    }
    const auto* entry = entry_of(text_of(name));
    const auto has = [&](c10::DispatchKey key) { return handle_->hasKernelForDispatchKey(key); };
    const bool has_formula = entry && (entry->options.autograd || (entry->rule && has(c10::DispatchKey::Autograd)));
    if (has(c10::DispatchKey::CompositeImplicitAutograd) && !has_formula) {
      continue;
    }
    const auto& op = add_op(*handle_);
    const auto on = [&](c10::DispatchKey key, c10::KernelFunction kernel) {
      registrations.push_back(dispatcher.registerImpl(name, key, std::move(kernel), std::nullopt, nullptr, "shardtensor"));
    };
    if (entry && entry->options.autograd && !op.outputs) {
      at_autograd.impl(op.name.c_str(), entry->options.autograd(op));
    }
    if (entry && entry->is_formula()) {
      at_key.impl(op.name.c_str(), entry->options.autograd(op));
    } else {
      auto typed = has_alternative_path(op) ? typed_list_kernel(op) : typed_kernel(op);
      on(kKey, typed ? std::move(*typed) : has_alternative_path(op) ? boxed<run_special>(op) : boxed<run_usual>(op));
    }
    if (may_promote(op)) {
      auto recorder = typed_record(op);
      on(kAutogradKey, recorder ? std::move(*recorder) : boxed<record>(op));
    }
    ++count;
  }
  return count;
}

} // namespace shardtensor
