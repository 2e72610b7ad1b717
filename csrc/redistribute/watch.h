// Reports moves that the user did not ask for: operands that an op needs in another layout, gradients on their way back. And
// halos.
#pragma once

#include "layout/symbolic.h"

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>

namespace shardtensor {

// Why a tensor moves: an op needs its argument in another layout.
struct Cause {
  std::string_view op, argument;
  const char* why;
};

struct ImplicitMove {
  const Cause& cause;
  const Layout& from;
  const Layout& to;
  SymSizes sizes; // to tell of them adds no guard to a graph
  int64_t item;   // bytes of an element
};

// Called before the move, on each rank of the mesh; it may throw. Null: no observer.
using Watcher = void (*)(const ImplicitMove&);
void set_watcher(Watcher watcher);
// `sizes`: of the whole tensor whose layout will change; `item`: bytes of an element.
void tell_watcher(const Cause& cause, const Layout& from, const Layout& to, c10::SymIntArrayRef sizes, size_t item);

// Called (with the GIL, if Python set it) with the op's name, why it gathers its inputs and their layouts; null: no observer.
using FallbackLog = void (*)(const std::string& op, const char* why, const std::string& layouts);
void set_fallback_log(FallbackLog log);
// Tells the observer, if there is one.
void tell_of_gather(const std::string& op, const char* why, const std::string& layouts);

// What an op reads of other ranks' pieces through windows, as this rank sends and receives it.
struct HaloRead {
  const Layout& from;
  c10::ArrayRef<int64_t> sizes;                 // of the whole tensor
  c10::ArrayRef<int64_t> peers, sent, received; // ranks; elements
  int64_t item;                                 // bytes of an element
};

// Called before the messages, on each rank of the mesh. Null: no observer.
using HaloWatcher = void (*)(const HaloRead&);
void set_halo_watcher(HaloWatcher watcher);
void tell_of_halo(const HaloRead& read);

} // namespace shardtensor
