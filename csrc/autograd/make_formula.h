// Makes a Formula, which an op's entry names (rules/autograd_formulas.h), from a kernel. Uses dispatch/op.h.
#pragma once

#include "dispatch/op.h"
#include "rules/autograd_formulas.h"

#include <torch/library.h>

#include <utility>

namespace shardtensor {

template <auto kernel, typename Type = decltype(kernel)>
struct FormulaOf;

template <auto kernel, typename Result, typename... Args>
struct FormulaOf<kernel, Result (*)(Args...)> {
  static torch::CppFunction make(const Op&) {
    return torch::CppFunction(kernel);
  }
};

// For a typed kernel, which gets its op before the arguments.
template <auto kernel, typename Result, typename... Args>
struct FormulaOf<kernel, Result (*)(const Op&, Args...)> {
  static torch::CppFunction make(const Op& op) {
    return torch::CppFunction([&op](Args... args) -> Result { return kernel(op, std::forward<Args>(args)...); });
  }
};

// For a boxed kernel.
template <auto kernel>
struct FormulaOf<kernel, void (*)(const Op&, c10::DispatchKeySet, torch::jit::Stack*)> {
  static torch::CppFunction make(const Op& op) {
    return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<BoxedKernel<kernel>>(op));
  }
};

template <auto kernel>
constexpr Formula formula = &FormulaOf<kernel>::make;

} // namespace shardtensor
