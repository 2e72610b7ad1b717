// What the ranks of a job tell each other through the store of the default process group: which rank has failed, and which
// collective a rank that waits long has begun.
#pragma once

#include <c10/util/ArrayRef.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace shardtensor::comm::desync {

using Clock = std::chrono::steady_clock;

constexpr int64_t kKept = 64;               // collectives of a group that a rank remembers; claims of older ones leave the store
constexpr int64_t kMark = 8, kMarks = 1024; // every 8th one has a mark, and a rank keeps that many

// How far a rank is in a group's collectives.
struct GroupProgress {
  int64_t number = 0;
  bool broken = false;          // the rank no longer communicates in the group
  std::vector<int64_t> skipped; // collectives that the rank has left out
};

// What a rank tells of itself. One that waits for what needs all ranks cannot go on until each of the others has begun it, so
// what it has told stays true until then.
struct Report {
  enum class ReportState : uint8_t { Failed, Ended, InCollective, InBarrier }; // Ended: it begins nothing any more
  ReportState state = ReportState::Failed;
  int64_t rank = 0;
  std::string text, error; // what it does, or has done at its end
  // What it waits for: `number` in the group; barriers of torch.distributed are counted by themselves.
  std::string group = {};
  int64_t number = 0;
  std::map<std::string, GroupProgress> groups = {}; // by name
  // Set by the one who reads of a failure.
  Clock::time_point seen = {};
  int64_t nth = 0; // of all failures

  bool ended() const {
    return state == ReportState::Ended;
  }
  const GroupProgress* count(const std::string& name) const;
  std::string str() const;
};

// How far a rank was at a collective.
struct Mark {
  uint64_t history = 0;      // a hash of the facts of all collectives so far
  uint64_t equal_pieces = 0; // the mesh's (layout/mesh.h)
};

// The collectives of one process group. `mutex` guards the members below it.
struct GroupHistory {
  std::string name;
  std::vector<int64_t> ranks;      // global, all of the group's
  int64_t me = 0;                  // this rank's place among them
  std::atomic<int64_t> checked{0}; // this rank's failures before the last collective on which all have agreed
  std::mutex mutex;
  int64_t number = 0;     // collectives begun
  Clock::time_point last; // when the last one began
  std::array<uint64_t, kKept> facts{}, drawn_before{};
  uint64_t history = 0;             // a hash of the facts of all collectives begun
  std::array<Mark, kMarks> marks{}; // at each number that is a multiple of kMark
  Clock::time_point marked;         // when this rank last told others of a mark
  bool warned = false;              // of unequal pieces
  uint64_t drawn = 0;               // the sum of the keys of all random ops so far
  std::deque<int64_t> skipped;      // left out
  std::set<int64_t> claimed, first; // numbers that this rank has claimed, and of them those that it was the first to claim
  std::set<int64_t> wanted;         // numbers that ranks which have failed wait for, and that this rank has not begun
  std::string broken;               // why the group no longer works; empty if it does

  // The next collective. With the mutex held.
  int64_t begin(uint64_t facts, uint64_t equal_pieces = 0);
};

// This rank leaves out a collective that all others make.
void skip(GroupHistory& group);
// The facts of one of the last kKept collectives; none if this rank left it out.
std::optional<uint64_t> facts_of(GroupHistory& group, int64_t number);

// The first rank that claimed a number for its collective.
struct Claim {
  uint64_t facts, drawn;
  int64_t rank;
  std::string text;
};

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

  // Claims a number of the group for a collective. `text` describes it.
  Claim claim(GroupHistory& group, int64_t number, uint64_t facts, const std::string& text);
  // Another rank's claim of it, if there is one.
  std::optional<Claim> claimed(const GroupHistory& group, int64_t number);
  // How many ranks have claimed it.
  int64_t claims(const GroupHistory& group, int64_t number);

  // Tells of this rank's last mark, and compares the last that the next rank in the group has told of with this rank's.
  struct Comparison {
    int64_t next = 0;                // the next rank
    bool collectives_differ = false; // the two have begun others
    bool pieces_differ = false;      // they have taken pieces of different sizes for equal
  };
  Comparison compare_with_next(GroupHistory& group);

  // Why a wait that began at `since` is in vain: for collective `number` of the group, or, without a group, for messages of
  // `ranks`. `grace`: how long a rank that has failed may take to come back.
  std::optional<Report> in_vain(
      const GroupHistory* group,
      c10::IntArrayRef ranks,
      int64_t number,
      Clock::time_point since,
      std::chrono::milliseconds grace);
  // Those of `ranks` from which no news has come since then.
  std::vector<int64_t> silent(c10::IntArrayRef ranks, Clock::time_point since);
  // One of `ranks` that has ended.
  std::optional<Report> ended(c10::IntArrayRef ranks);

  // A thread begins something that needs other ranks. As long as only one thread does, this rank waits for one thing at a time.
  void note_thread();
  bool one_thread() const {
    return !many_threads_.load(std::memory_order_relaxed);
  }
  void tell_stuck(Report::ReportState in, const std::string& group, int64_t number, const std::string& text);
  void not_stuck();
  // This rank waits for collective `number` of the group, which needs all of its ranks. One of them that waits for this rank in
  // something else, which this rank has not begun. `nth_look`: of a few ranks at a time.
  std::optional<Report> waits_for_me(const GroupHistory& group, int64_t number, int64_t nth_look);

 private:
  std::optional<std::string> found(const std::string& key);
  std::string key(int64_t nth) const;
  std::string claim_key(const GroupHistory& group, int64_t number) const;
  void forget_older_claims(GroupHistory& group);
  void read_news();
  void answer();
  bool failed_alike(const Report& f, const GroupHistory* group) const;
  bool is_back(int64_t nth, const std::string& group);
  std::string back_key(int64_t nth) const;                           // in every group
  std::string back_key(int64_t nth, const std::string& group) const; // in one
  std::string stuck_key(int64_t rank) const;
  bool has_begun(const Report& other);
  Report report(Report::ReportState state, const std::string& text);

  const int64_t rank_;
  const pid_t process_ = getpid();
  c10::intrusive_ptr<c10d::Store> store_;
  std::string prefix_;
  std::atomic<int64_t> failures_{0};
  std::atomic<const void*> thread_{nullptr};
  std::atomic<bool> many_threads_{false};
  std::mutex mutex_; // guards the members below
  std::map<std::string, std::weak_ptr<GroupHistory>> groups_;
  std::deque<Report> news_, own_;
  int64_t next_ = 0; // the failure to read next
  // This rank's failures from which their threads have not come back.
  struct UnresolvedFailure {
    int64_t nth;
    std::thread::id thread;
    std::set<std::string> back; // groups in which another thread goes on
  };
  std::deque<UnresolvedFailure> absent_;
};

// Barriers of torch.distributed in a group that this process has begun.
int64_t barriers(const std::string& group);
void forget_barriers();

// The text for people: short, and without the characters that separate the fields of a record.
std::string one_line(std::string text);

} // namespace shardtensor::comm::desync
