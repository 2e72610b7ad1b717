// Waiting without the GIL: the work that this thread waits for may need it on another thread. Uses no other folder.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

namespace shardtensor::comm {

// While it lives this thread does not hold the GIL, whether or not it did before.
class NoGilGuard {
 public:
  NoGilGuard() {
    if (PyGILState_Check()) {
      released_.emplace();
    }
  }

 private:
  std::optional<pybind11::gil_scoped_release> released_;
};

} // namespace shardtensor::comm
