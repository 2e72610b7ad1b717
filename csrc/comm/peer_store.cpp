#include "comm/peer_store.h"

#include <c10/util/StringUtil.h>
#include <c10/util/hash.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>

namespace shardtensor::comm::desync {

namespace {

constexpr int64_t kTold = 256;         // failures that a rank remembers; older ones do not matter
const std::string kNothing(1, '\x1f'); // no report begins so

template <typename T>
void push(std::deque<T>& list, T value, int64_t most) {
  list.push_back(std::move(value));
  if (static_cast<int64_t>(list.size()) > most) {
    list.pop_front();
  }
}

std::mutex g_barriers_mutex;
std::map<std::string, int64_t>& all_barriers() {
  static auto* all = new std::map<std::string, int64_t>();
  return *all;
}

template <typename F>
void ask(const F& f) {
  try {
    f();
  } catch (const std::exception&) { // the store is gone, and with it the rank that keeps it
  }
}

} // namespace

int64_t begin_barrier(const std::string& group) {
  const std::lock_guard<std::mutex> lock(g_barriers_mutex);
  return ++all_barriers()[group];
}
void forget_barriers() {
  const std::lock_guard<std::mutex> lock(g_barriers_mutex);
  all_barriers().clear();
}

int64_t GroupHistory::begin(uint64_t what, uint64_t equal_pieces) {
  facts[++number % kKept] = what;
  drawn_before[number % kKept] = drawn;
  history = c10::hash_combine(history, what);
  if (number % kMark == 0) {
    marks[number / kMark % kMarks] = {number, history, equal_pieces};
  }
  return number;
}

void skip(GroupHistory& group) {
  const std::lock_guard<std::mutex> lock(group.mutex);
  push(group.skipped, group.begin(0), kKept);
}

Report in_collective(GroupHistory& group, int64_t number, std::string text) {
  Report out{Report::ReportState::InCollective, group.ranks[group.me], std::move(text)};
  out.group = group.name;
  out.number = number;
  const std::lock_guard<std::mutex> lock(group.mutex);
  out.facts = group.facts[number % kKept];
  out.drawn = group.drawn_before[number % kKept];
  return out;
}

PeerStore::PeerStore(c10d::ProcessGroup& group, int64_t rank) : rank_(rank) {
  ask([&] {
    if (auto store = group.getStore()) {
      store = store->clone();
      // A default group that is made anew may use the same store: each has its own keys.
      const auto nth = store->add(c10::str("shardtensor/faults/", rank), 1);
      prefix_ = c10::str("shardtensor/faults/", nth, "/");
      store_ = std::move(store);
    }
  });
}

// Reads without waiting. get() waits for a key that is not there, and between check() and get() another rank may delete it.
std::optional<Report> PeerStore::found(const std::string& key) {
  std::optional<Report> out;
  ask([&] {
    const auto value = store_->compareSet(key, kNothing, kNothing);
    if (value != kNothing) {
      out = value.empty() ? Report{} : read_report(value);
    }
  });
  return out;
}

void PeerStore::add(const std::shared_ptr<GroupHistory>& group) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = groups_.begin(); it != groups_.end();) {
    it = it->second.expired() ? groups_.erase(it) : std::next(it);
  }
  groups_[group->name] = group;
}

std::vector<std::shared_ptr<GroupHistory>> PeerStore::groups() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<GroupHistory>> out;
  for (auto& [name, weak] : groups_) {
    if (auto group = weak.lock()) {
      out.push_back(std::move(group));
    }
  }
  return out;
}

void PeerStore::add_progress(Report& mine) {
  mine.rank = rank_;
  for (const auto& group : groups()) {
    const std::lock_guard<std::mutex> lock(group->mutex);
    const auto& mark = group->marks[group->number / kMark % kMarks];
    mine.groups[group->name] = {group->number, !group->broken.empty(), {group->skipped.begin(), group->skipped.end()}, {}, mark};
  }
}

void PeerStore::publish() {
  const std::lock_guard<std::mutex> one_at_a_time(publishing_);
  Report mine;
  std::deque<UnresolvedFailure> absent;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    mine = wait_;
    mine.nth = own_.empty() ? -1 : own_.back().nth;
    absent = absent_;
  }
  add_progress(mine);
  for (const auto& failure : absent) {
    mine.absent.push_back(failure.nth);
    for (const auto& group : failure.back) {
      mine.groups[group].back.push_back(failure.nth);
    }
  }
  ask([&] { store_->set(rank_key(rank_), write_report(mine)); });
}

void PeerStore::tell(const std::string& doing, const std::string& error, bool ended) {
  if (ended) {
    read_news(); // other ranks may wait for this rank's answer
  }
  Report mine{ended ? Report::ReportState::Ended : Report::ReportState::Failed, rank_, one_line(doing), one_line(error)};
  add_progress(mine);
  failures_.fetch_add(1);
  const std::lock_guard<std::mutex> lock(mutex_); // publish() must not tell of a later failure alone
  ask([&] {
    mine.nth = store_->add(prefix_ + "count", 1) - 1;
    store_->set(key(mine.nth), write_report(mine));
    push(absent_, UnresolvedFailure{mine.nth, std::this_thread::get_id(), {}}, kTold);
    own_.push_back(std::move(mine));
    if (static_cast<int64_t>(own_.size()) > kTold) {
      store_->set(key(own_.front().nth), std::string()); // other ranks may still read the key
      own_.pop_front();
    }
  });
}

void PeerStore::come_back(const std::string& group) {
  bool changed = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto is_mine = [me = std::this_thread::get_id()](const UnresolvedFailure& a) { return a.thread == me; };
    const auto others = std::remove_if(absent_.begin(), absent_.end(), is_mine);
    changed = others != absent_.end();
    absent_.erase(others, absent_.end());
    for (auto& failure : absent_) {
      changed |= failure.back.insert(group).second;
    }
  }
  if (changed) {
    publish();
  }
}

void PeerStore::set_wait(Report mine) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    wait_ = std::move(mine);
  }
  publish();
}

Report PeerStore::claim(GroupHistory& group, const Report& mine) {
  const auto number = mine.number;
  bool again = false;
  {
    const std::lock_guard<std::mutex> lock(group.mutex);
    again = !group.claimed.insert(number).second;
    group.claimed.erase(group.claimed.begin(), group.claimed.upper_bound(*group.claimed.rbegin() - 2 * kKept));
  }
  auto first = mine;
  ask([&] {
    const auto text = write_report(mine);
    const auto found = store_->compareSet(claim_key(group, number), std::string(), text);
    first = read_report(found);
    if (!again) {
      store_->add(claim_key(group, number) + "/count", 1);
    }
    if (found == text && !again) {
      {
        const std::lock_guard<std::mutex> lock(group.mutex);
        group.first.insert(number);
      }
      forget_older_claims(group);
    }
  });
  return first;
}

std::optional<Report> PeerStore::claimed(const GroupHistory& group, int64_t number) {
  return found(claim_key(group, number));
}

int64_t PeerStore::claims(const GroupHistory& group, int64_t number) {
  int64_t n = 0;
  ask([&] { n = store_->add(claim_key(group, number) + "/count", 0); });
  return n;
}

MarkComparison PeerStore::compare_with_next(GroupHistory& group) {
  publish();
  const auto other = found(rank_key(group.next()));
  const auto* there = other ? other->progress(group.name) : nullptr;
  const std::lock_guard<std::mutex> lock(group.mutex);
  const auto number = there ? there->mark.number : 0;
  const auto& mine = group.marks[number / kMark % kMarks];
  return there && mine.number == number ? compare(mine, there->mark) : MarkComparison{}; // not here yet, or forgotten
}

std::string PeerStore::in_vain(const Report& mine, c10::IntArrayRef needed, std::chrono::milliseconds grace) {
  read_news();
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& other : news_) {
    auto outcome = verdict(mine, needed, other, own_, Clock::now(), grace);
    if (outcome == Verdict::ComesIfBack) {
      const auto now = found(rank_key(other.rank));
      outcome = now && is_back(other, *now, mine.group) ? Verdict::MayCome : Verdict::InVain;
    }
    if (outcome == Verdict::InVain) {
      return other.str();
    }
  }
  return "";
}

std::deque<Report> PeerStore::news() {
  read_news();
  const std::lock_guard<std::mutex> lock(mutex_);
  return news_;
}

void PeerStore::note_thread() {
  static thread_local const char here = 0;
  const void* known = nullptr;
  if (C10_UNLIKELY(thread_.load(std::memory_order_relaxed) != &here) && !thread_.compare_exchange_strong(known, &here)) {
    many_threads_ = true;
  }
}

std::string PeerStore::waits_for_me(const GroupHistory& group, const Report& mine, int64_t nth_look) {
  constexpr int64_t kAtOnce = 4;
  const auto n = static_cast<int64_t>(group.ranks.size());
  std::string why;
  for (int64_t i = 0; i < std::min(kAtOnce, n - 1) && why.empty(); ++i) {
    const auto rank = group.ranks[(group.me + 1 + (nth_look * kAtOnce + i) % (n - 1)) % n];
    if (const auto other = found(rank_key(rank))) {
      why = desync::wait_for_each_other(mine, *other, begun(*other));
    }
  }
  return why;
}

// How many collectives of other.group, or barriers there, this rank has begun. None: it is not in the group.
std::optional<int64_t> PeerStore::begun(const Report& other) {
  try {
    c10d::resolve_process_group(other.group);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  if (other.state == Report::ReportState::InBarrier) {
    const std::lock_guard<std::mutex> lock(g_barriers_mutex);
    return all_barriers()[other.group];
  }
  for (const auto& group : groups()) {
    if (group->name == other.group) {
      const std::lock_guard<std::mutex> lock(group->mutex);
      return group->number;
    }
  }
  return 0;
}

std::string PeerStore::key(int64_t nth) const {
  return c10::str(prefix_, nth);
}
std::string PeerStore::rank_key(int64_t rank) const {
  return c10::str(prefix_, "rank/", rank);
}
std::string PeerStore::claim_key(const GroupHistory& group, int64_t number) const {
  return c10::str(prefix_, group.name, "/", number);
}

// By their numbers: this rank may have just been the first to claim an old one, while others still look at a newer claim.
void PeerStore::forget_older_claims(GroupHistory& group) {
  std::vector<int64_t> old;
  {
    const std::lock_guard<std::mutex> lock(group.mutex);
    auto& first = group.first;
    const auto kept = first.upper_bound(*first.rbegin() - kKept);
    old.assign(first.begin(), kept);
    first.erase(first.begin(), kept);
  }
  for (const auto n : old) {
    store_->deleteKey(claim_key(group, n));
    store_->deleteKey(claim_key(group, n) + "/count");
  }
}

void PeerStore::read_news() {
  const auto all = groups();
  ask([&] {
    const auto n = store_->add(prefix_ + "count", 0);
    const std::lock_guard<std::mutex> lock(mutex_);
    next_ = std::max(next_, n - kTold);
    for (std::optional<Report> other; next_ < n && (other = found(key(next_))); ++next_) {
      if (other->state == Report::ReportState::Running) {
        continue; // it is forgotten
      }
      for (const auto& group : all) {
        if (other->rank != rank_ && contains(group->ranks, other->rank)) {
          const auto* there = other->progress(group->name);
          const std::lock_guard<std::mutex> lock_group(group->mutex);
          group->wanted.insert(there ? there->number + 1 : 1);
        }
      }
      other->since = Clock::now();
      push(news_, std::move(*other), kTold);
    }
  });
  answer();
}

// A rank that has failed makes its next collective in a group when all others have claimed it. This rank may have begun that one
// without waiting for it, so it answers whenever it looks.
void PeerStore::answer() {
  for (const auto& group : groups()) {
    std::vector<int64_t> begun;
    {
      const std::lock_guard<std::mutex> lock(group->mutex);
      const auto later = group->wanted.upper_bound(group->number);
      std::copy_if(group->wanted.upper_bound(group->number - kKept), later, std::back_inserter(begun), [&](int64_t n) {
        return !contains(group->skipped, n);
      });
      group->wanted.erase(group->wanted.begin(), later);
    }
    for (const auto n : begun) {
      claim(*group, in_collective(*group, n, "a collective that it has begun"));
    }
  }
}

} // namespace shardtensor::comm::desync
