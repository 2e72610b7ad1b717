// Reports moves that the user did not ask for: operands that an op needs in another layout, gradients on their way back.
#pragma once

#include "layout/symbolic.h"

#include <ATen/core/Tensor.h>

namespace shardtensor {

struct ImplicitMove {
  const std::string& op;
  const std::string& argument;
  const char* why;
  const Layout& from;
  const Layout& to;
  SymSizes sizes; // to tell of them adds no guard to a graph
  int64_t item;   // bytes of an element
};

// Called before the move, on each rank of the mesh; it may throw. Null: no observer.
using Watcher = void (*)(const ImplicitMove&);
void set_watcher(Watcher watcher);
// `moved`: the tensor whose layout will change.
void tell_watcher(
    const std::string& op,
    const std::string& argument,
    const char* why,
    const Layout& from,
    const Layout& to,
    const at::Tensor& moved);

} // namespace shardtensor
