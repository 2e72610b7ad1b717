// What the handler knows about an aten op before any call: which arguments are tensors, which are written, its rule.
#pragma once

#include "rules/registry.h"

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <deque>
#include <memory>
#include <string>

namespace shardtensor {

enum class ArgKind : uint8_t { Other, Tensor, TensorList };
// What a value of the type holds: Tensor also for an optional one, TensorList for a list of any of these.
ArgKind kind_of(const c10::Type& type);

// "aten::add.Tensor": what c10::toString() gives, without its stream, which is slow for two thousand ops.
std::string text_of(const c10::OperatorName& name);

struct Op {
  explicit Op(const c10::OperatorHandle& op);

  c10::OperatorHandle handle;
  int32_t id;       // dense, for per-thread caches
  std::string name; // "aten::add.Tensor"
  c10::SmallVector<ArgKind, 8> kinds;
  uint64_t mutated = 0; // bit i: argument i is written
  uint64_t outputs = 0; // the written arguments that are not read (out=)
  // Per return: the argument it is (in-place, out=), or -1.
  c10::SmallVector<int8_t, 2> returns_argument;
  bool is_view = false;       // a return shares memory with argument 0
  bool reshapes_self = false; // unsqueeze_ and the like: argument 0 becomes a view of itself
  bool is_random = false;
  bool asks_sizes = false; // torch's meta kernel is asked for the sizes of out= arguments
  const rules::Entry* entry = nullptr;

  bool is(rules::Way way) const {
    return entry && entry->options.way == way;
  }
  const c10::FunctionSchema& schema() const {
    return handle.schema();
  }

  // The facts of a call that the op's rule has ever read, on any thread. The keys of its solutions hold them. They only grow.
  uint64_t reads() const {
    return reads_.load(std::memory_order_relaxed);
  }
  void has_read(uint64_t what) const {
    if (what & ~reads()) {
      reads_.fetch_or(what, std::memory_order_relaxed);
    }
  }

 private:
  mutable std::atomic<uint64_t> reads_{0};
};

// Whether torch or shardtensor defines the op of this name ("aten::add.Tensor"), not another library.
bool is_known(const std::string& name);
// The rules' entry for such an op, or null. Rules name it "add.Tensor" or "shardtensor::embedding_backward".
const rules::Entry* entry_of(const std::string& name);

// Adds an op, before the handler is registered for it.
const Op& add_op(const c10::OperatorHandle& handle);

// A boxed kernel that knows its op.
template <void (*run)(const Op&, c10::DispatchKeySet, torch::jit::Stack*)>
struct BoxedKernel final : c10::OperatorKernel {
  explicit BoxedKernel(const Op& op) : op_(op) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    run(op_, keys, stack);
  }
  const Op& op_;
};

// All ops that the handler is registered for, by id.
const std::deque<Op>& installed_ops();
const Op& installed_op(const char* name); // "aten::linear"

} // namespace shardtensor
