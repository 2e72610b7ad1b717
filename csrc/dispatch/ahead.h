// Losses and other sums of no dims are reduced as soon as they are made, so that one rank alone can read them later.
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

// Starts the reduction of an op's result of no dims, if it is a sum over ranks. All ranks of its mesh call it. Not in a
// backward: nobody reads the gradient of a number, and it may be one of many.
//
// A rank that makes such a result alone would add its value to another one of the other ranks. So each value travels with a hash
// of the op, of the user's line, and of all such results so far in the process group. If the hashes differ, waiting for the value
// raises on every rank that waits. Where the hash cannot travel beside it (on CUDA, and complex numbers), nothing starts.
void reduce_ahead(const Op& op, const at::Tensor& result, const LayoutPtr& replicated);

// Where the user's script is: a number for its line, the same on all ranks, and that line's text, for errors.
inline Observer<uint64_t()> line_of_script;
inline Observer<std::string(uint64_t line)> text_of_script;

} // namespace shardtensor
