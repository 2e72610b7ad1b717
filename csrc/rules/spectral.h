// Fourier transforms along several dims, as two calls: one along the dims that are whole on every rank, then one along the rest.
#pragma once

#include "rules/rule.h"

#include <optional>

namespace shardtensor::rules {

Rule transform(const Call& call);

// From complex numbers to complex ones, from real ones, or to real ones. torch transforms the last dim first if it starts from
// real numbers, and last if it ends with them.
enum class Transform : uint8_t { C2C, R2C, C2R };

struct Stages {
  Sizes first, rest;
};
// Nothing if one call sends as little. `dims`: the transformed ones, in the call's order.
std::optional<Stages> stages_of(Transform kind, const Layout& layout, c10::SymIntArrayRef sizes, const Sizes& dims);

} // namespace shardtensor::rules
