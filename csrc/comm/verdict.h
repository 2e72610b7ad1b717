// What the ranks of a job tell each other, and what a rank concludes from it. Data and pure functions: no store, no clock, no
// threads. tests/comm/test_verdict.py lists cases.
#pragma once

#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace shardtensor::comm::desync {

using Clock = std::chrono::steady_clock;

template <typename List>
bool contains(const List& list, int64_t value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

// What a rank has begun in a group, up to some collective.
struct Mark {
  int64_t number = 0;        // of the collective
  uint64_t history = 0;      // a hash of the facts of all collectives so far
  uint64_t equal_pieces = 0; // the mesh's (layout/mesh.h)
};

// How far a rank is in a group's collectives.
struct GroupProgress {
  int64_t number = 0;           // collectives begun
  bool broken = false;          // the rank no longer communicates in the group
  std::vector<int64_t> skipped; // collectives that the rank has left out
  std::vector<int64_t> back;    // failures (Report::nth) of a thread that is absent, while another goes on in the group
  Mark mark = {};               // the last
};

// What a rank tells of itself. One that waits for what needs all ranks cannot go on until each of the others has begun it, so
// what it has told stays true until then.
struct Report {
  enum class ReportState : uint8_t { Running, Failed, Ended, InCollective, InBarrier }; // Ended: it begins nothing any more
  ReportState state = ReportState::Running;
  int64_t rank = 0;
  std::string text, error = {}; // what it does, or has done at its end
  // What it waits for: `number` in the group (empty: messages). Barriers of torch.distributed are counted by themselves.
  std::string group = {};
  int64_t number = 0;
  uint64_t facts = 0, drawn = 0;    // a hash of what all ranks know of that collective; of the draws before
  int64_t nth = -1;                 // of all failures: this one. Of a rank that has not: the last that it has told
  std::vector<int64_t> absent = {}; // its failures from which their threads have not come back
  std::map<std::string, GroupProgress> groups = {}; // by name
  Clock::time_point since = {};                     // not told: when this rank has heard of it, or has begun to wait

  bool ended() const {
    return state == ReportState::Ended;
  }
  const GroupProgress* progress(const std::string& name) const;
  std::string str() const; // of one that has failed or ended
};

// As text, for the store. The texts for people are made short, and lose the characters that separate fields.
std::string write_report(const Report& report);
Report read_report(const std::string& text);
std::string one_line(std::string text);

// `mine`: a collective of this rank. `first`: the report of the rank that came to that number first. Why the two cannot meet;
// empty if they can. All functions below that return a reason do so.
std::string differ(const Report& mine, const Report& first);

// `mine` and `other` wait. The reason, if neither can go on because each waits for the other. `begun`: how many collectives (or
// barriers, if that is what `other` waits for) this rank has begun in other.group; none if it is not in that group.
std::string wait_for_each_other(const Report& mine, const Report& other, std::optional<int64_t> begun);

// Whether `mine`, a wait for something that `needed` ranks have to begin, is in vain because the rank of `other`, which has
// failed or ended, will not begin it. `own`: the failures of this rank. A rank that has failed alike comes to the same
// collective. `grace`: how long another may take to come back.
enum class Verdict : uint8_t { MayCome, ComesIfBack, InVain };
Verdict verdict(
    const Report& mine,
    c10::IntArrayRef needed,
    const Report& other,
    const std::deque<Report>& own,
    Clock::time_point now,
    std::chrono::milliseconds grace);
// Whether a rank goes on in the group after its failure. `now`: what it told last.
bool is_back(const Report& failure, const Report& now, const std::string& group);

// What the marks of two ranks for one collective show.
struct MarkComparison {
  bool collectives_differ = false; // the two have begun others
  bool pieces_differ = false;      // they have taken pieces of different sizes for equal
};
MarkComparison compare(const Mark& mine, const Mark& theirs);

// Those of `ranks`, but for this one, of which `news` has nothing since then. One that has ended is not silent.
std::vector<int64_t> silent(int64_t me, c10::IntArrayRef ranks, const std::deque<Report>& news, Clock::time_point since);
// The first that has ended.
const Report* first_ended(c10::IntArrayRef ranks, const std::deque<Report>& news);

} // namespace shardtensor::comm::desync
