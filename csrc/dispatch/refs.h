// The tensors among a call's arguments.
#pragma once

#include "comm/tensor_kind.h"
#include "dispatch/op.h"
#include "tensor/shard_tensor.h"

#include <ATen/core/stack.h>

#include <algorithm>

namespace shardtensor {

// One tensor among the arguments, unchanged. Non-owning: increasing the refcount of a tensor that has a Python object needs the
// GIL.
struct Ref {
  int16_t arg;
  int32_t index; // in its list, or -1
  const at::Tensor* tensor;
  ShardTensorImpl* impl; // null: plain

  Ref(size_t a, int64_t i, const at::Tensor& t)
      : arg(static_cast<int16_t>(a)), index(static_cast<int32_t>(i)), tensor(&t), impl(as_shard_tensor(t)) {}
};
using Refs = c10::SmallVector<Ref, 4>;

// The sizes; for a fake tensor of a graph, their current numbers.
inline c10::IntArrayRef sizes_of(const Ref& r) {
  return C10_UNLIKELY(r.impl && r.impl->is_symbolic()) ? r.impl->sizes_hint() : r.tensor->sizes();
}

// Whether the op only writes it (out=).
inline bool is_output(const Op& op, const Ref& r) {
  return op.outputs >> r.arg & 1;
}

inline bool any_symbolic(const Refs& refs) {
  return std::any_of(refs.begin(), refs.end(), [](const Ref& r) { return is_symbolic(*r.tensor); });
}
inline bool any_traced(const Refs& refs) {
  return std::any_of(refs.begin(), refs.end(), [](const Ref& r) { return r.impl && r.impl->traced(); });
}

// Every tensor among boxed arguments. The references point into the stack.
Refs collect(const Op& op, const torch::jit::Stack& stack, size_t base);

// The mesh of the ShardTensors among the arguments; raises if there are several.
const MeshPtr& mesh_of(const Op& op, const Refs& refs);

// The tensors among boxed results, those of a list one by one.
template <typename Use>
void each_tensor(c10::ArrayRef<c10::IValue> results, const Use& use) {
  for (const auto& value : results) {
    if (value.isTensor()) {
      use(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorList()) {
        use(t);
      }
    }
  }
}

// Copies `list`, a list of tensors or of optional tensors, applies `change` to the copy and puts it into the slot.
template <typename Change>
void change_list(c10::IValue& slot, const c10::IValue& list, const Change& change) {
  const auto put = [&](auto copy) {
    change(copy);
    slot = std::move(copy);
  };
  if (list.isTensorList()) {
    put(list.toTensorList().copy());
  } else {
    put(c10::impl::toTypedList<std::optional<at::Tensor>>(list.toList()).copy());
  }
}

// Replaces each tensor for which `is` holds by the result of `change`. Both get its Ref.
template <typename Is, typename Change>
void replace_tensors(torch::jit::Stack& stack, size_t base, const Refs& refs, const Is& is, const Change& change) {
  for (size_t i = 0; i < refs.size();) {
    auto& slot = stack[base + refs[i].arg];
    if (refs[i].index < 0) {
      if (is(refs[i])) {
        slot = change(refs[i]);
      }
      ++i;
      continue;
    }
    const auto arg = refs[i].arg;
    const auto given = slot; // owns what the references point into
    change_list(slot, given, [&](auto& list) {
      for (; i < refs.size() && refs[i].arg == arg; ++i) {
        if (is(refs[i])) {
          list.set(static_cast<size_t>(refs[i].index), change(refs[i]));
        }
      }
    });
  }
}

} // namespace shardtensor
