#include "comm/desync.h"

#include "comm/error_context.h"
#include "comm/gil.h"
#include "comm/peer_store.h"
#include "comm/tensor_kind.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <c10/util/ScopeExit.h>
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

std::vector<std::shared_ptr<PeerStore>> all_worlds() {
  auto all = worlds().alive();
  all.erase(std::remove_if(all.begin(), all.end(), [](const auto& world) { return !world->has_store(); }), all.end());
  return all;
}

PerGroup<GroupHistory>& all_watched() {
  static auto* all = new PerGroup<GroupHistory>();
  return *all;
}
// Null: without a store nothing is watched.
std::shared_ptr<GroupHistory> watched(const GroupPtr& group, const Mesh& mesh, int64_t mesh_dim) {
  return all_watched().get(group, [&]() -> std::shared_ptr<GroupHistory> {
    auto world = world_of(mesh);
    if (!world) {
      return nullptr;
    }
    auto out = std::make_shared<GroupHistory>();
    out->world = world;
    if (mesh_dim < 0) {
      out->name = mesh.description().world;
      out->ranks.resize(group->getSize());
      std::iota(out->ranks.begin(), out->ranks.end(), 0);
    } else {
      out->name = mesh.group(mesh_dim);
      auto coordinate = mesh.coordinate();
      for (coordinate[mesh_dim] = 0; coordinate[mesh_dim] < mesh.size(mesh_dim); ++coordinate[mesh_dim]) {
        out->ranks.push_back(mesh.rank_at(coordinate));
      }
    }
    out->me = std::find(out->ranks.begin(), out->ranks.end(), mesh.rank()) - out->ranks.begin();
    world->add(out);
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

// Why this rank's collective cannot meet the one that `first` has claimed its number for; empty if it can.
std::string compare_with_claim(const Report& mine, const Report& first) {
  auto why = differ(mine, first);
  if (why.empty() && mine.drawn != first.drawn) {
    TORCH_WARN_ONCE(
        "shardtensor: on ranks ", mine.rank, " and ", first.rank,
        " the default random generators differ: random ops on ShardTensors have not had the same keys, so values that should be "
        "equal on all ranks may differ. Seed all ranks alike (shardtensor.random.manual_seed), and draw alike on all ranks; "
        "SHARDTENSOR_CHECK=1 finds the op");
  }
  return why;
}

// Results that depend on the shape that from_local assumed are wrong: means, for example.
void warn_of_unequal_pieces(GroupHistory& group) {
  if (group.warned.exchange(true)) {
    return;
  }
  TORCH_WARN(
      "shardtensor: from_local was given pieces of different sizes on ranks ", group.ranks[group.me], " and ", group.next(),
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
    auto why = reason(text);
    if (!why.empty()) {
      gives_up();
    }
    return why;
  }
  // The wait raises. (If it does not, what this rank has told the others stays true until it begins its next collective.)
  void gives_up() {
    if (nth_look_) {
      ticket_.world->set_wait({});
    }
  }

 private:
  std::string reason(TextFn text) {
    const auto& [world, group, number, peers, by_messages, needs_all] = ticket_;
    if (!mine_) {
      mine_ = group ? in_collective(*group, number, text()) : Report{Report::ReportState::Running, world->rank()};
      mine_->since = since_;
      if (group) {
        if (auto why = compare_with_claim(*mine_, world->claim(*group, *mine_)); !why.empty()) {
          return why;
        }
      }
    }
    if (auto why = world->in_vain(*mine_, group ? group->ranks : peers, g_grace); !why.empty()) {
      return why;
    }
    if (!needs_all || !world->one_thread()) {
      return "";
    }
    if (nth_look_++ == 0) {
      world->set_wait(*mine_);
    }
    return world->waits_for_me(*group, *mine_, nth_look_);
  }

  const Ticket& ticket_;
  const Clock::time_point since_;
  std::optional<Report> mine_; // what this rank waits for, once it waits long
  int64_t nth_look_ = 0;
};

// This rank has failed since its last collective in the group: it makes the next one only when all ranks have claimed it.
void agree(const Ticket& ticket, c10d::ProcessGroup& process_group, TextFn text) {
  const auto& [world, group, number, peers, by_messages, needs_all] = ticket;
  const NoGilGuard released;
  const auto longest = process_group.getDefaultBackend()->getBackendOptions()->timeout;
  world->come_back(group->name);
  const auto since = Clock::now();
  WaitMonitor late(ticket);
  for (std::chrono::milliseconds pause = 1ms;; pause = std::min<std::chrono::milliseconds>(2 * pause, kShort)) {
    if (const auto why = late.look([&] { return c10::str(text(), ", ", doing_now()); }); !why.empty()) {
      part(ticket, c10::str(text(), ": ", why));
    }
    if (world->claims(*group, number) >= static_cast<int64_t>(group->ranks.size())) {
      return;
    }
    if (Clock::now() - since > longest) {
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
  const auto history = watched(process_group, mesh, mesh_dim);
  if (!history) {
    return {};
  }
  auto& group = *history;
  auto& world = *group.world;
  Ticket ticket{group.world, history, 0, {}, false, needs_all || t_careful};
  world.note_thread();
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
  if (const auto failures = world.failures(); C10_UNLIKELY(t_careful || group.checked != failures)) {
    agree(ticket, *process_group, text);
    group.checked = failures;
  } else if (C10_UNLIKELY(others_wait)) {
    const NoGilGuard released;
    if (const auto other = world.claimed(group, ticket.number)) {
      const auto mine = in_collective(group, ticket.number, c10::str(text(), ", ", doing_now()));
      if (const auto why = compare_with_claim(mine, *other); !why.empty()) {
        part(ticket, c10::str(text(), ": ", why));
      }
    }
  }
  if (C10_UNLIKELY(compares)) {
    const NoGilGuard released;
    const auto compared = world.compare_with_next(group);
    if (compared.pieces_differ) {
      warn_of_unequal_pieces(group);
    }
    if (compared.collectives_differ) {
      part(
          ticket, c10::str(
                      text(), ", ", doing_now(), ": ranks ", world.rank(), " and ", group.next(),
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

// Waits. Returns why waiting is useless, or "" after the end. Raises the backend's error, if there is one.
std::string wait_in_slices(c10d::Work& work, const Ticket& ticket, TextFn text) {
  WaitMonitor late(ticket);
  while (true) {
    try {
      work.wait(kSlice);
      return "";
    } catch (...) {
      if (work.isCompleted()) {
        if (work.exception()) {
          late.gives_up();
        }
        work.wait();
        return "";
      }
    }
    if (auto why = late.look(text); !why.empty()) {
      return why;
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
std::string wait_for_messages(c10d::Work& work, const Ticket& ticket, TextFn text) {
  std::string why;
  WaitMonitor late(ticket);
  const auto entry = WaitWatcher::get().enter([&] {
    if (why.empty() && !(why = late.look(text)).empty()) {
      work.abort();
    }
  });
  std::exception_ptr error;
  try {
    work.wait();
  } catch (...) {
    error = std::current_exception();
  }
  WaitWatcher::get().leave(entry);
  if (why.empty() && error) {
    std::rethrow_exception(error);
  }
  return why;
}

std::string wait_or_why_not(c10d::Work& work, const Ticket& ticket, TextFn text) {
  if (!ticket.world) {
    work.wait();
    return "";
  }
  return ticket.by_messages ? wait_for_messages(work, ticket, text) : wait_in_slices(work, ticket, text);
}

} // namespace

void wait(c10d::Work& work, const Ticket& ticket, TextFn text) {
  const auto why = wait_or_why_not(work, ticket, [&] { return c10::str(text(), ", ", doing_now()); });
  if (!why.empty()) {
    part(ticket, c10::str(text(), ": ", why));
  }
}

void wait_for_dropped(c10d::Work& work, const Ticket& ticket) {
  try {
    wait_or_why_not(work, ticket, [] { return std::string("a result that was dropped"); });
  } catch (...) { // the other ranks hear of it from those that want the result
  }
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
  auto news = ticket.world->news();
  const auto quiet = [&] { return silent(ticket.world->rank(), ranks, news, since); };
  for (const auto end = Clock::now() + kSigns; !quiet().empty() && Clock::now() < end; news = ticket.world->news()) {
    std::this_thread::sleep_for(kShort);
  }
  if (const auto* gone = first_ended(ranks, news)) {
    return gone->str();
  }
  const auto missing = quiet();
  return missing.empty() ? "" : c10::str("no sign of life from rank ", c10::Join(", ", missing));
}

namespace {
// See tell_failure().
void failed(const std::string& doing, const std::string& error, const Mesh& mesh, uint64_t due) {
  if (!g_on.load(std::memory_order_relaxed) || !mesh.has_this_rank() || mesh.size() == 1) {
    return;
  }
  for (int64_t m = 0; m < mesh.ndim(); ++m) {
    if ((due >> m & 1) && mesh.size(m) > 1 && !mesh.group(m).empty()) {
      if (const auto group = watched(c10d::resolve_process_group(mesh.group(m)), mesh, m)) {
        skip(*group);
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
  for (const auto& world : all_worlds()) {
    for (const auto& group : world->groups()) {
      skip(*group);
    }
    world->tell(doing, error);
  }
}

namespace {
std::shared_ptr<GroupHistory> group_along(const Mesh& mesh, int64_t mesh_dim) {
  if (mesh.size(mesh_dim) == 1 || mesh.group(mesh_dim).empty()) {
    return nullptr;
  }
  return all_watched().find(c10d::resolve_process_group(mesh.group(mesh_dim)));
}
} // namespace

void parted(const Mesh& mesh, int64_t mesh_dim, const std::string& why) {
  const auto group = g_on.load(std::memory_order_relaxed) ? group_along(mesh, mesh_dim) : nullptr;
  if (group) {
    part({group->world, group}, why);
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

void ended(const std::string& done) {
  // The rank that keeps the store may have ended before. torch warns of that, with a stack trace; at an ordinary end it is no
  // news.
  constexpr int kErrors = 2; // as in glog
  const auto before = std::exchange(FLAGS_caffe2_log_level, std::max(FLAGS_caffe2_log_level, kErrors));
  const auto restored = c10::make_scope_exit([&] { FLAGS_caffe2_log_level = before; });
  if (g_on.load(std::memory_order_relaxed)) {
    for (const auto& world : all_worlds()) {
      world->tell(done, "", /*ended=*/true);
    }
  }
}

void destroyed_groups() {
  ended("destroyed its process groups");
  forget_barriers();
  ++g_epoch;
}

BarrierGuard::BarrierGuard(const std::string& group) {
  Report mine{Report::ReportState::InBarrier, 0, "torch.distributed.barrier()"};
  mine.group = group;
  mine.number = begin_barrier(group);
  const auto all = g_on.load(std::memory_order_relaxed) ? all_worlds() : std::vector<std::shared_ptr<PeerStore>>();
  if (all.empty()) {
    return;
  }
  const auto world = all.front();
  world->note_thread();
  if (world->one_thread()) {
    const auto told = std::make_shared<bool>(false);
    const auto entry = WaitWatcher::get().enter([=] {
      if (!std::exchange(*told, true)) {
        world->set_wait(mine);
      }
    });
    leave_ = [=] {
      WaitWatcher::get().leave(entry);
      if (*told) {
        world->set_wait({});
      }
    };
  }
}

BarrierGuard::~BarrierGuard() {
  leave();
}

void BarrierGuard::leave() {
  if (const auto leave = std::exchange(leave_, nullptr)) {
    const NoGilGuard released;
    leave();
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
