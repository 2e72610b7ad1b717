// Starts to reduce losses and other sums of no dims as soon as they are made, so that one rank alone can read them later.
#pragma once

#include "dispatch/op.h"
#include "layout/layout.h"
#include "layout/observer.h"

#include <ATen/core/Tensor.h>

#include <string>

namespace shardtensor {

// Process-wide, and alike on all ranks.
bool reduces_ahead();
void set_reduces_ahead(bool on);

// Starts the reduction of an op's result of no dims, if it is a sum over ranks. All ranks of its mesh must call it. Does
// nothing in a backward: the gradient of a number is rarely read, and there may be many.
//
// If one rank alone made such a result, its value would be added to a different result of the other ranks. So each value
// travels with a hash of the op, of the user's line, and of all such results so far in the process group. If the hashes differ,
// every rank that waits for the value raises. If the hash cannot travel with the value (on CUDA, and for complex numbers), no
// reduction starts.
void reduce_ahead(const Op& op, const at::Tensor& result, const LayoutPtr& replicated);

// Where the user's script is: a number for its line, the same on all ranks, and that line's text, for errors.
inline Observer<uint64_t()> line_of_script;
inline Observer<std::string(uint64_t line)> text_of_script;

} // namespace shardtensor
