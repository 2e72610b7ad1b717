// Detects ranks that fall out of step: one fails while the others wait for it, or two make different collectives. Ranks tell
// each other through the store of the default process group, so that all raise soon and no collective receives another one's
// data.
//
// Each rank counts its collectives along a mesh dim. Little is sent until a rank fails or waits long:
// - A rank that fails writes so, with its counts.
// - A rank that waits long claims its collective's number for the collective that it makes, and reads who has failed.
// - A rank that comes to a collective after a pause looks whether another has claimed the number for a different one.
// - Once a second a rank tells the others what its collectives have been so far, as a hash, and which pieces from_local took to
//   be equal; it compares both with the next rank's.
// - A rank that waits long in something that needs all ranks writes so. A rank that waits for it raises if each of the two
//   waits for the other. A rank also raises if a rank that it needs has ended.
// - A rank that has failed before makes its next collective only after all others have claimed that number for the same one. So
//   an error that all ranks raise alike costs a few requests to the store; an error of one rank alone makes the others wait.
#pragma once

#include "comm/group_generation.h"
#include "layout/mesh.h"

#include <c10/util/FunctionRef.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <memory>
#include <string>

namespace shardtensor::comm::desync {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using TextFn = c10::function_ref<std::string()>;

class PeerStore;
struct GroupHistory;

// What a rank waits for: the collective with a number in its group, or messages from peers.
struct Ticket {
  std::shared_ptr<PeerStore> world;    // null: nothing is watched
  std::shared_ptr<GroupHistory> group; // null: messages
  int64_t number = 0;
  std::vector<int64_t> peers; // global ranks
  bool by_messages = false;   // its works are messages between two ranks
  bool needs_all = false;     // no rank gets a result before all have begun
};

// Before a collective of all ranks along the mesh dim (-1: of all ranks of the default group). `facts`: a hash of what all of
// them know about it. Raises if the group has broken, or if the ranks turn out to make different collectives.
Ticket enter(const GroupPtr& group, const Mesh& mesh, int64_t mesh_dim, uint64_t facts, bool needs_all, TextFn text);
// While one is alive, this thread's collectives begin only after all ranks of the group have come to the same one, as if this
// rank had failed before. For communication that the user did not ask for and that one rank may begin alone: that rank raises,
// the ranks that are in another collective raise too, and no data is exchanged.
class ConfirmedStartGuard {
 public:
  ConfirmedStartGuard();
  ~ConfirmedStartGuard();
  ConfirmedStartGuard(const ConfirmedStartGuard&) = delete;
  ConfirmedStartGuard& operator=(const ConfirmedStartGuard&) = delete;
};
// Raises: the ranks along the mesh dim turn out to have made different collectives, so the process group can no longer be used.
[[noreturn]] void parted(const Mesh& mesh, int64_t mesh_dim, const std::string& why);
// Before messages between this rank and `peers` (global ranks).
Ticket enter_messages(const Mesh& mesh, c10::IntArrayRef peers);

// Waits. Raises if other ranks have failed or make another collective, so that it would wait in vain.
void wait(c10d::Work& work, const Ticket& ticket, TextFn text);
// The same for a result that was dropped: it never raises, and tells no other rank.
void wait_for_dropped(c10d::Work& work, const Ticket& ticket);
// After the backend itself has raised in wait(): tells the other ranks, and returns the ranks that have not answered, as text
// (maybe empty).
std::string broke(const Ticket& ticket, const std::string& error);

// This rank fails in something that may have many collectives, a backward for example, of which it may have made any number.
// (error_context.h has tell_failure() for a single call.)
void failed_in_part(const std::string& doing, const std::string& error);
// Notes the key of a random op of all ranks of the mesh. Ranks that read each other's claims warn if their keys differ.
void note_draw(const Mesh& mesh, uint64_t key);
// The sum of those keys, modulo 2^64: the same for all ranks along the mesh dim.
uint64_t drawn(const Mesh& mesh, int64_t mesh_dim);

// This rank communicates no more, because it has `done` (text). After it has destroyed its process groups, it may make others.
void ended(const std::string& done);
void destroyed_groups();

// This thread is in a barrier of torch.distributed.
class BarrierGuard {
 public:
  explicit BarrierGuard(const std::string& group);
  ~BarrierGuard();
  void leave(); // before its end
  BarrierGuard(const BarrierGuard&) = delete;
  BarrierGuard& operator=(const BarrierGuard&) = delete;

 private:
  std::function<void()> leave_;
};

// For the process. `grace`: how many seconds a rank that has failed may take to come to its next collective. `between`: seconds
// between two comparisons with the next rank.
void set_notice(bool on);
bool notice();
void set_grace(double seconds);
void set_between(double seconds);

} // namespace shardtensor::comm::desync
