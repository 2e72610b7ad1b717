// A table from op names to typed kernels, one line per signature.
#pragma once

#include "dispatch/op.h"

#include <ATen/core/boxing/KernelFunction.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

namespace shardtensor {

// Kernel<Signature> is an OperatorKernel made from an Op.
template <template <typename> class Kernel>
class KernelTable {
 public:
  // Names without "aten::".
  template <typename Signature>
  void add(std::initializer_list<const char*> ops) {
    for (const char* op : ops) {
      table_.emplace(std::string("aten::") + op, &make<Signature>);
    }
  }

  std::optional<c10::KernelFunction> kernel_for(const Op& op) const {
    const auto it = table_.find(op.name);
    return it == table_.end() ? std::nullopt : std::optional(it->second(op));
  }

 private:
  template <typename Signature>
  static c10::KernelFunction make(const Op& op) {
    return c10::KernelFunction::makeFromUnboxedFunctor<false, Kernel<Signature>>(std::make_unique<Kernel<Signature>>(op));
  }

  std::unordered_map<std::string, c10::KernelFunction (*)(const Op&)> table_;
};

} // namespace shardtensor
