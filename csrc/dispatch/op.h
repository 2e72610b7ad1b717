// What the handler knows of one aten op before it is called: which arguments are tensors, what is written, its rule.
// Uses rules/registry.h. Used by handler.cpp and fallback.cpp.
#pragma once

#include "rules/registry.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <deque>

namespace shardtensor {

enum class ArgKind : uint8_t { Other, Tensor, TensorList };

struct Op {
  explicit Op(c10::OperatorHandle handle);

  c10::OperatorHandle handle;
  int32_t id;       // dense, for per-thread caches
  std::string name; // "aten::add.Tensor"
  c10::SmallVector<ArgKind, 8> kinds;
  uint64_t mutated = 0; // bit i: argument i is written
  uint64_t outputs = 0; // those that are not read (out=)
  // Per return: the argument it is (in-place, out=), or -1.
  c10::SmallVector<int8_t, 2> returns_argument;
  bool is_view = false;       // a return shares memory with argument 0
  bool reshapes_self = false; // unsqueeze_ and the like: argument 0 becomes a view of itself
  bool is_random = false;
  const rules::Entry* entry = nullptr;
  bool sized = false;     // sizes belong in the cache's key
  bool strided = false;   // and strides
  bool keyed_args = true; // so do the non-tensor arguments

  const c10::FunctionSchema& schema() const {
    return handle.schema();
  }
};

// All that the handler has been registered for, by id.
const std::deque<Op>& installed_ops();
const Op& installed_op(const char* name); // "aten::linear"

} // namespace shardtensor
