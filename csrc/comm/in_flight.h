// A collective that has been started and has not ended, and the object that owns it. Uses no other folder.
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
struct CollectiveCall;

// A collective in flight: its works, all memory that the backend reads or writes for it, its device, and the callbacks that
// follow it.
//
// wait() never communicates, so ranks may wait in any order. If an InFlight is dropped before its collective has ended, its
// callbacks do not run, but its memory stays: peers may still need the data that it sends, and the backend still writes the
// data that it receives. Buffers that the backend does not keep itself go to a list until the collective has ended (see
// drain_dropped()).
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
  // `next` runs in wait(), after callbacks that were added before. `used`: the tensors that it reads or writes.
  void then(std::function<void()> next, const std::vector<at::Tensor>& used = {});
  // wait() runs inside of `around`, which calls its argument: for the texts of errors.
  void within(std::function<void(c10::function_ref<void()>)> around);

  // Returns when this rank may read, write and drop its buffers; on CUDA, when the current stream may. Afterwards this object
  // is empty, even if wait() raises. Exception: if a CUDA graph is being captured and the collective was begun before the
  // capture, wait() raises and changes nothing.
  void wait();
  // The same for a result that any number of streams use, any number of times: every stream waits once. `result`: the tensor
  // that the current stream will use. Returns true once no stream needs to call it any more.
  bool wait_on_each_stream(const at::Tensor& result);

 private:
  void finish();
  std::unique_ptr<State> state_;
};

// What comm/ starts: `works`, which read or write `buffers`.
InFlight started(
    const CollectiveCall& where,
    const Backend& rules,
    std::vector<c10::intrusive_ptr<c10d::Work>> works,
    std::vector<at::Tensor> buffers);
// For a collective that shares one call with others: next() waits for that call. `used`: the tensors that it writes.
InFlight share(const CollectiveCall& where, std::function<void()> next, const std::vector<at::Tensor>& used);

// Whether the tensor's stream is capturing a CUDA graph. Before torch 2.12 this cannot be asked: true for all tensors on CUDA.
bool may_be_capturing(const at::Tensor& t);

// Waits until all dropped work has ended, but at most two seconds: call it before process groups are destroyed. It raises no
// error; if peers never come, dropped_in_flight() is not 0.
void drain_dropped();
// How many dropped collectives are still in flight.
int64_t dropped_in_flight();
// Stop freeing dropped work: freeing some of it needs the interpreter, which is shutting down.
void stop_freeing_dropped();

} // namespace shardtensor::comm
