// What the ranks of a job tell each other through the store of the default process group: who has failed, and which collective a
// rank that waits long has begun. Used by faults.cpp alone.
#pragma once

#include <c10/util/ArrayRef.h>
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
#include <string>
#include <vector>

namespace shardtensor::comm::faults {

using Clock = std::chrono::steady_clock;

constexpr size_t kKept = 64; // collectives of a group that a rank remembers

// How far a rank was in a group's collectives when it failed.
struct Count {
  int64_t number = 0;
  bool broken = false;          // it takes no part any more
  std::vector<int64_t> skipped; // it has left these out
};

// One rank's failure.
struct Failure {
  int64_t rank = 0;
  std::string doing, error;
  std::map<std::string, Count> groups; // by name
  Clock::time_point seen;
  int64_t nth = 0; // of all failures

  const Count* count(const std::string& group) const;
  std::string str() const;
};

// The collectives of one process group. `mutex` guards what follows it.
struct Group {
  std::string name;
  std::vector<int64_t> ranks;      // global, all of the group's
  std::atomic<int64_t> checked{0}; // this rank's failures before the last collective on which all have agreed
  std::mutex mutex;
  int64_t number = 0;     // collectives begun
  Clock::time_point last; // when the last one began
  std::array<uint64_t, kKept> facts{};
  std::deque<int64_t> skipped;        // left out
  std::deque<int64_t> claimed, first; // numbers that this rank has claimed, and of them those that it was the first to claim
  std::string broken;                 // says why; empty if it is whole
};

// A collective that all others make is left out here.
void skip(Group& group);
// Of the last kKept collectives; none for one that was left out.
std::optional<uint64_t> facts_of(Group& group, int64_t number);

// The first rank that claimed a number for its collective.
struct Claim {
  uint64_t facts;
  int64_t rank;
  std::string text;
};

// The store, as one rank uses it. A store that cannot be reached has no news.
class World {
 public:
  World(c10d::ProcessGroup& group, int64_t rank);

  int64_t rank() const {
    return rank_;
  }
  bool has_store() const {
    return store_ != nullptr;
  }
  // How often this rank has failed.
  int64_t failures() const {
    return failures_.load(std::memory_order_relaxed);
  }
  void add(const std::shared_ptr<Group>& group);
  std::vector<std::shared_ptr<Group>> groups();

  // This rank has failed.
  void tell(const std::string& doing, const std::string& error);
  // It goes on with communication.
  void come_back();

  // Claims a number of the group for a collective. `text` describes it.
  Claim claim(Group& group, int64_t number, uint64_t facts, const std::string& text);
  // Another rank's claim of it, if there is one.
  std::optional<Claim> claimed(const Group& group, int64_t number);
  // How many ranks have claimed it.
  int64_t claims(const Group& group, int64_t number);

  // Why a wait that began at `since` is in vain: for collective `number` of the group, or, without a group, for messages of
  // `ranks`. `grace`: how long a rank that has failed may take to come back.
  std::optional<Failure> in_vain(
      const Group* group, c10::IntArrayRef ranks, int64_t number, Clock::time_point since, std::chrono::milliseconds grace);
  // Those of `ranks` from which there is no news.
  std::vector<int64_t> silent(c10::IntArrayRef ranks);

 private:
  std::string key(int64_t nth) const;
  std::string claim_key(const Group& group, int64_t number) const;
  void forget_older_claims(Group& group);
  void read_news();
  bool failed_alike(const Failure& f, const Group* group) const;
  bool is_back(int64_t nth);

  const int64_t rank_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::string prefix_;
  std::atomic<int64_t> failures_{0};
  std::mutex mutex_; // of what follows
  std::map<std::string, std::weak_ptr<Group>> groups_;
  std::deque<Failure> news_, own_;
  int64_t next_ = 0;            // the failure to read next
  std::vector<int64_t> absent_; // this rank's failures since it last communicated
};

// For people: short, and without the signs that part a record.
std::string one_line(std::string text);

} // namespace shardtensor::comm::faults
