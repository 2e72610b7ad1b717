#include "comm/in_flight.h"

#include "comm/backend.h"
#include "comm/collective_call.h"
#include "comm/range.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/headeronly/version.h>

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>

namespace shardtensor::comm {

namespace {

using namespace std::chrono_literals;
using Streams = c10::impl::VirtualGuardImpl;

c10::Stream current_stream(c10::Device device) {
  return Streams(device.type()).getStream(device);
}

bool is_capturing(const c10::Stream& stream) {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 12
  return false; // unknown: then CUDA raises
#else
  return Streams(stream.device_type()).isStreamCapturing(stream);
#endif
}

} // namespace

struct InFlight::State {
  CollectiveCall where;
  std::vector<WorkPtr> works; // null: has ended
  std::vector<at::Tensor> buffers;
  c10::SmallVector<std::function<void()>, 2> nexts;
  std::function<void(c10::function_ref<void()>)> around;
  bool by_thread = false;                  // wait() blocks the thread; isCompleted() may never be true before
  std::optional<c10::Stream> made;         // where the buffers were allocated and written; none: in main memory
  bool captured = false;                   // begun within the capture of a graph
  bool is_share = false;                   // `nexts` wait for a shared call
  std::optional<c10::Event> ended;         // after `nexts`, for other streams
  c10::SmallVector<c10::Stream, 2> waited; // streams that come after it

  void use(const at::Tensor& t) {
    if (!made && !t.device().is_cpu() && !t.is_meta()) {
      made = current_stream(t.device());
      captured = is_capturing(*made);
    }
  }
  bool has_ended() const {
    return std::none_of(works.begin(), works.end(), [](const WorkPtr& work) { return work; });
  }
  bool may_be_used_on(const c10::Stream& stream) const {
    return is_capturing(stream) == captured || (has_ended() && !is_share);
  }
  // An event may not be queried while a graph is captured.
  bool is_known_to_have_ended() const {
    return !(made && is_capturing(current_stream(made->device()))) &&
           std::all_of(works.begin(), works.end(), [](const WorkPtr& work) { return !work || work->isCompleted(); });
  }
};

namespace {

using State = InFlight::State;

std::atomic<bool> g_never_freed{false};

void free_or_not(std::unique_ptr<State> state) {
  if (g_never_freed) {
    (void)state.release();
  }
}

// Works that were dropped in flight. A thread waits for works whose wait() blocks: Gloo's messages end only if someone waits,
// and waiting with a time-out would close Gloo's connections. The thread ends when no such work is left. The other works are
// queried whenever one is started or dropped.
class DroppedWorks {
 public:
  static DroppedWorks& get() {
    static auto* left = new DroppedWorks(); // never destroyed: its thread may outlive all else
    return *left;
  }

  void add(std::unique_ptr<State> state) {
    if (is_forked()) {
      (void)state.release();
      return;
    }
    ++count_;
    std::vector<std::unique_ptr<State>> ended; // freed after the lock
    const std::lock_guard<std::mutex> lock(mutex_);
    if (state->by_thread) {
      blocking_.push_back(std::move(state));
      if (!std::exchange(has_thread_, true)) {
        std::thread([this] { wait_for_all(); }).detach();
      }
      changed_.notify_all();
    } else {
      asked_.push_back(std::move(state));
      take_ended(ended);
    }
  }
  void ask() {
    std::vector<std::unique_ptr<State>> ended;
    if (!is_forked()) {
      const std::lock_guard<std::mutex> lock(mutex_);
      take_ended(ended);
    }
  }
  int64_t count() const {
    return count_.load(std::memory_order_relaxed);
  }
  void drain_dropped() {
    const NoGilGuard released;
    const auto end = std::chrono::steady_clock::now() + 2s;
    for (; count() > 0 && !is_forked() && std::chrono::steady_clock::now() < end; std::this_thread::sleep_for(1ms)) {
      ask();
    }
  }

 private:
  // A forked process, of a data loader for example, has neither the thread nor the connections.
  bool is_forked() const {
    return getpid() != pid_;
  }
  void take_ended(std::vector<std::unique_ptr<State>>& ended) {
    for (auto& state : asked_) {
      if (state->is_known_to_have_ended()) {
        ended.push_back(std::move(state));
      }
    }
    asked_.erase(std::remove(asked_.begin(), asked_.end(), nullptr), asked_.end());
    count_ -= static_cast<int64_t>(ended.size());
  }
  void wait_for_all() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (changed_.wait_for(lock, 1s, [&] { return !blocking_.empty(); })) {
      auto state = std::move(blocking_.front());
      blocking_.pop_front();
      lock.unlock();
      for (const auto& work : state->works) {
        if (work) {
          desync::wait_for_dropped(*work, state->where.ticket);
        }
      }
      free_or_not(std::move(state));
      lock.lock();
      --count_;
    }
    has_thread_ = false;
  }

  const pid_t pid_ = getpid();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<State>> blocking_;
  std::vector<std::unique_ptr<State>> asked_;
  std::atomic<int64_t> count_{0};
  bool has_thread_ = false;
};

// Works that were begun in a capture are part of the graph, whose memory they use. So they end with the capture; before that,
// the capturing stream must wait for them.
void leave_in_capture(const State& state) {
  try {
    if (is_capturing(current_stream(state.made->device()))) {
      for (const auto& work : state.works) {
        work->wait();
      }
    }
  } catch (...) { // the end of the capture will raise
  }
}

void leave(std::unique_ptr<State> state) noexcept {
  if (!state) {
    return;
  }
  state->nexts.clear();
  state->around = nullptr;
  if (state->has_ended()) {
    return;
  }
  if (state->captured) {
    return leave_in_capture(*state);
  }
  if (state->is_known_to_have_ended()) {
    return;
  }
  DroppedWorks::get().add(std::move(state));
}

} // namespace

InFlight::InFlight() = default;
InFlight::InFlight(std::unique_ptr<State> state) : state_(std::move(state)) {}
InFlight::InFlight(InFlight&&) noexcept = default;
InFlight& InFlight::operator=(InFlight&& other) noexcept {
  if (this != &other) {
    leave(std::exchange(state_, std::move(other.state_)));
  }
  return *this;
}
InFlight::~InFlight() {
  leave(std::move(state_));
}

void InFlight::then(std::function<void()> next, const std::vector<at::Tensor>& used) {
  if (!state_) {
    state_ = std::make_unique<State>();
  }
  state_->nexts.push_back(std::move(next));
  for (const auto& t : used) {
    state_->use(t);
  }
  if (state_->made) {
    state_->buffers.insert(state_->buffers.end(), used.begin(), used.end());
  }
}

void InFlight::within(std::function<void(c10::function_ref<void()>)> around) {
  if (state_) {
    state_->around = std::move(around);
  }
}

void InFlight::finish() {
  auto& s = *state_;
  if (s.made) {
    const auto now = current_stream(s.made->device());
    TORCH_CHECK(
        s.may_be_used_on(now), "shardtensor: the result of an asynchronous move that began ", s.captured ? "within" : "before",
        " the capture of a CUDA graph is first used ", s.captured ? "after it" : "within it",
        ", which CUDA does not allow. Use the result ", s.captured ? "within the capture" : "before torch.cuda.graph()",
        ", for example with to_local(), or move it without async_op (", s.where.str(), ")");
    if (now != *s.made) {
      for (auto& buffer : s.buffers) {
        buffer.record_stream(now);
      }
    }
  }
  const auto run = [&s] {
    if (!s.works.empty()) {
      const Range range(s.where.kind, -1);
      for (auto& work : s.works) {
        const auto ended = std::exchange(work, nullptr);
        comm::wait(s.where, ended);
      }
    }
    s.buffers.clear();
    for (const auto& next : s.nexts) {
      next();
    }
    s.nexts.clear();
  };
  try {
    s.around ? std::exchange(s.around, nullptr)(run) : run();
  } catch (...) {
    leave(std::move(state_));
    throw;
  }
}

void InFlight::wait() {
  if (state_) {
    finish();
    state_.reset();
  }
}

bool InFlight::wait_on_each_stream(const at::Tensor& result) {
  if (!state_) {
    return true;
  }
  auto& s = *state_;
  if (!s.ended) {
    finish();
    if (!s.made) {
      state_.reset();
      return true;
    }
    const auto now = current_stream(s.made->device());
    s.ended.emplace(now.device_type());
    s.ended->record(now);
    s.waited.push_back(now);
    return false;
  }
  const auto now = current_stream(s.made->device());
  const bool capturing = is_capturing(now);
  if (std::find(s.waited.begin(), s.waited.end(), now) == s.waited.end()) {
    // A capture cannot wait for work that began before it, and need not: its caller has synchronised the streams.
    if (capturing == s.captured) {
      s.ended->block(now);
    }
    result.record_stream(now);
    s.waited.push_back(now);
    return false;
  }
  if (!capturing && !s.captured && s.ended->query()) {
    state_.reset();
    return true;
  }
  return false;
}

InFlight started(const CollectiveCall& where, const Backend& rules, std::vector<WorkPtr> works, std::vector<at::Tensor> buffers) {
  if (C10_UNLIKELY(DroppedWorks::get().count() > 0)) {
    DroppedWorks::get().ask();
  }
  auto state = std::make_unique<State>();
  state->where = where;
  for (const auto& buffer : buffers) {
    state->use(buffer);
  }
  state->by_thread = rules.blocks || !state->made;
  state->works = std::move(works);
  state->buffers = std::move(buffers);
  return InFlight(std::move(state));
}

InFlight share(const CollectiveCall& where, std::function<void()> next, const std::vector<at::Tensor>& used) {
  auto state = std::make_unique<State>();
  state->where = where;
  state->is_share = true;
  InFlight out(std::move(state));
  out.then(std::move(next), used);
  return out;
}

bool may_be_capturing(const at::Tensor& t) {
  if (t.device().is_cpu() || t.is_meta()) {
    return false;
  }
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 12
  return true;
#else
  return is_capturing(current_stream(t.device()));
#endif
}

void drain_dropped() {
  DroppedWorks::get().drain_dropped();
}

int64_t dropped_in_flight() {
  return DroppedWorks::get().count();
}

void stop_freeing_dropped() {
  g_never_freed = true;
}

} // namespace shardtensor::comm
