// This thread's cache for moves between two layouts: plans, and what their steps send for tensors of one size. Each thread has
// its own, so there are no locks; it is bounded, and freed with the thread.
#pragma once

#include "layout/layout.h"

#include <c10/util/FunctionRef.h>

#include <memory>

namespace shardtensor {

enum class Found : uint8_t { Plan, Gathering, Scattering, Exchange, Transfer, Rows, Newcomers };

struct Made {
  std::shared_ptr<const void> value;
  size_t weight; // about the number of boxes
};
// The value that make() returned for equal arguments before, or else returns now. It is dropped some time after one of the
// layouts is gone, or when the cache is full.
std::shared_ptr<const void> kept(
    const Layout& from, const Layout& to, Found what, c10::IntArrayRef numbers, c10::function_ref<Made()> make);

template <typename T, typename Make>
std::shared_ptr<const T> kept(const Layout& from, const Layout& to, Found what, c10::IntArrayRef numbers, const Make& make) {
  return std::static_pointer_cast<const T>(kept(from, to, what, numbers, [&]() -> Made {
    auto value = std::make_shared<const T>(make());
    return {value, value->weight()};
  }));
}

// This thread's number of entries, and their weight.
std::pair<size_t, size_t> how_much_is_kept();

} // namespace shardtensor
