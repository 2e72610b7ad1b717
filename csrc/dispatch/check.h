// The checking mode asserts that all ranks of a mesh run the same calls, and that results agree with their layouts. Ranks
// exchange messages before and after each call, so the mode finds ranks that diverge before their collectives get mixed up.
#pragma once

#include "dispatch/op.h"

#include <ATen/core/stack.h>
#include <c10/util/FunctionRef.h>

#include <atomic>

namespace shardtensor {

enum class CheckingMode : uint8_t { Off, Sampled, Full };
void set_checking(CheckingMode checking);
CheckingMode checking();

namespace check {

inline std::atomic<uint8_t> g_checking{0};
inline bool on() {
  return C10_UNLIKELY(g_checking.load(std::memory_order_relaxed));
}

using RunFn = c10::function_ref<void(torch::jit::Stack*)>;
// Runs an op's call on the stack. Raises on every rank of the mesh if one rank runs another call, if one rank raises alone, or if
// a result is wrong. It may run again on whole operands.
void around(const Op& op, torch::jit::Stack* stack, RunFn run);

// The same for functions that are not ops: `call` describes the function, `local` is this rank's piece.
void same_call(const std::string& call, const Mesh& mesh, const at::Tensor& local);
// Raises on every rank of the mesh if one rank's piece disagrees with the layout, or if replicated pieces are not equal bit by
// bit.
void result(const std::string& what, const at::Tensor& tensor);

} // namespace check

} // namespace shardtensor
