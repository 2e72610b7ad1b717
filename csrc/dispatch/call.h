// One call on ShardTensors, from its arguments to its wrapped results: find the solution (solve.h), get this rank's local
// tensors (inputs.h), run the op or its rule's kernel, wrap the results (outputs.h). Here for boxed calls; typed.cpp and
// lists.cpp take the same steps with arguments in other forms.
#pragma once

#include "dispatch/inputs.h"
#include "dispatch/outputs.h"
#include "dispatch/solve.h"

namespace shardtensor {

// Runs a whole call on boxed arguments and replaces them by the results.
void handle(const Op& op, torch::jit::Stack* stack);

// The rest of handle(), once the call's tensors are checked and its solution is found. `refs` may point outside of the stack.
void run_call(const Op& op, torch::jit::Stack& stack, Refs& refs, const rules::SolutionPtr& solution);

// Runs the op, or its rule's kernel instead, on a stack whose last arguments are local tensors: `locals`.
void run_on_locals(
    const Op& op, torch::jit::Stack& stack, const Refs& refs, const rules::Solution& solution, const Locals& locals);

// Runs the rest of a call after its solution has been found. An error gets the call's operands as its context. Tells the other
// ranks, since this rank may be the only one that fails.
void call_failed(const Op& op, const Refs& refs, const rules::Solution& solution, c10::Error* error);
template <typename F>
decltype(auto) guarded_call(const Op& op, const Refs& refs, const rules::Solution& solution, const F& run) {
  try {
    return run();
  } catch (c10::Error& e) {
    call_failed(op, refs, solution, &e);
    throw;
  } catch (...) {
    call_failed(op, refs, solution, nullptr);
    throw;
  }
}

} // namespace shardtensor
