// Memory that belongs to a thread, so that nothing is locked.
#pragma once

#include <c10/macros/Macros.h>

#include <algorithm>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace shardtensor {

// Deletes the object that this thread's `pointer` points to when the thread ends. (A bare thread_local pointer costs no guard
// to read, so the owner is a separate object.) The thread of the import, which ends with the process, does not delete its own:
// Python may run ops while the process ends.
template <typename T>
class ThreadOwned {
 public:
  explicit ThreadOwned(T*& pointer) : pointer_(pointer) {}
  ~ThreadOwned() {
    if (used_ && std::this_thread::get_id() != import_thread_) {
      delete std::exchange(pointer_, nullptr);
    }
  }
  ThreadOwned(const ThreadOwned&) = delete;
  ThreadOwned& operator=(const ThreadOwned&) = delete;
  // Each thread that sets the pointer calls it, so that there is an object to destroy.
  void use() {
    used_ = true;
  }

 private:
  static inline const std::thread::id import_thread_ = std::this_thread::get_id();
  T*& pointer_;
  bool used_ = false;
};

// This thread's T, made when it is first asked for. Access needs no guard and no call.
template <typename T>
T& of_thread() {
  static thread_local T* object __attribute__((tls_model("initial-exec"))) = nullptr;
  if (C10_UNLIKELY(!object)) {
    static thread_local ThreadOwned<T> end(object);
    end.use();
    object = new T();
  }
  return *object;
}

// A hash table of one thread; keys have hash() and ==. It is bounded: instead of growing beyond `most` entries it drops all of
// them.
template <typename Key, typename Value>
class ThreadTable {
 public:
  explicit ThreadTable(size_t most) : most_(most) {}

  size_t size() const {
    return used_;
  }
  // Null if there is none. Valid until the next put() or keep_if().
  Value* find(const Key& key) {
    if (!slots_.empty()) {
      const auto& slot = slots_[place_of(key)];
      return slot ? &slot->value : nullptr;
    }
    return nullptr;
  }
  void put(Key key, Value value) {
    if (used_ >= most_) {
      clear();
    }
    if (used_ * 2 >= slots_.size()) {
      rebuild(std::max<size_t>(8, slots_.size() * 2), [](const Value&) { return true; });
    }
    auto& slot = slots_[place_of(key)];
    if (slot) {
      slot->value = std::move(value);
    } else {
      slot = std::make_unique<TableEntry>(TableEntry{std::move(key), std::move(value)});
      ++used_;
    }
  }
  template <typename Keep>
  void keep_if(const Keep& keep) {
    rebuild(slots_.size(), keep);
  }
  void clear() {
    slots_.clear();
    used_ = 0;
  }

 private:
  struct TableEntry {
    Key key;
    Value value;
  };

  // Where the key is, or would be.
  size_t place_of(const Key& key) const {
    const auto mask = slots_.size() - 1;
    auto i = key.hash() & mask;
    while (slots_[i] && !(slots_[i]->key == key)) {
      i = (i + 1) & mask;
    }
    return i;
  }
  template <typename Keep>
  void rebuild(size_t slots, const Keep& keep) {
    auto old = std::move(slots_);
    slots_.clear();
    slots_.resize(slots);
    used_ = 0;
    for (auto& entry : old) {
      if (entry && keep(entry->value)) {
        slots_[place_of(entry->key)] = std::move(entry);
        ++used_;
      }
    }
  }

  size_t most_;
  size_t used_ = 0;
  std::vector<std::unique_ptr<TableEntry>> slots_; // open addressing; a null slot ends a probe
};

} // namespace shardtensor
