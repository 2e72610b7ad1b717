// Memory that belongs to a thread.
#pragma once

#include <thread>
#include <utility>

namespace shardtensor {

// Deletes what this thread's `pointer` points to when the thread ends. A bare thread_local pointer costs no guard to read; this
// stands beside it. The thread of the import, which ends with the process, keeps its own: Python may run ops while the process
// ends.
template <typename T>
class FreedWithThread {
 public:
  explicit FreedWithThread(T*& pointer) : pointer_(pointer) {}
  ~FreedWithThread() {
    if (used_ && std::this_thread::get_id() != import_thread_) {
      delete std::exchange(pointer_, nullptr);
    }
  }
  FreedWithThread(const FreedWithThread&) = delete;
  FreedWithThread& operator=(const FreedWithThread&) = delete;
  // Each thread that sets the pointer calls it, so that there is an object to destroy.
  void use() {
    used_ = true;
  }

 private:
  static inline const std::thread::id import_thread_ = std::this_thread::get_id();
  T*& pointer_;
  bool used_ = false;
};

} // namespace shardtensor
