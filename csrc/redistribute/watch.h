// Observers of moves that the user did not ask for: operands that an op needs in another layout, gradients on their way back, and
// halos. They are called before the move, on each rank of the mesh, and may throw.
#pragma once

#include "layout/observer.h"
#include "layout/symbolic.h"

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>

namespace shardtensor {

// Why a tensor moves: an op needs its argument in another layout.
struct MoveCause {
  std::string_view op, argument;
  const char* why;
};

struct ImplicitMove {
  const MoveCause& cause;
  const Layout& from;
  const Layout& to;
  SymSizes sizes; // reading them adds no guard to a graph
  int64_t item;   // bytes of an element
};
inline Observer<void(const ImplicitMove&)> on_move;

// The halo messages of this rank for one op.
struct HaloRead {
  const Layout& from;
  c10::ArrayRef<int64_t> sizes;                 // of the whole tensor
  c10::ArrayRef<int64_t> peers, sent, received; // ranks; elements
  int64_t item;                                 // bytes of an element
};
inline Observer<void(const HaloRead&)> on_halo;

// The op's name, why it gathers its inputs, and their layouts.
inline Observer<void(const std::string& op, const char* why, const std::string& layouts)> on_gather;

// `sizes`: of the whole tensor whose layout will change; `item`: bytes of an element.
inline void tell_watcher(const MoveCause& cause, const Layout& from, const Layout& to, c10::SymIntArrayRef sizes, size_t item) {
  if (on_move) {
    on_move({cause, from, to, sizes.vec(), static_cast<int64_t>(item)});
  }
}

} // namespace shardtensor
