#include "comm/faults.h"

#include "comm/doing.h"
#include "comm/news.h"
#include "comm/values.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <numeric>
#include <thread>
#include <unordered_map>

namespace shardtensor::comm {

namespace faults {

namespace {

using namespace std::chrono_literals;

constexpr auto kSlice = 250ms; // a wait looks for news this often
constexpr auto kShort = 50ms;  // so does a rank that waits for the others' claims
constexpr auto kSigns = 700ms; // how long the ranks that survive a broken group wait for each other's signs

std::atomic<bool> g_on{false};
std::atomic<std::chrono::milliseconds> g_grace{600ms};

// What belongs to a process group. A group that is destroyed and made again is another one, also if it has the same name.
template <typename T>
class ByGroup {
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
    auto made = make();
    all_.emplace(group.get(), std::pair(c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), made));
    return made;
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

ByGroup<World>& worlds() {
  static auto* all = new ByGroup<World>();
  return *all;
}
std::shared_ptr<World> world_of(const Mesh& mesh) {
  const auto& name = mesh.description().world;
  if (name.empty()) {
    return nullptr;
  }
  const auto group = c10d::resolve_process_group(name);
  auto world = worlds().get(group, [&] { return std::make_shared<World>(*group, mesh.rank()); });
  return world->has_store() ? world : nullptr;
}

struct Watched {
  std::shared_ptr<World> world;
  std::shared_ptr<Group> group;
};
std::shared_ptr<Watched> watched(const GroupPtr& group, const Mesh& mesh, int64_t mesh_dim) {
  static auto* groups = new ByGroup<Watched>();
  return groups->get(group, [&] {
    auto out = std::make_shared<Watched>();
    out->world = world_of(mesh);
    if (out->world) {
      auto made = std::make_shared<Group>();
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
      out->world->add(made);
      out->group = std::move(made);
    }
    return out;
  });
}

// The exception that this thread told of last: it passes through several frames.
thread_local std::exception_ptr t_told;
thread_local int64_t t_begun = 0;

// Raises what other ranks have caused. The group takes part in nothing any more: a collective is begun that will not end.
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

// A rank that is late: what it does for one ticket until the others come.
class Late {
 public:
  explicit Late(const Ticket& ticket) : ticket_(ticket), since_(Clock::now()) {}

  // Why waiting is in vain; empty if the others may still come. `text` says what this rank does.
  std::string look(Text text) {
    const auto& [world, group, number, peers, by_messages] = ticket_;
    if (group && !std::exchange(claimed_, true)) {
      const auto facts = facts_of(*group, number).value_or(0);
      const auto mine = text();
      const auto first = world->claim(*group, number, facts, mine);
      if (first.facts != facts) {
        return differ(world->rank(), mine, first);
      }
    }
    const auto f = world->in_vain(group.get(), group ? group->ranks : peers, number, since_, g_grace);
    return f ? f->str() : "";
  }
  Clock::time_point since() const {
    return since_;
  }

 private:
  const Ticket& ticket_;
  const Clock::time_point since_;
  bool claimed_ = false;
};

// This rank has failed since its last collective in the group. It makes the next only when all have claimed it.
void agree(const Ticket& ticket, c10d::ProcessGroup& process_group, Text text) {
  const auto& [world, group, number, peers, by_messages] = ticket;
  const auto longest = process_group.getDefaultBackend()->getBackendOptions()->timeout;
  world->come_back();
  Late late(ticket);
  for (std::chrono::milliseconds pause = 1ms;; pause = std::min<std::chrono::milliseconds>(2 * pause, kShort)) {
    if (const auto why = late.look([&] { return c10::str(text(), ", ", doing_now()); }); !why.empty()) {
      part(ticket, c10::str(text(), ": ", why));
    }
    if (world->claims(*group, number) >= static_cast<int64_t>(group->ranks.size())) {
      return;
    }
    if (Clock::now() - late.since() > longest) {
      part(ticket, c10::str(text(), ": not all ranks came within the time-out of ", longest.count(), " ms"));
    }
    std::this_thread::sleep_for(pause);
  }
}

} // namespace

Ticket enter(const GroupPtr& process_group, const Mesh& mesh, int64_t mesh_dim, uint64_t facts, Text text) {
  if (!g_on.load(std::memory_order_relaxed)) {
    return {};
  }
  const auto all = watched(process_group, mesh, mesh_dim);
  if (!all->world) {
    return {};
  }
  auto& group = *all->group;
  Ticket ticket{all->world, all->group, 0, {}, false};
  bool others_wait = false; // perhaps; then they have claimed the number
  {
    const std::lock_guard<std::mutex> lock(group.mutex);
    TORCH_CHECK_WITH(DistBackendError, group.broken.empty(), text(), ": the process group broke before: ", group.broken);
    ticket.number = ++group.number;
    group.facts[ticket.number % kKept] = facts;
    const auto now = Clock::now();
    others_wait = now - std::exchange(group.last, now) > kSlice;
  }
  if (const auto failures = all->world->failures(); C10_UNLIKELY(group.checked != failures)) {
    agree(ticket, *process_group, text);
    group.checked = failures;
  } else if (C10_UNLIKELY(others_wait)) {
    const auto other = all->world->claimed(group, ticket.number);
    if (other && other->facts != facts) {
      part(ticket, c10::str(text(), ": ", differ(all->world->rank(), c10::str(text(), ", ", doing_now()), *other)));
    }
  }
  ++t_begun;
  return ticket;
}

Ticket enter_messages(const Mesh& mesh, c10::IntArrayRef peers) {
  auto world = g_on.load(std::memory_order_relaxed) ? world_of(mesh) : nullptr;
  if (world) {
    world->come_back();
  }
  return {std::move(world), nullptr, 0, peers.vec(), true};
}

namespace {

void wait_for_all(c10d::Work& work, const Ticket& ticket, Text text) {
  Late late(ticket);
  while (true) {
    try {
      work.wait(kSlice);
      return;
    } catch (...) {
      if (work.isCompleted()) {
        work.wait(); // raises the backend's error, if there is one
        return;
      }
    }
    if (const auto why = late.look([&] { return c10::str(text(), ", ", doing_now()); }); !why.empty()) {
      part(ticket, c10::str(text(), ": ", why));
    }
  }
}

// Gloo's messages cannot be waited for a while and then again: a wait that has timed out closes the connection. So another thread
// looks for news, and ends waits that are in vain.
class Watcher {
 public:
  static Watcher& get() {
    static auto* watcher = new Watcher();
    return *watcher;
  }

  void wait(c10d::Work& work, const Ticket& ticket, Text text) {
    const auto entry = std::make_shared<Entry>(work, ticket, text);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      entries_.push_back(entry);
    }
    std::exception_ptr error;
    try {
      work.wait();
    } catch (...) {
      error = std::current_exception();
    }
    {
      const std::lock_guard<std::mutex> looking(entry->mutex); // the watcher may be using the work
      entry->over = true;
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      entries_.erase(std::find(entries_.begin(), entries_.end(), entry));
    }
    if (!entry->why.empty()) {
      part(ticket, c10::str(text(), ": ", entry->why));
    }
    if (error) {
      std::rethrow_exception(error);
    }
  }

 private:
  struct Entry {
    Entry(c10d::Work& w, const Ticket& ticket, Text t) : work(w), late(ticket), text(t) {}
    c10d::Work& work;
    Late late;
    Text text;
    std::mutex mutex;
    bool over = false;
    std::string why; // it waits in vain
  };

  Watcher() {
    std::thread([this] { run(); }).detach();
  }
  void run() {
    for (;; std::this_thread::sleep_for(kSlice)) {
      std::vector<std::shared_ptr<Entry>> late;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        std::copy_if(entries_.begin(), entries_.end(), std::back_inserter(late), [](const auto& entry) {
          return Clock::now() - entry->late.since() >= kSlice;
        });
      }
      for (const auto& entry : late) {
        const std::lock_guard<std::mutex> looking(entry->mutex);
        if (!entry->over && entry->why.empty()) {
          entry->why = entry->late.look(entry->text);
          if (!entry->why.empty()) {
            entry->work.abort();
          }
        }
      }
    }
  }

  std::mutex mutex_;
  std::vector<std::shared_ptr<Entry>> entries_;
};

} // namespace

void wait(c10d::Work& work, const Ticket& ticket, Text text) {
  if (!ticket.world) {
    work.wait();
  } else if (ticket.by_messages) {
    Watcher::get().wait(work, ticket, text);
  } else {
    wait_for_all(work, ticket, text);
  }
}

std::string broke(const Ticket& ticket, const std::string& error) {
  if (!ticket.world || t_told == std::current_exception()) {
    return "";
  }
  c10::IntArrayRef ranks = ticket.peers;
  if (ticket.group) {
    const std::lock_guard<std::mutex> lock(ticket.group->mutex);
    ticket.group->broken = one_line(error);
    ranks = ticket.group->ranks;
  }
  ticket.world->tell(doing_now(), error);
  t_told = std::current_exception();
  auto silent = ticket.world->silent(ranks);
  for (const auto end = Clock::now() + kSigns; !silent.empty() && Clock::now() < end;) {
    std::this_thread::sleep_for(kShort);
    silent = ticket.world->silent(ranks);
  }
  return silent.empty() ? "" : c10::str("no sign of life from rank ", c10::Join(", ", silent));
}

namespace {
// See tell_failure().
void failed(const std::string& doing, const std::string& error, const Mesh& mesh, uint64_t due) {
  if (!g_on.load(std::memory_order_relaxed) || !mesh.has_me() || mesh.size() == 1) {
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

void set_notice(bool on) {
  g_on = on;
}
bool notice() {
  return g_on;
}
void set_grace(double seconds) {
  g_grace = std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

} // namespace faults

int64_t begun() {
  return faults::t_begun;
}

void tell_failure(const std::string& doing, const Mesh& mesh, uint64_t due) noexcept {
  const auto error = std::current_exception();
  if (!error || error == faults::t_told || is_recording()) { // torch.compile raises to start anew
    return;
  }
  try {
    try {
      std::rethrow_exception(error);
    } catch (const c10::Error& e) {
      faults::t_told = error; // others, of Python, hold frames and their tensors
      faults::failed(doing, e.what_without_backtrace(), mesh, due);
    } catch (const std::exception& e) {
      faults::failed(doing, e.what(), mesh, due);
    } catch (...) {
      faults::failed(doing, "an unknown error", mesh, due);
    }
  } catch (...) { // the notice is a courtesy; the error itself goes on
  }
}

} // namespace shardtensor::comm
