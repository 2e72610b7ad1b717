#include "comm/faults.h"

#include "comm/doing.h"
#include "comm/values.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <sstream>
#include <thread>
#include <unordered_map>

namespace shardtensor::comm {

namespace faults {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

constexpr auto kSlice = 250ms; // a wait looks for news this often
constexpr auto kShort = 50ms;  // so does a rank that waits for the others' claims
constexpr auto kSigns = 700ms; // how long the ranks that survive a broken group wait for each other's signs
constexpr size_t kKept = 64;   // collectives whose facts a rank remembers
constexpr size_t kClaims = 8;  // claims that a rank leaves in the store
constexpr size_t kTold = 256;  // failures that a rank knows of; older ones are of no matter
constexpr char kPart = '\x1f', kItem = '\x1e';

std::atomic<bool> g_on{true};
std::atomic<int64_t> g_grace{600}; // milliseconds

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> out;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, at);) {
    out.push_back(part);
  }
  return out;
}

// How far a rank was in a group's collectives when it failed.
struct Count {
  int64_t number = 0;
  bool broken = false;          // it takes no part any more
  std::vector<int64_t> skipped; // it has left these out

  bool skips(int64_t n) const {
    return std::find(skipped.begin(), skipped.end(), n) != skipped.end();
  }
};

// One rank's failure.
struct Failure {
  int64_t rank = 0;
  std::string doing, error;
  std::map<std::string, Count> groups; // by name
  Time seen;
  int64_t nth = 0; // of all failures

  std::string written() const {
    std::ostringstream out;
    out << rank << kPart << doing << kPart << error << kPart;
    for (const auto& [name, count] : groups) {
      out << name << kItem << count.number << kItem << count.broken;
      for (const auto n : count.skipped) {
        out << kItem << n;
      }
      out << kPart;
    }
    return out.str();
  }
  static Failure read(const std::string& text) {
    const auto parts = split(text, kPart);
    Failure out{std::stoll(parts.at(0)), parts.at(1), parts.at(2), {}, Clock::now(), 0};
    for (size_t i = 3; i < parts.size(); ++i) {
      const auto items = split(parts[i], kItem);
      Count count{std::stoll(items.at(1)), items.at(2) == "1", {}};
      for (size_t k = 3; k < items.size(); ++k) {
        count.skipped.push_back(std::stoll(items[k]));
      }
      out.groups.emplace(items.at(0), std::move(count));
    }
    return out;
  }
  const Count* count(const std::string& name) const {
    const auto it = groups.find(name);
    return it == groups.end() ? nullptr : &it->second;
  }
  std::string str() const {
    return c10::str("rank ", rank, " failed in ", doing, ": ", error);
  }
};

// Texts are for people: short, and without the signs that part a record.
std::string one_line(std::string text) {
  if (const auto trace = text.find("\nException raised from"); trace != std::string::npos) {
    text.resize(trace);
  }
  for (auto& c : text) {
    c = c == kPart || c == kItem || c == '\n' ? ' ' : c;
  }
  constexpr size_t kMost = 1000;
  return text.size() > kMost ? text.substr(0, kMost) + "..." : text;
}

} // namespace

// The collectives of one process group.
struct Group {
  std::string name;
  std::vector<int64_t> ranks; // global, all of the group's
  std::mutex mutex;
  int64_t number = 0; // collectives begun
  std::array<uint64_t, kKept> facts{};
  std::vector<int64_t> skipped;    // the last ones
  std::vector<int64_t> first;      // numbers that this rank was the first to claim
  std::atomic<int64_t> checked{0}; // this rank's failures before the last collective on which all have agreed
  std::string broken;              // says why; empty if it is whole

  bool skips(int64_t n) const {
    return std::find(skipped.begin(), skipped.end(), n) != skipped.end();
  }
};

// The store of the default group, as this rank uses it. A store that cannot be reached has no news.
class World {
 public:
  World(c10d::ProcessGroup& group, int64_t rank) : rank_(rank), size_(group.getSize()) {
    if (group.getStore()) {
      store_ = group.getStore()->clone();
      // A default group that is made anew may use the same store: each has its own keys.
      const auto nth = store_->add(c10::str("shardtensor/faults/", rank), 1);
      prefix_ = c10::str("shardtensor/faults/", nth, "/");
    }
  }

  int64_t rank() const {
    return rank_;
  }
  bool has_store() const {
    return store_ != nullptr;
  }
  int64_t failures() const {
    return failures_.load(std::memory_order_relaxed);
  }
  // The rank leaves out a collective that the others make.
  static void skip(Group& group) {
    const std::lock_guard<std::mutex> lock(group.mutex);
    group.skipped.push_back(++group.number);
    if (group.skipped.size() > kKept) {
      group.skipped.erase(group.skipped.begin());
    }
  }
  void skip_in_all_groups() {
    for (const auto& group : groups()) {
      skip(*group);
    }
  }
  std::shared_ptr<Group> add(std::shared_ptr<Group> group) {
    const std::lock_guard<std::mutex> lock(mutex_);
    groups_[group->name] = group;
    return group;
  }

  // Tells all ranks that this one has failed.
  void tell(const std::string& doing, const std::string& error) {
    Failure mine{rank_, one_line(doing), one_line(error), {}, Clock::now(), 0};
    for (const auto& group : groups()) {
      const std::lock_guard<std::mutex> lock(group->mutex);
      mine.groups[group->name] = {group->number, !group->broken.empty(), group->skipped};
    }
    failures_.fetch_add(1);
    ask([&] {
      const auto nth = store_->add(prefix_ + "count", 1) - 1;
      store_->set(key(nth), mine.written());
      mine.nth = nth;
      const std::lock_guard<std::mutex> lock(mutex_);
      absent_.push_back(nth);
      own_.push_back(std::move(mine));
      if (own_.size() > kTold) {
        store_->set(key(own_.front().nth), std::string()); // others may still count on the key
        store_->deleteKey(key(own_.front().nth) + "/back");
        own_.pop_front();
      }
    });
  }

  // This rank goes on with communication after it has failed.
  void come_back() {
    std::vector<int64_t> all;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      all.swap(absent_);
    }
    for (const auto nth : all) {
      ask([&] { store_->set(key(nth) + "/back", "1"); });
    }
  }

  // The first rank's claim of a number: the facts of its collective, its rank, and a text. Each rank claims a number once.
  std::vector<std::string> claim(Group& group, int64_t number, uint64_t facts, const std::string& text) {
    const auto mine = c10::str(facts, kPart, rank_, kPart, one_line(text));
    auto first = mine;
    ask([&] {
      first = store_->compareSet(claim_key(group, number), std::string(), mine);
      store_->add(claim_key(group, number) + "/count", 1);
    });
    if (first == mine) {
      forget_older(group, number);
    }
    return split(first, kPart);
  }
  int64_t claims(const Group& group, int64_t number) {
    int64_t n = 0;
    ask([&] { n = store_->add(claim_key(group, number) + "/count", 0); });
    return n;
  }

  // Why a wait for `number` of the group (0: for messages of `ranks`), which lasts since `since`, is in vain.
  std::optional<Failure> in_vain(const Group* group, c10::IntArrayRef ranks, int64_t number, Time since) {
    read_news();
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& f : news_) {
      if (f.rank == rank_ || std::find(ranks.begin(), ranks.end(), f.rank) == ranks.end()) {
        continue;
      }
      const auto* count = group ? f.count(group->name) : nullptr;
      if (count && (count->broken || count->skips(number))) {
        return f;
      }
      const bool has_begun = count && count->number >= number;
      const auto grace = std::chrono::milliseconds(g_grace.load());
      if (!has_begun && !failed_alike(f, group) && Clock::now() - std::max(f.seen, since) >= grace && !is_back(f.nth)) {
        return f;
      }
    }
    return std::nullopt;
  }

  // Whether this rank knows that `ranks` have failed too: those from which it has no news.
  std::vector<int64_t> silent(c10::IntArrayRef ranks) {
    read_news();
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<int64_t> out;
    for (const auto r : ranks) {
      if (r != rank_ && std::none_of(news_.begin(), news_.end(), [&](const Failure& f) { return f.rank == r; })) {
        out.push_back(r);
      }
    }
    return out;
  }

 private:
  template <typename F>
  void ask(const F& f) {
    try {
      f();
    } catch (const std::exception&) { // the store is gone, and with it the rank that keeps it
    }
  }
  std::string key(int64_t nth) const {
    return c10::str(prefix_, nth);
  }
  std::string claim_key(const Group& group, int64_t number) const {
    return c10::str(prefix_, group.name, "/", number);
  }
  std::vector<std::shared_ptr<Group>> groups() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<Group>> out;
    for (auto& [name, weak] : groups_) {
      if (auto group = weak.lock()) {
        out.push_back(std::move(group));
      }
    }
    return out;
  }

  void forget_older(Group& group, int64_t number) {
    int64_t old = 0;
    {
      const std::lock_guard<std::mutex> lock(group.mutex);
      group.first.push_back(number);
      if (group.first.size() > kClaims) {
        old = group.first.front();
        group.first.erase(group.first.begin());
      }
    }
    if (old) {
      ask([&] {
        store_->deleteKey(claim_key(group, old));
        store_->deleteKey(claim_key(group, old) + "/count");
      });
    }
  }

  // Reads new failures. A rank that has failed waits until all others have claimed its next number in each group; this rank may
  // have begun that collective without waiting for it.
  void read_news() {
    std::vector<Failure> fresh;
    ask([&] {
      const auto n = store_->add(prefix_ + "count", 0);
      const std::lock_guard<std::mutex> lock(mutex_);
      next_ = std::max(next_, n - static_cast<int64_t>(kTold));
      for (; next_ < n && store_->check({key(next_)}); ++next_) {
        if (const auto text = store_->get_to_str(key(next_)); !text.empty()) {
          fresh.push_back(Failure::read(text));
          fresh.back().nth = next_;
          news_.push_back(fresh.back());
        }
        if (news_.size() > kTold) {
          news_.pop_front();
        }
      }
    });
    for (const auto& f : fresh) {
      for (const auto& group : groups()) {
        const auto* count = f.count(group->name);
        const auto last = count && f.rank != rank_ ? number_of(*group) : 0;
        for (auto n = count ? std::max(count->number + 1, last - static_cast<int64_t>(kKept) + 1) : 1; n <= last; ++n) {
          if (const auto facts = facts_of(*group, n)) {
            claim(*group, n, *facts, "a collective that it has begun");
          }
        }
      }
    }
  }
  static int64_t number_of(Group& group) {
    const std::lock_guard<std::mutex> lock(group.mutex);
    return group.number;
  }
  static std::optional<uint64_t> facts_of(Group& group, int64_t number) {
    const std::lock_guard<std::mutex> lock(group.mutex);
    return group.skips(number) ? std::nullopt : std::optional(group.facts[number % kKept]);
  }

  // Whether this rank failed in the same op, at the same place among the group's collectives.
  bool failed_alike(const Failure& f, const Group* group) const {
    return group && std::any_of(own_.begin(), own_.end(), [&](const Failure& mine) {
             const auto *a = mine.count(group->name), *b = f.count(group->name);
             return mine.doing == f.doing && (a ? a->number : 0) == (b ? b->number : 0);
           });
  }
  bool is_back(int64_t nth) {
    bool back = false;
    ask([&] { back = store_->check({key(nth) + "/back"}); });
    return back;
  }

  const int64_t rank_, size_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::string prefix_;
  std::atomic<int64_t> failures_{0};
  std::mutex mutex_; // of what follows
  std::map<std::string, std::weak_ptr<Group>> groups_;
  std::deque<Failure> news_, own_;
  int64_t next_ = 0;            // the failure to read next
  std::vector<int64_t> absent_; // this rank's failures since it last communicated
};

namespace {

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
      out->group = out->world->add(std::move(made));
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

// A rank that is late: what it does for one ticket until the others come.
class Late {
 public:
  explicit Late(const Ticket& ticket) : ticket_(ticket), since_(Clock::now()) {}

  // Why waiting is in vain; empty if the others may still come. `text` says what this rank does.
  std::string look(Text text) {
    const auto& [world, group, number, peers, by_messages] = ticket_;
    if (group && !std::exchange(claimed_, true)) {
      uint64_t facts = 0;
      {
        const std::lock_guard<std::mutex> lock(group->mutex);
        facts = group->facts[number % kKept];
      }
      const auto mine = text();
      const auto first = world->claim(*group, number, facts, mine);
      if (first.at(0) != std::to_string(facts)) {
        return c10::str(
            "the ranks make different collectives. Rank ", world->rank(), ": ", mine, "; rank ", first.at(1), ": ", first.at(2));
      }
    }
    const auto f = world->in_vain(group.get(), group ? group->ranks : peers, number, since_);
    return f ? f->str() : "";
  }
  Time since() const {
    return since_;
  }

 private:
  const Ticket& ticket_;
  const Time since_;
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
  {
    const std::lock_guard<std::mutex> lock(group.mutex);
    TORCH_CHECK_WITH(DistBackendError, group.broken.empty(), text(), ": the process group broke before: ", group.broken);
    ticket.number = ++group.number;
    group.facts[ticket.number % kKept] = facts;
  }
  if (const auto failures = all->world->failures(); C10_UNLIKELY(group.checked != failures)) {
    agree(ticket, *process_group, text);
    group.checked = failures;
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

void failed(const std::string& doing, const std::string& error, const Mesh& mesh, uint64_t due) {
  if (!g_on.load(std::memory_order_relaxed) || !mesh.has_me() || mesh.size() == 1) {
    return;
  }
  for (int64_t m = 0; m < mesh.ndim(); ++m) {
    if ((due >> m & 1) && mesh.size(m) > 1 && !mesh.group(m).empty()) {
      const auto all = watched(c10d::resolve_process_group(mesh.group(m)), mesh, m);
      if (all->world) {
        World::skip(*all->group);
      }
    }
  }
  if (const auto world = world_of(mesh)) {
    world->tell(doing, error);
  }
}

void failed_in_part(const std::string& doing, const std::string& error) {
  if (!g_on.load(std::memory_order_relaxed)) {
    return;
  }
  for (const auto& world : worlds().alive()) {
    if (world->has_store()) {
      world->skip_in_all_groups();
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
  g_grace = static_cast<int64_t>(seconds * 1000);
}

} // namespace faults

// ---- doing.h ----

namespace {
thread_local const Frame* t_frame = nullptr;
std::atomic<CallSite> g_call_site{nullptr};
} // namespace

Frame::Frame(c10::function_ref<std::string()> text) : text_(text), outer_(t_frame) {
  t_frame = this;
}
Frame::~Frame() {
  t_frame = outer_;
}

std::string doing_now() {
  std::string out;
  for (const auto* frame = t_frame; frame; frame = frame->outer_) {
    out += (out.empty() ? "" : ", ") + frame->text_();
  }
  return out + call_site();
}

std::string call_site() {
  const auto ask = g_call_site.load();
  const auto text = ask ? ask() : "";
  return text.empty() ? "" : " at " + text;
}
void set_call_site(CallSite ask) {
  g_call_site = ask;
}

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
