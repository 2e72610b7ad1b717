// A function that a lower folder calls and an upper one sets, so that the lower need not know the upper. Uses no other folder.
#pragma once

#include <atomic>

namespace shardtensor {

template <typename Signature>
class Observer;

// Until one is set, a call does nothing and returns a default value. On any thread.
template <typename Result, typename... Arguments>
class Observer<Result(Arguments...)> {
 public:
  using Function = Result (*)(Arguments...);

  void set(Function function) {
    function_.store(function, std::memory_order_relaxed);
  }
  explicit operator bool() const {
    return function_.load(std::memory_order_relaxed) != nullptr;
  }
  Result operator()(Arguments... arguments) const {
    const auto function = function_.load(std::memory_order_relaxed);
    return function ? function(arguments...) : Result();
  }

 private:
  std::atomic<Function> function_{nullptr};
};

} // namespace shardtensor
