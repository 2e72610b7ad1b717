#include "comm/peer_store.h"

#include <c10/util/StringUtil.h>
#include <c10/util/hash.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <sstream>

namespace shardtensor::comm::desync {

namespace {

constexpr int64_t kTold = 256; // failures that a rank remembers; older ones do not matter
constexpr char kPart = '\x1f', kItem = '\x1e';
const std::string kNothing(1, kPart); // no record begins so

template <typename List, typename T>
bool contains(const List& list, const T& value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

template <typename T>
void push(std::deque<T>& list, T value, int64_t most) {
  list.push_back(std::move(value));
  if (static_cast<int64_t>(list.size()) > most) {
    list.pop_front();
  }
}

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> out;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, at);) {
    out.push_back(part);
  }
  return out;
}

std::string written(const Report& r) {
  std::ostringstream out;
  out << static_cast<int>(r.state) << kPart << r.rank << kPart << r.text << kPart << r.error << kPart << r.group << kPart
      << r.number << kPart;
  for (const auto& [name, count] : r.groups) {
    out << name << kItem << count.number << kItem << count.broken;
    for (const auto n : count.skipped) {
      out << kItem << n;
    }
    out << kPart;
  }
  return out.str();
}

Report read(const std::string& text, int64_t nth) {
  const auto parts = split(text, kPart);
  Report out{
      static_cast<Report::ReportState>(std::stoi(parts.at(0))), std::stoll(parts.at(1)), parts.at(2), parts.at(3), parts.at(4)};
  out.number = std::stoll(parts.at(5));
  for (size_t i = 6; i < parts.size(); ++i) {
    const auto items = split(parts[i], kItem);
    GroupProgress count{std::stoll(items.at(1)), items.at(2) == "1", {}};
    for (size_t k = 3; k < items.size(); ++k) {
      count.skipped.push_back(std::stoll(items[k]));
    }
    out.groups.emplace(items.at(0), std::move(count));
  }
  out.seen = Clock::now();
  out.nth = nth;
  return out;
}

Claim read_claim(const std::string& text) {
  const auto parts = split(text, kPart);
  return {std::stoull(parts.at(0)), std::stoull(parts.at(1)), std::stoll(parts.at(2)), parts.at(3)};
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

int64_t barriers(const std::string& group) {
  const std::lock_guard<std::mutex> lock(g_barriers_mutex);
  const auto it = all_barriers().find(group);
  return it == all_barriers().end() ? 0 : it->second;
}
int64_t begin_barrier(const std::string& group) {
  const std::lock_guard<std::mutex> lock(g_barriers_mutex);
  return ++all_barriers()[group];
}
void forget_barriers() {
  const std::lock_guard<std::mutex> lock(g_barriers_mutex);
  all_barriers().clear();
}

const GroupProgress* Report::count(const std::string& name) const {
  const auto it = groups.find(name);
  return it == groups.end() ? nullptr : &it->second;
}

std::string Report::str() const {
  return c10::str("rank ", rank, ended() ? " has " : " failed in ", text, error.empty() ? "" : ": ", error);
}

std::string one_line(std::string text) {
  if (const auto trace = text.find("\nException raised from"); trace != std::string::npos) {
    text.resize(trace);
  }
  for (auto& c : text) {
    c = c == kPart || c == kItem || c == '\n' ? ' ' : c;
  }
  constexpr size_t kMost = 1000;
  if (text.size() > kMost) {
    text.resize(kMost);
    text += "...";
  }
  return text;
}

int64_t GroupHistory::begin(uint64_t what, uint64_t equal_pieces) {
  facts[++number % kKept] = what;
  drawn_before[number % kKept] = drawn;
  history = c10::hash_combine(history, what);
  if (number % kMark == 0) {
    marks[number / kMark % kMarks] = {history, equal_pieces};
  }
  return number;
}

void skip(GroupHistory& group) {
  const std::lock_guard<std::mutex> lock(group.mutex);
  push(group.skipped, group.begin(0), kKept);
}

std::optional<uint64_t> facts_of(GroupHistory& group, int64_t number) {
  const std::lock_guard<std::mutex> lock(group.mutex);
  return contains(group.skipped, number) ? std::nullopt : std::optional(group.facts[number % kKept]);
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
std::optional<std::string> PeerStore::found(const std::string& key) {
  auto value = store_->compareSet(key, kNothing, kNothing);
  return value == kNothing ? std::nullopt : std::optional(std::move(value));
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

Report PeerStore::report(Report::ReportState state, const std::string& text) {
  Report out{state, rank_, one_line(text)};
  for (const auto& group : groups()) {
    const std::lock_guard<std::mutex> lock(group->mutex);
    out.groups[group->name] = {group->number, !group->broken.empty(), {group->skipped.begin(), group->skipped.end()}};
  }
  return out;
}

void PeerStore::tell(const std::string& doing, const std::string& error, bool ended) {
  if (ended) {
    read_news(); // other ranks may wait for this rank's answer
  }
  auto mine = report(ended ? Report::ReportState::Ended : Report::ReportState::Failed, doing);
  mine.error = one_line(error);
  failures_.fetch_add(1);
  ask([&] {
    mine.nth = store_->add(prefix_ + "count", 1) - 1;
    store_->set(key(mine.nth), written(mine));
    const std::lock_guard<std::mutex> lock(mutex_);
    push(absent_, UnresolvedFailure{mine.nth, std::this_thread::get_id(), {}}, kTold);
    own_.push_back(std::move(mine));
    if (static_cast<int64_t>(own_.size()) > kTold) {
      store_->set(key(own_.front().nth), std::string()); // other ranks may still read the key
      store_->deleteKey(back_key(own_.front().nth));
      for (const auto& [name, count] : own_.front().groups) {
        store_->deleteKey(back_key(own_.front().nth, name));
      }
      own_.pop_front();
    }
  });
}

void PeerStore::come_back(const std::string& group) {
  std::vector<std::string> keys;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto me = std::this_thread::get_id();
    for (auto& absent : absent_) {
      if (absent.thread == me) {
        keys.push_back(back_key(absent.nth));
      } else if (absent.back.insert(group).second) {
        keys.push_back(back_key(absent.nth, group));
      }
    }
    absent_.erase(
        std::remove_if(absent_.begin(), absent_.end(), [&](const UnresolvedFailure& a) { return a.thread == me; }),
        absent_.end());
  }
  for (const auto& k : keys) {
    ask([&] { store_->set(k, "1"); });
  }
}

Claim PeerStore::claim(GroupHistory& group, int64_t number, uint64_t facts, const std::string& text) {
  bool again = false;
  uint64_t drawn = 0;
  {
    const std::lock_guard<std::mutex> lock(group.mutex);
    drawn = group.drawn_before[number % kKept];
    again = !group.claimed.insert(number).second;
    group.claimed.erase(group.claimed.begin(), group.claimed.upper_bound(*group.claimed.rbegin() - 2 * kKept));
  }
  const auto mine = c10::str(facts, kPart, drawn, kPart, rank_, kPart, one_line(text));
  Claim first{facts, drawn, rank_, text};
  ask([&] {
    const auto found = store_->compareSet(claim_key(group, number), std::string(), mine);
    first = read_claim(found);
    if (!again) {
      store_->add(claim_key(group, number) + "/count", 1);
    }
    if (found == mine && !again) {
      {
        const std::lock_guard<std::mutex> lock(group.mutex);
        group.first.insert(number);
      }
      forget_older_claims(group);
    }
  });
  return first;
}

std::optional<Claim> PeerStore::claimed(const GroupHistory& group, int64_t number) {
  std::optional<Claim> out;
  ask([&] {
    if (const auto claim = found(claim_key(group, number))) {
      out = read_claim(*claim);
    }
  });
  return out;
}

int64_t PeerStore::claims(const GroupHistory& group, int64_t number) {
  int64_t n = 0;
  ask([&] { n = store_->add(claim_key(group, number) + "/count", 0); });
  return n;
}

PeerStore::Comparison PeerStore::compare_with_next(GroupHistory& group) {
  const auto at = [&](int64_t number) { return group.marks[number / kMark % kMarks]; };
  const auto key_of = [&](int64_t rank) { return c10::str(prefix_, group.name, "/mark/", rank); };
  Comparison out{group.ranks[(group.me + 1) % group.ranks.size()]};
  std::vector<std::string> theirs;
  ask([&] {
    std::string mine;
    {
      const std::lock_guard<std::mutex> lock(group.mutex);
      const auto number = group.number / kMark * kMark;
      mine = c10::str(number, kPart, at(number).history, kPart, at(number).equal_pieces);
    }
    store_->set(key_of(rank_), mine);
    if (const auto mark = found(key_of(out.next))) {
      theirs = split(*mark, kPart);
    }
  });
  if (theirs.size() != 3) {
    return out;
  }
  const auto number = std::stoll(theirs[0]);
  const std::lock_guard<std::mutex> lock(group.mutex);
  if (number > group.number || number <= group.number - kMark * (kMarks - 1)) {
    return out; // not here yet, or forgotten
  }
  const auto history = std::stoull(theirs[1]), pieces = std::stoull(theirs[2]);
  const auto mine = at(number);
  out.collectives_differ = mine.history != history;
  out.pieces_differ = mine.equal_pieces != pieces && ((mine.equal_pieces ^ pieces) & 0xffff) == 0; // as many
  return out;
}

std::optional<Report> PeerStore::in_vain(
    const GroupHistory* group, c10::IntArrayRef ranks, int64_t number, Clock::time_point since, std::chrono::milliseconds grace) {
  read_news();
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& f : news_) {
    if (f.rank == rank_ || !contains(ranks, f.rank) || (f.ended() && !group)) { // it may have sent its message before
      continue;
    }
    const auto* count = group ? f.count(group->name) : nullptr;
    if (count && (count->broken || contains(count->skipped, number))) {
      return f;
    }
    const bool has_begun = count && count->number >= number;
    if (has_begun) {
      continue;
    }
    if (f.ended() || (!failed_alike(f, group) && Clock::now() - std::max(f.seen, since) >= grace &&
                      !is_back(f.nth, group ? group->name : ""))) {
      return f;
    }
  }
  return std::nullopt;
}

std::vector<int64_t> PeerStore::silent(c10::IntArrayRef ranks, Clock::time_point since) {
  read_news();
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<int64_t> out;
  for (const auto r : ranks) {
    const auto gives_a_sign = [&](const Report& f) { return f.rank == r && (f.ended() || f.seen >= since); };
    if (r != rank_ && std::none_of(news_.begin(), news_.end(), gives_a_sign)) {
      out.push_back(r);
    }
  }
  return out;
}

std::optional<Report> PeerStore::ended(c10::IntArrayRef ranks) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto it = std::find_if(news_.begin(), news_.end(), [&](const Report& f) { return f.ended() && contains(ranks, f.rank); });
  return it == news_.end() ? std::nullopt : std::optional(*it);
}

void PeerStore::note_thread() {
  static thread_local const char here = 0;
  const void* known = nullptr;
  if (C10_UNLIKELY(thread_.load(std::memory_order_relaxed) != &here) && !thread_.compare_exchange_strong(known, &here)) {
    many_threads_ = true;
  }
}

void PeerStore::tell_stuck(Report::ReportState in, const std::string& group, int64_t number, const std::string& text) {
  auto mine = report(in, text);
  mine.group = group;
  mine.number = number;
  ask([&] { store_->set(stuck_key(rank_), written(mine)); });
}

void PeerStore::not_stuck() {
  ask([&] { store_->deleteKey(stuck_key(rank_)); });
}

std::optional<Report> PeerStore::waits_for_me(const GroupHistory& group, int64_t number, int64_t nth_look) {
  constexpr int64_t kAtOnce = 4;
  const auto n = static_cast<int64_t>(group.ranks.size());
  std::optional<Report> out;
  for (int64_t i = 0; i < std::min(kAtOnce, n - 1) && !out; ++i) {
    const auto rank = group.ranks[(group.me + 1 + (nth_look * kAtOnce + i) % (n - 1)) % n];
    ask([&] {
      if (const auto told = found(stuck_key(rank))) {
        auto other = read(*told, 0);
        const auto* begun = other.count(group.name);
        if ((!begun || begun->number < number) && !has_begun(other)) {
          out = std::move(other);
        }
      }
    });
  }
  return out;
}

// Whether this rank has begun what the other waits for, or takes no part in it.
bool PeerStore::has_begun(const Report& other) {
  try {
    c10d::resolve_process_group(other.group);
  } catch (const std::exception&) {
    return true; // this rank is not in the group
  }
  if (other.state == Report::ReportState::InBarrier) {
    return barriers(other.group) >= other.number;
  }
  for (const auto& group : groups()) {
    if (group->name == other.group) {
      const std::lock_guard<std::mutex> lock(group->mutex);
      return group->number >= other.number;
    }
  }
  return false;
}

std::string PeerStore::key(int64_t nth) const {
  return c10::str(prefix_, nth);
}
std::string PeerStore::back_key(int64_t nth) const {
  return key(nth) + "/back";
}
std::string PeerStore::back_key(int64_t nth, const std::string& group) const {
  return c10::str(key(nth), "/back in ", group);
}
std::string PeerStore::stuck_key(int64_t rank) const {
  return c10::str(prefix_, "stuck/", rank);
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
  std::vector<Report> fresh;
  ask([&] {
    const auto n = store_->add(prefix_ + "count", 0);
    const std::lock_guard<std::mutex> lock(mutex_);
    next_ = std::max(next_, n - kTold);
    for (std::optional<std::string> text; next_ < n && (text = found(key(next_))); ++next_) {
      if (!text->empty()) {
        fresh.push_back(read(*text, next_));
        push(news_, fresh.back(), kTold);
      }
    }
  });
  for (const auto& f : fresh) {
    for (const auto& group : f.rank == rank_ ? std::vector<std::shared_ptr<GroupHistory>>() : groups()) {
      if (contains(group->ranks, f.rank)) {
        const auto* count = f.count(group->name);
        const std::lock_guard<std::mutex> lock(group->mutex);
        group->wanted.insert(count ? count->number + 1 : 1);
      }
    }
  }
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
      begun.assign(group->wanted.upper_bound(group->number - kKept), later);
      group->wanted.erase(group->wanted.begin(), later);
    }
    for (const auto n : begun) {
      if (const auto facts = facts_of(*group, n)) {
        claim(*group, n, *facts, "a collective that it has begun");
      }
    }
  }
}

// Whether this rank failed in the same op, at the same place among the group's collectives.
bool PeerStore::failed_alike(const Report& f, const GroupHistory* group) const {
  return group && std::any_of(own_.begin(), own_.end(), [&](const Report& mine) {
           const auto *a = mine.count(group->name), *b = f.count(group->name);
           return mine.text == f.text && (a ? a->number : 0) == (b ? b->number : 0);
         });
}

bool PeerStore::is_back(int64_t nth, const std::string& group) {
  bool back = false;
  ask([&] { back = store_->check({back_key(nth)}) || store_->check({back_key(nth, group)}); });
  return back;
}

} // namespace shardtensor::comm::desync
