// Through the store of the default process group the ranks of a job tell each other what they do (verdict.h). All is under a few
// keys, after a prefix for each time that a default group was made:
//   count, N              how many failures and ends the ranks have told of, and the Nth; empty once it is forgotten
//   rank/R                what rank R has told last: how far it is, and what it waits for
//   GROUP/N, GROUP/N/count  who has claimed the collective N of the group first, and how many have
#pragma once

#include "comm/verdict.h"

#include <unistd.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

namespace shardtensor::comm::desync {

class PeerStore;

constexpr int64_t kKept = 64;               // collectives of a group that a rank remembers; claims of older ones leave the store
constexpr int64_t kMark = 8, kMarks = 1024; // every 8th one has a mark, and a rank keeps that many

// The collectives of one process group. `mutex` guards the members below it.
struct GroupHistory {
  std::shared_ptr<PeerStore> world;
  std::string name;
  std::vector<int64_t> ranks;      // global, all of the group's
  int64_t me = 0;                  // this rank's place among them
  std::atomic<int64_t> checked{0}; // this rank's failures before the last collective on which all have agreed
  std::atomic<bool> warned{false}; // of unequal pieces
  std::mutex mutex;
  int64_t number = 0;     // collectives begun
  Clock::time_point last; // when the last one began
  std::array<uint64_t, kKept> facts{}, drawn_before{};
  uint64_t history = 0;             // a hash of the facts of all collectives begun
  std::array<Mark, kMarks> marks{}; // at each number that is a multiple of kMark
  Clock::time_point marked;         // when this rank last told others of a mark
  uint64_t drawn = 0;               // the sum of the keys of all random ops so far
  std::deque<int64_t> skipped;      // left out
  std::set<int64_t> claimed, first; // numbers that this rank has claimed, and of them those that it was the first to claim
  std::set<int64_t> wanted;         // numbers that ranks which have failed wait for, and that this rank has not begun
  std::string broken;               // why the group no longer works; empty if it does

  // The rank with whose marks this rank compares its own.
  int64_t next() const {
    return ranks[(me + 1) % ranks.size()];
  }
  // The next collective. With the mutex held.
  int64_t begin(uint64_t facts, uint64_t equal_pieces = 0);
};

// This rank leaves out a collective that all others make.
void skip(GroupHistory& group);
// What this rank tells while it waits for one of the last kKept collectives. `text` describes it.
Report in_collective(GroupHistory& group, int64_t number, std::string text);

// The store, as one rank uses it. A store that cannot be reached has no news.
class PeerStore {
 public:
  PeerStore(c10d::ProcessGroup& group, int64_t rank);

  int64_t rank() const {
    return rank_;
  }
  // Not in a process that was forked off the rank.
  bool has_store() const {
    return store_ && process_ == getpid();
  }
  // How often this rank has failed.
  int64_t failures() const {
    return failures_.load(std::memory_order_relaxed);
  }
  void add(const std::shared_ptr<GroupHistory>& group);
  std::vector<std::shared_ptr<GroupHistory>> groups();

  // This rank has failed, or ends.
  void tell(const std::string& doing, const std::string& error, bool ended = false);
  // This thread communicates again, in a group (by name; "": by messages). That resolves its own failures in every group, and
  // failures of other threads of this process, which may never go on, in this group.
  void come_back(const std::string& group);

  // Claims the collective `mine` of the group. The first claim of its number.
  Report claim(GroupHistory& group, const Report& mine);
  // Another rank's claim of it, if there is one.
  std::optional<Report> claimed(const GroupHistory& group, int64_t number);
  // How many ranks have claimed it.
  int64_t claims(const GroupHistory& group, int64_t number);

  // Tells of this rank's last mark, and compares the last that the next rank in the group has told of with this rank's.
  MarkComparison compare_with_next(GroupHistory& group);

  // Why `mine`, a wait for what `needed` ranks have to begin, is in vain, as far as other ranks have failed or ended. See
  // verdict().
  std::string in_vain(const Report& mine, c10::IntArrayRef needed, std::chrono::milliseconds grace);
  // All failures and ends that this rank knows of.
  std::deque<Report> news();

  // A thread begins something that needs other ranks. As long as only one thread does, this rank waits for one thing at a time.
  void note_thread();
  bool one_thread() const {
    return !many_threads_.load(std::memory_order_relaxed);
  }
  // Tells that this rank waits for `mine`; {}: for nothing.
  void set_wait(Report mine);
  // This rank waits for `mine`, a collective that needs all of the group's ranks. Whether one of them waits for this rank in
  // something else, which this rank has not begun. `nth_look`: asks a few ranks at a time.
  std::string waits_for_me(const GroupHistory& group, const Report& mine, int64_t nth_look);

 private:
  std::optional<Report> found(const std::string& key);
  std::string key(int64_t nth) const;
  std::string rank_key(int64_t rank) const;
  std::string claim_key(const GroupHistory& group, int64_t number) const;
  void forget_older_claims(GroupHistory& group);
  void read_news();
  void answer();
  void add_progress(Report& mine);
  void publish();
  std::optional<int64_t> begun(const Report& other);

  const int64_t rank_;
  const pid_t process_ = getpid();
  c10::intrusive_ptr<c10d::Store> store_;
  std::string prefix_;
  std::atomic<int64_t> failures_{0};
  std::atomic<const void*> thread_{nullptr};
  std::atomic<bool> many_threads_{false};
  std::mutex publishing_; // so that an older report does not replace a newer one
  std::mutex mutex_;      // guards the members below
  std::map<std::string, std::weak_ptr<GroupHistory>> groups_;
  std::deque<Report> news_, own_;
  Report wait_;      // what this rank waits for, as it has told
  int64_t next_ = 0; // the failure to read next
  // This rank's failures from which their threads have not come back.
  struct UnresolvedFailure {
    int64_t nth;
    std::thread::id thread;
    std::set<std::string> back; // groups in which another thread goes on
  };
  std::deque<UnresolvedFailure> absent_;
};

// Barriers of torch.distributed that this process has begun. begin_barrier(): another one in the group; its number there.
int64_t begin_barrier(const std::string& group);
void forget_barriers();

} // namespace shardtensor::comm::desync
