// Typed kernels by signature: an op gets one if its signature is in the table, whatever its name.
#pragma once

#include "dispatch/op.h"

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/op_registration/infer_schema.h>

#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_map>

namespace shardtensor {

// Kernel<Signature> is an OperatorKernel made from an Op.
template <template <typename> class Kernel, typename... Signatures>
class KernelTable {
 public:
  KernelTable() {
    (table_.emplace(types_of(c10::inferFunctionSchemaFlattenedReturns<Signatures>(), writes<Signatures>()), &make<Signatures>),
     ...);
  }

  std::optional<c10::KernelFunction> kernel_for(const Op& op) const {
    const auto [first, last] = table_.equal_range(types_of(op.schema(), op.mutated & 1));
    for (auto it = first; it != last; ++it) {
      try {
        return it->second(op);
      } catch (const c10::Error&) { // C++ has two types for a list of tensors
      }
    }
    return std::nullopt;
  }

 private:
  template <typename Signature>
  static c10::KernelFunction make(const Op& op) {
    return c10::KernelFunction::makeFromUnboxedFunctor<false, Kernel<Signature>>(std::make_unique<Kernel<Signature>>(op));
  }

  // Whether the op writes its first argument.
  template <typename Signature>
  static constexpr bool writes() {
    using Result = typename c10::guts::function_traits<Signature>::return_type;
    return std::is_reference_v<Result> || std::is_void_v<Result>;
  }

  // The kinds of the arguments' and the results' types, one after the other.
  static std::string types_of(const c10::FunctionSchema& schema, bool writes) {
    std::string out(1, static_cast<char>(writes));
    for (const auto& argument : schema.arguments()) {
      add_kinds(*argument.real_type(), out);
    }
    out.push_back('>');
    for (const auto& result : schema.returns()) {
      add_kinds(*result.real_type(), out);
    }
    return out;
  }
  static void add_kinds(const c10::Type& type, std::string& out) {
    out.push_back(static_cast<char>(type.kind()));
    for (const auto& inner : type.containedTypes()) {
      add_kinds(*inner, out);
    }
  }

  std::unordered_multimap<std::string, c10::KernelFunction (*)(const Op&)> table_;
};

} // namespace shardtensor
