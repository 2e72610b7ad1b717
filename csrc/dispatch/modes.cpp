#include "dispatch/modes.h"

#include "dispatch/cache.h"

#include <ATen/ThreadLocalPythonObjects.h>

#include <array>
#include <atomic>
#include <memory>

namespace shardtensor {

namespace {

std::atomic<Promotion> g_promotion{Promotion::Error};
std::atomic<bool> g_strict{false};
thread_local int64_t t_as_replicated = 0;

using at::impl::ThreadLocalPythonObjects;
using Tokens = std::array<std::shared_ptr<c10::SafePyObject>, 3>;

// Tokens that stand for the values 0 to 2; their content is never read. They hold no Python object, so they need not be
// destroyed.
const Tokens& tokens() {
  static const auto* all = [] {
    auto* made = new Tokens();
    for (auto& token : *made) {
      token = std::make_shared<c10::SafePyObject>(nullptr, nullptr);
    }
    return made;
  }();
  return *all;
}

} // namespace

std::optional<int> ThreadMode::get() const {
  if (ThreadLocalPythonObjects::contains(name_)) {
    const auto& held = ThreadLocalPythonObjects::get(name_);
    for (size_t i = 0; i < tokens().size(); ++i) {
      if (held == tokens()[i]) {
        return static_cast<int>(i);
      }
    }
  }
  return std::nullopt;
}

void ThreadMode::set(std::optional<int> value) const {
  // Torch 2.11 cannot erase a name: one that holds null stands for no value.
  ThreadLocalPythonObjects::set(name_, value ? tokens().at(static_cast<size_t>(*value)) : nullptr);
}

Promotion common_promotion() {
  return g_promotion;
}
void set_common_promotion(Promotion mode) {
  g_promotion = mode;
}
Promotion promotion() {
  const auto own = kOwnPromotion.get();
  return own ? static_cast<Promotion>(*own) : common_promotion();
}

AsReplicatedGuard::AsReplicatedGuard() {
  ++t_as_replicated;
}
AsReplicatedGuard::~AsReplicatedGuard() {
  --t_as_replicated;
}
bool AsReplicatedGuard::alive() {
  return t_as_replicated > 0;
}

bool strict_mode() {
  return g_strict;
}
void set_strict_mode(bool strict) {
  g_strict = strict;
  clear_cache(); // cached solutions may gather
}

int64_t state_of_modes() {
  const auto number = [](const ThreadMode& mode) { return static_cast<int64_t>(mode.get().value_or(-1) + 1); };
  return static_cast<int64_t>(g_promotion.load()) | number(kOwnPromotion) << 2 | number(kPlainTargets) << 4 | strict_mode() << 6;
}

} // namespace shardtensor
