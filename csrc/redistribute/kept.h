// What this thread has found out about moves between two layouts: plans, and what their steps do with tensors of one size. A
// table for each thread, so that nothing is locked; bounded, and freed with the thread.
#pragma once

#include "layout/layout.h"

#include <c10/util/FunctionRef.h>

#include <memory>

namespace shardtensor {

enum class Found : uint8_t { Plan, Gathering, Scattering, Exchange, Transfer, Rows, Newcomers };

struct Made {
  std::shared_ptr<const void> value;
  size_t weight; // about so many boxes
};
// What make() has returned for equal arguments before, or what it returns now. Forgotten when one of the layouts is gone, soon
// or later, and when much else has been found since.
std::shared_ptr<const void> kept(
    const Layout& from, const Layout& to, Found what, c10::IntArrayRef numbers, c10::function_ref<Made()> make);

template <typename T, typename Make>
std::shared_ptr<const T> kept(const Layout& from, const Layout& to, Found what, c10::IntArrayRef numbers, const Make& make) {
  return std::static_pointer_cast<const T>(kept(from, to, what, numbers, [&]() -> Made {
    auto value = std::make_shared<const T>(make());
    return {value, value->weight()};
  }));
}

// Of this thread: entries, and their weight.
std::pair<size_t, size_t> how_much_is_kept();

} // namespace shardtensor
