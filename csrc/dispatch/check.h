// The checking mode: all ranks of a mesh run the same calls, and what comes out is what the layouts say. It talks to the other
// ranks before and after each call, so it finds ranks that part before their collectives are mixed up.
#pragma once

#include "dispatch/call.h"

#include <c10/util/FunctionRef.h>

#include <atomic>

namespace shardtensor {

enum class Checking : uint8_t { Off, Sampled, Full };
void set_checking(Checking checking);
Checking checking();

// Where the call comes from, for errors; set by bindings/.
using CallSite = std::string (*)();
void set_call_site(CallSite call_site);

namespace check {

inline std::atomic<uint8_t> g_checking{0};
inline bool on() {
  return C10_UNLIKELY(g_checking.load(std::memory_order_relaxed));
}

// Runs an op's call. Raises on every rank of the mesh where one runs another call, where one raises alone, or where a result is
// wrong.
void around(const Op& op, torch::jit::Stack* stack, c10::function_ref<void()> run);

// For what is no op: `call` describes it, `local` is this rank's piece.
void same_call(const std::string& call, const Mesh& mesh, const at::Tensor& local);
// Raises on every rank of the mesh where one rank's piece is not what the layout says, or where pieces that are to be the same
// differ in a bit.
void result(const std::string& what, const at::Tensor& tensor);

} // namespace check

} // namespace shardtensor
