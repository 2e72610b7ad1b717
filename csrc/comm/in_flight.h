// What has been started and has not ended: one object that owns it. Uses no other folder.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <functional>
#include <memory>
#include <vector>

namespace c10d {
class Work;
}

namespace shardtensor::comm {

struct Backend;
struct Where;

// A collective in flight: its works, all memory that the backend reads or writes for it, its device, and what comes after it.
//
// It never communicates, so ranks may wait for theirs in any order. One that is dropped before it has ended gives up what comes
// after it, but not its memory: peers may need what it sends, and the backend writes what it receives. What the backend does
// not keep itself goes to a list that outlives it, until it has ended (see let_arrive()).
class InFlight {
 public:
  struct State;

  InFlight(); // nothing is in flight
  explicit InFlight(std::unique_ptr<State> state);
  InFlight(InFlight&&) noexcept;
  InFlight& operator=(InFlight&&) noexcept;
  ~InFlight();

  // Whether there is something to wait for, or to do after it.
  explicit operator bool() const {
    return state_ != nullptr;
  }
  // `next` runs in wait(), after what was added before. `used`: what it reads or writes.
  void then(std::function<void()> next, const std::vector<at::Tensor>& used = {});
  // wait() runs inside of `around`, which calls its argument: for the texts of errors.
  void within(std::function<void(c10::function_ref<void()>)> around);

  // Returns when this rank may read, write and drop its buffers; on CUDA, when the current stream may. After that this is empty,
  // also if it raises. Exception: a graph is being captured and this was begun before; it raises, and is as it was.
  void wait();
  // The same for a result that any number of streams use, each as often as it likes: every stream waits, once. `result`: what
  // the current one will use. Returns true once no stream needs to call it any more.
  bool wait_on_each_stream(const at::Tensor& result);

 private:
  void finish();
  std::unique_ptr<State> state_;
};

// What comm/ starts: `works`, which read or write `buffers`.
InFlight started(
    const Where& where, const Backend& rules, std::vector<c10::intrusive_ptr<c10d::Work>> works, std::vector<at::Tensor> buffers);
// Not a collective, but its share of one that is made for several, as next() waits for it. `used`: what that writes.
InFlight share(const Where& where, std::function<void()> next, const std::vector<at::Tensor>& used);

// Whether the tensor's stream captures a graph, as far as torch tells: before 2.12 any stream might.
bool may_be_capturing(const at::Tensor& t);

// Waits until all that was dropped in flight has ended, but at most two seconds: before process groups are destroyed. Peers may
// never come; left_in_flight() tells. No error is raised.
void let_arrive();
// How many are still in flight of those that were dropped.
int64_t left_in_flight();
// From now on, what was dropped is never freed: the interpreter, which some of it needs for that, ends.
void keep_what_is_left();

} // namespace shardtensor::comm
