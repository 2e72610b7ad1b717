#include "comm/desync.h"

#include "comm/error_context.h"
#include "comm/gil.h"
#include "comm/peer_store.h"
#include "comm/tensor_kind.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <c10/util/hash.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <numeric>
#include <thread>
#include <unordered_map>

namespace shardtensor::comm {

namespace desync {

namespace {

using namespace std::chrono_literals;

constexpr auto kSlice = 250ms; // how often a wait looks for news
constexpr auto kShort = 50ms;  // how often a rank that waits for the others' claims does
constexpr auto kSigns = 700ms; // how long the ranks that survive a broken group wait for each other's answers

std::atomic<bool> g_on{true};
std::atomic<std::chrono::milliseconds> g_grace{600ms};
std::atomic<std::chrono::milliseconds> g_between{1s}; // between two comparisons with the next rank
std::atomic<int64_t> g_epoch{0};

// Something per process group. A group that is destroyed and made again is another group, even under the same name.
template <typename T>
class PerGroup {
 public:
  template <typename Make>
  std::shared_ptr<T> get(const GroupPtr& group, const Make& make) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto it = all_.find(group.get());
    if (C10_LIKELY(it != all_.end() && !it->second.first.expired())) {
      return it->second.second;
    }
    for (auto i = all_.begin(); i != all_.end();) {
      i = i->second.first.expired() ? all_.erase(i) : std::next(i);
    }
    const NoGilGuard released; // it may ask the store
    auto made = make();
    all_.emplace(group.get(), std::pair(c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), made));
    return made;
  }
  std::shared_ptr<T> find(const GroupPtr& group) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto it = all_.find(group.get());
    return it == all_.end() || it->second.first.expired() ? nullptr : it->second.second;
  }
  std::vector<std::shared_ptr<T>> alive() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<T>> out;
    for (const auto& [group, entry] : all_) {
      if (!entry.first.expired()) {
        out.push_back(entry.second);
      }
    }
    return out;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<c10d::ProcessGroup*, std::pair<c10::weak_intrusive_ptr<c10d::ProcessGroup>, std::shared_ptr<T>>> all_;
};

PerGroup<PeerStore>& worlds() {
  static auto* all = new PerGroup<PeerStore>();
  return *all;
}
std::shared_ptr<PeerStore> world_of(const Mesh& mesh) {
  const auto& name = mesh.description().world;
  if (name.empty()) {
    return nullptr;
  }
  const auto group = c10d::resolve_process_group(name);
  auto world = worlds().get(group, [&] { return std::make_shared<PeerStore>(*group, mesh.rank()); });
  return world->has_store() ? world : nullptr;
}

// This process's, if it has made a collective.
std::shared_ptr<PeerStore> any_world() {
  for (auto& world : worlds().alive()) {
    if (world->has_store()) {
      return world;
    }
  }
  return nullptr;
}

struct WatchedGroup {
  std::shared_ptr<PeerStore> world;
  std::shared_ptr<GroupHistory> group;
};
PerGroup<WatchedGroup>& all_watched() {
  static auto* all = new PerGroup<WatchedGroup>();
  return *all;
}
std::shared_ptr<WatchedGroup> watched(const GroupPtr& group, const Mesh& mesh, int64_t mesh_dim) {
  return all_watched().get(group, [&] {
    auto out = std::make_shared<WatchedGroup>();
    out->world = world_of(mesh);
    if (out->world) {
      auto made = std::make_shared<GroupHistory>();
      if (mesh_dim < 0) {
        made->name = mesh.description().world;
        made->ranks.resize(group->getSize());
        std::iota(made->ranks.begin(), made->ranks.end(), 0);
      } else {
        made->name = mesh.group(mesh_dim);
        auto coordinate = mesh.coordinate();
        for (coordinate[mesh_dim] = 0; coordinate[mesh_dim] < mesh.size(mesh_dim); ++coordinate[mesh_dim]) {
          made->ranks.push_back(mesh.rank_at(coordinate));
        }
      }
      made->me = std::find(made->ranks.begin(), made->ranks.end(), mesh.rank()) - made->ranks.begin();
      out->world->add(made);
      out->group = std::move(made);
    }
    return out;
  });
}

// The exception that this thread told of last: it passes through several frames.
thread_local std::exception_ptr t_told;
thread_local int64_t t_begun = 0;
thread_local int64_t t_careful = 0;

// Raises an error that other ranks have caused. The group cannot be used again, because a collective has begun that will not
// end.
[[noreturn]] void part(const Ticket& ticket, const std::string& why) {
  if (ticket.group) {
    const std::lock_guard<std::mutex> lock(ticket.group->mutex);
    ticket.group->broken = why;
  }
  ticket.world->tell(doing_now(), why);
  constexpr auto kAdvice =
      ". The process group cannot be used any more: end the job, or destroy the process groups and make new ones";
  t_told = std::make_exception_ptr(
      c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, why + (ticket.group ? kAdvice : "")));
  std::rethrow_exception(t_told);
}

std::string differ(int64_t rank, const std::string& mine, const Claim& other) {
  return c10::str("the ranks make different collectives. Rank ", rank, ": ", mine, "; rank ", other.rank, ": ", other.text);
}

void compare_draws(GroupHistory& group, int64_t number, int64_t rank, const Claim& other) {
  uint64_t mine = 0;
  {
    const std::lock_guard<std::mutex> lock(group.mutex);
    mine = group.drawn_before[number % kKept];
  }
  if (mine != other.drawn) {
    TORCH_WARN_ONCE(
        "shardtensor: on ranks ", rank, " and ", other.rank,
        " the default random generators differ: random ops on ShardTensors have not had the same keys, so values that should be "
        "equal on all ranks may differ. Seed all ranks alike (shardtensor.random.manual_seed), and draw alike on all ranks; "
        "SHARDTENSOR_CHECK=1 finds the op");
  }
}

// Results that depend on the shape that from_local assumed are wrong: means, for example.
void warn_of_unequal_pieces(GroupHistory& group, int64_t rank, int64_t next) {
  {
    const std::lock_guard<std::mutex> lock(group.mutex);
    if (std::exchange(group.warned, true)) {
      return;
    }
  }
  TORCH_WARN(
      "shardtensor: from_local was given pieces of different sizes on ranks ", rank, " and ", next,
      ", but was not told so, and then assumes that all pieces have the same sizes. Shapes and means of the results are wrong. "
      "Pass sharding_shapes=\"infer\" (the ranks then tell each other), the sizes along the cut dim (sharding_shapes={0: [2, "
      "3]}), or run_check=True. SHARDTENSOR_CHECK=1 finds the call");
}

// What a rank does while it waits long for one ticket.
class WaitMonitor {
 public:
  explicit WaitMonitor(const Ticket& ticket) : ticket_(ticket), since_(Clock::now()) {}

  // Why waiting is useless; empty if the others may still come. `text`: what this rank is doing.
  std::string look(TextFn text) {
    const auto& [world, group, number, peers, by_messages, needs_all] = ticket_;
    if (group && !std::exchange(claimed_, true)) {
      const auto facts = facts_of(*group, number).value_or(0);
      const auto mine = text();
      const auto first = world->claim(*group, number, facts, mine);
      if (first.facts != facts) {
        return differ(world->rank(), mine, first);
      }
      compare_draws(*group, number, world->rank(), first);
    }
    if (const auto f = world->in_vain(group.get(), group ? group->ranks : peers, number, since_, g_grace)) {
      return f->str();
    }
    if (needs_all && world->one_thread()) {
      if (nth_look_++ == 0) {
        world->tell_stuck(Report::ReportState::InCollective, group->name, number, text());
      }
      if (const auto other = world->waits_for_me(*group, number, nth_look_)) {
        return c10::str(
            "the ranks wait for each other. Rank ", world->rank(), ": ", text(), "; rank ", other->rank, ": ", other->text);
      }
    }
    return "";
  }
  // The wait raises. (If it does not, what this rank has told the others stays true until it begins its next collective.)
  void gives_up() {
    if (nth_look_) {
      ticket_.world->not_stuck();
    }
  }
  Clock::time_point since() const {
    return since_;
  }

 private:
  const Ticket& ticket_;
  const Clock::time_point since_;
  bool claimed_ = false;
  int64_t nth_look_ = 0;
};

// This rank has failed since its last collective in the group: it makes the next one only when all ranks have claimed it.
void agree(const Ticket& ticket, c10d::ProcessGroup& process_group, TextFn text) {
  const auto& [world, group, number, peers, by_messages, needs_all] = ticket;
  const NoGilGuard released;
  const auto longest = process_group.getDefaultBackend()->getBackendOptions()->timeout;
  world->come_back(group->name);
  WaitMonitor late(ticket);
  for (std::chrono::milliseconds pause = 1ms;; pause = std::min<std::chrono::milliseconds>(2 * pause, kShort)) {
    if (const auto why = late.look([&] { return c10::str(text(), ", ", doing_now()); }); !why.empty()) {
      late.gives_up();
      part(ticket, c10::str(text(), ": ", why));
    }
    if (world->claims(*group, number) >= static_cast<int64_t>(group->ranks.size())) {
      return;
    }
    if (Clock::now() - late.since() > longest) {
      late.gives_up();
      part(ticket, c10::str(text(), ": not all ranks came within the time-out of ", longest.count(), " ms"));
    }
    std::this_thread::sleep_for(pause);
  }
}

} // namespace

Ticket enter(const GroupPtr& process_group, const Mesh& mesh, int64_t mesh_dim, uint64_t facts, bool needs_all, TextFn text) {
  if (!g_on.load(std::memory_order_relaxed)) {
    return {};
  }
  const auto all = watched(process_group, mesh, mesh_dim);
  if (!all->world) {
    return {};
  }
  auto& group = *all->group;
  Ticket ticket{all->world, all->group, 0, {}, false, needs_all || t_careful};
  all->world->note_thread();
  bool others_wait = false; // perhaps; then they have claimed the number
  bool compares = false;    // with the next rank: so that a mistake within a slice is noticed
  {
    const std::lock_guard<std::mutex> lock(group.mutex);
    TORCH_CHECK_WITH(DistBackendError, group.broken.empty(), text(), ": the process group broke before: ", group.broken);
    ticket.number = group.begin(facts, mesh_dim < 0 ? 0 : mesh.equal_pieces(mesh_dim));
    const auto now = Clock::now();
    others_wait = now - std::exchange(group.last, now) > kSlice;
    if (ticket.number % kMark == 0 && now - group.marked >= g_between.load(std::memory_order_relaxed)) {
      group.marked = now;
      compares = true;
    }
  }
  if (const auto failures = all->world->failures(); C10_UNLIKELY(t_careful || group.checked != failures)) {
    agree(ticket, *process_group, text);
    group.checked = failures;
  } else if (C10_UNLIKELY(others_wait)) {
    const NoGilGuard released;
    const auto other = all->world->claimed(group, ticket.number);
    if (other && other->facts != facts) {
      part(ticket, c10::str(text(), ": ", differ(all->world->rank(), c10::str(text(), ", ", doing_now()), *other)));
    }
    if (other) {
      compare_draws(group, ticket.number, all->world->rank(), *other);
    }
  }
  if (C10_UNLIKELY(compares)) {
    const NoGilGuard released;
    const auto compared = all->world->compare_with_next(group);
    if (compared.pieces_differ) {
      warn_of_unequal_pieces(group, all->world->rank(), compared.next);
    }
    if (compared.collectives_differ) {
      part(
          ticket, c10::str(
                      text(), ", ", doing_now(), ": ranks ", all->world->rank(), " and ", compared.next,
                      " have made different collectives among their first ", ticket.number,
                      " in this process group, so one may have received data that was meant for another collective, and results "
                      "of the last second may be wrong. SHARDTENSOR_CHECK=1 finds the op"));
    }
  }
  ++t_begun;
  return ticket;
}

ConfirmedStartGuard::ConfirmedStartGuard() {
  ++t_careful;
}
ConfirmedStartGuard::~ConfirmedStartGuard() {
  --t_careful;
}

Ticket enter_messages(const Mesh& mesh, c10::IntArrayRef peers) {
  auto world = g_on.load(std::memory_order_relaxed) ? world_of(mesh) : nullptr;
  if (world) {
    world->note_thread();
    const NoGilGuard released;
    world->come_back("");
  }
  return {std::move(world), nullptr, 0, peers.vec(), true, false};
}

namespace {

void wait_for_all(c10d::Work& work, const Ticket& ticket, TextFn text) {
  WaitMonitor late(ticket);
  while (true) {
    try {
      work.wait(kSlice);
      return;
    } catch (...) {
      if (work.isCompleted()) {
        if (work.exception()) {
          late.gives_up();
        }
        work.wait(); // raises the backend's error, if there is one
        return;
      }
    }
    if (const auto why = late.look([&] { return c10::str(text(), ", ", doing_now()); }); !why.empty()) {
      late.gives_up();
      part(ticket, c10::str(text(), ": ", why));
    }
  }
}

// A thread that checks on waits which their own threads cannot check on.
class WaitWatcher {
 public:
  static WaitWatcher& get() {
    static auto* watcher = new WaitWatcher();
    return *watcher;
  }

  // A wait. look() is called now and then once the wait is late; not after leave().
  struct WatchedWait {
    explicit WatchedWait(std::function<void()> l) : look(std::move(l)) {}
    const std::function<void()> look;
    const Clock::time_point since = Clock::now();
    std::mutex mutex;
    bool over = false;
  };
  std::shared_ptr<WatchedWait> enter(std::function<void()> look) {
    auto entry = std::make_shared<WatchedWait>(std::move(look));
    const std::lock_guard<std::mutex> lock(mutex_);
    entries_.push_back(entry);
    return entry;
  }
  void leave(const std::shared_ptr<WatchedWait>& entry) {
    {
      const std::lock_guard<std::mutex> looking(entry->mutex);
      entry->over = true;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    entries_.erase(std::find(entries_.begin(), entries_.end(), entry));
  }

 private:
  WaitWatcher() {
    std::thread([this] { run(); }).detach();
  }
  void run() {
    for (;; std::this_thread::sleep_for(kSlice)) {
      std::vector<std::shared_ptr<WatchedWait>> late;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        std::copy_if(entries_.begin(), entries_.end(), std::back_inserter(late), [](const auto& entry) {
          return Clock::now() - entry->since >= kSlice;
        });
      }
      for (const auto& entry : late) {
        const std::lock_guard<std::mutex> looking(entry->mutex);
        if (!entry->over) {
          entry->look();
        }
      }
    }
  }

  std::mutex mutex_;
  std::vector<std::shared_ptr<WatchedWait>> entries_;
};

// Gloo's messages cannot be waited for a while and then again: a wait that has timed out closes the connection. So the watcher
// looks for news, and ends waits that are useless.
void wait_for_messages(c10d::Work& work, const Ticket& ticket, TextFn text) {
  std::string why; // why waiting is useless
  WaitMonitor late(ticket);
  const auto entry = WaitWatcher::get().enter([&] {
    if (why.empty()) {
      why = late.look(text);
      if (!why.empty()) {
        work.abort();
      }
    }
  });
  std::exception_ptr error;
  try {
    work.wait();
  } catch (...) {
    error = std::current_exception();
  }
  WaitWatcher::get().leave(entry);
  if (!why.empty()) {
    late.gives_up();
    part(ticket, c10::str(text(), ": ", why));
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

} // namespace

void wait(c10d::Work& work, const Ticket& ticket, TextFn text) {
  if (!ticket.world) {
    work.wait();
  } else if (ticket.by_messages) {
    wait_for_messages(work, ticket, text);
  } else {
    wait_for_all(work, ticket, text);
  }
}

void wait_for_dropped(c10d::Work& work, const Ticket& ticket) {
  const auto wait = [&] {
    try {
      work.wait();
    } catch (...) { // the other ranks hear of it from those that want the result
    }
  };
  if (!ticket.world) {
    return wait();
  }
  WaitMonitor late(ticket);
  const auto is_in_vain = [&] { return !late.look([] { return std::string("a result that was dropped"); }).empty(); };
  if (!ticket.by_messages) {
    while (!work.isCompleted()) {
      try {
        work.wait(kSlice);
      } catch (...) {
        if (is_in_vain()) {
          return;
        }
      }
    }
    return;
  }
  bool in_vain = false;
  const auto entry = WaitWatcher::get().enter([&] {
    if (!in_vain && is_in_vain()) {
      in_vain = true;
      work.abort();
    }
  });
  wait();
  WaitWatcher::get().leave(entry);
}

std::string broke(const Ticket& ticket, const std::string& error) {
  if (!ticket.world || t_told == std::current_exception()) {
    return "";
  }
  c10::IntArrayRef ranks = ticket.peers;
  auto since = Clock::now();
  if (ticket.group) {
    const std::lock_guard<std::mutex> lock(ticket.group->mutex);
    ticket.group->broken = one_line(error);
    ranks = ticket.group->ranks;
    since = ticket.group->last;
  }
  ticket.world->tell(doing_now(), error);
  t_told = std::current_exception();
  auto silent = ticket.world->silent(ranks, since);
  for (const auto end = Clock::now() + kSigns; !silent.empty() && Clock::now() < end;) {
    std::this_thread::sleep_for(kShort);
    silent = ticket.world->silent(ranks, since);
  }
  if (const auto gone = ticket.world->ended(ranks)) {
    return gone->str();
  }
  return silent.empty() ? "" : c10::str("no sign of life from rank ", c10::Join(", ", silent));
}

namespace {
// See tell_failure().
void failed(const std::string& doing, const std::string& error, const Mesh& mesh, uint64_t due) {
  if (!g_on.load(std::memory_order_relaxed) || !mesh.has_this_rank() || mesh.size() == 1) {
    return;
  }
  for (int64_t m = 0; m < mesh.ndim(); ++m) {
    if ((due >> m & 1) && mesh.size(m) > 1 && !mesh.group(m).empty()) {
      const auto all = watched(c10d::resolve_process_group(mesh.group(m)), mesh, m);
      if (all->world) {
        skip(*all->group);
      }
    }
  }
  if (const auto world = world_of(mesh)) {
    world->tell(doing, error);
  }
}

} // namespace

void failed_in_part(const std::string& doing, const std::string& error) {
  if (!g_on.load(std::memory_order_relaxed)) {
    return;
  }
  for (const auto& world : worlds().alive()) {
    if (world->has_store()) {
      for (const auto& group : world->groups()) {
        skip(*group);
      }
      world->tell(doing, error);
    }
  }
}

namespace {
std::shared_ptr<GroupHistory> group_along(const Mesh& mesh, int64_t mesh_dim) {
  if (mesh.size(mesh_dim) == 1 || mesh.group(mesh_dim).empty()) {
    return nullptr;
  }
  const auto all = all_watched().find(c10d::resolve_process_group(mesh.group(mesh_dim)));
  return all ? all->group : nullptr;
}
} // namespace

void parted(const Mesh& mesh, int64_t mesh_dim, const std::string& why) {
  const auto group = g_on.load(std::memory_order_relaxed) ? group_along(mesh, mesh_dim) : nullptr;
  if (const auto world = group ? world_of(mesh) : nullptr) {
    part({world, group}, why);
  }
  throw c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, why);
}

void note_draw(const Mesh& mesh, uint64_t key) {
  for (int64_t m = 0; g_on.load(std::memory_order_relaxed) && mesh.has_this_rank() && m < mesh.ndim(); ++m) {
    if (const auto group = group_along(mesh, m)) {
      const std::lock_guard<std::mutex> lock(group->mutex);
      group->drawn += key;
    }
  }
}

uint64_t drawn(const Mesh& mesh, int64_t mesh_dim) {
  const auto group = group_along(mesh, mesh_dim);
  if (!group) {
    return 0;
  }
  const std::lock_guard<std::mutex> lock(group->mutex);
  return group->drawn;
}

namespace {
// The rank that keeps the store may have ended before. torch warns of that, with a stack trace; at an ordinary end it is no news.
class QuietLogGuard {
 public:
  QuietLogGuard() : before_(FLAGS_caffe2_log_level) {
    constexpr int kErrors = 2; // as in glog
    FLAGS_caffe2_log_level = std::max(before_, kErrors);
  }
  ~QuietLogGuard() {
    FLAGS_caffe2_log_level = before_;
  }
  QuietLogGuard(const QuietLogGuard&) = delete;
  QuietLogGuard& operator=(const QuietLogGuard&) = delete;

 private:
  const int before_;
};
} // namespace

void ended(const std::string& done) {
  const QuietLogGuard quiet;
  if (g_on.load(std::memory_order_relaxed)) {
    for (const auto& world : worlds().alive()) {
      if (world->has_store()) {
        world->tell(done, "", /*ended=*/true);
      }
    }
  }
}

void destroyed_groups() {
  ended("destroyed its process groups");
  forget_barriers();
  ++g_epoch;
}

struct BarrierGuard::Wait {
  std::shared_ptr<PeerStore> world;
  std::shared_ptr<WaitWatcher::WatchedWait> entry;
  bool told = false;
};

BarrierGuard::BarrierGuard(const std::string& group) {
  const auto number = begin_barrier(group);
  const auto world = g_on.load(std::memory_order_relaxed) ? any_world() : nullptr;
  if (!world) {
    return;
  }
  world->note_thread();
  if (world->one_thread()) {
    wait_ = std::make_unique<Wait>(Wait{world, nullptr});
    wait_->entry = WaitWatcher::get().enter([world, group, number, wait = wait_.get()] {
      if (!std::exchange(wait->told, true)) {
        world->tell_stuck(Report::ReportState::InBarrier, group, number, "torch.distributed.barrier()");
      }
    });
  }
}

BarrierGuard::~BarrierGuard() {
  leave();
}

void BarrierGuard::leave() {
  if (const auto wait = std::move(wait_)) {
    const NoGilGuard released;
    WaitWatcher::get().leave(wait->entry);
    if (wait->told) {
      wait->world->not_stuck();
    }
  }
}

void set_notice(bool on) {
  g_on = on;
}
bool notice() {
  return g_on;
}
void set_between(double seconds) {
  g_between = std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}
void set_grace(double seconds) {
  g_grace = std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

} // namespace desync

int64_t begun() {
  return desync::t_begun;
}

int64_t group_generation() {
  return desync::g_epoch;
}

void tell_failure(const std::string& doing, const Mesh& mesh, uint64_t due) noexcept {
  const auto error = std::current_exception();
  if (!error || error == desync::t_told || is_recording()) { // torch.compile raises to start anew
    return;
  }
  try {
    try {
      std::rethrow_exception(error);
    } catch (const c10::Error& e) {
      desync::t_told = error; // Python's own exceptions hold frames and their tensors
      desync::failed(doing, e.what_without_backtrace(), mesh, due);
    } catch (const std::exception& e) {
      desync::failed(doing, e.what(), mesh, due);
    } catch (...) {
      desync::failed(doing, "an unknown error", mesh, due);
    }
  } catch (...) { // the notice is a courtesy; the error itself goes on
  }
}

} // namespace shardtensor::comm
