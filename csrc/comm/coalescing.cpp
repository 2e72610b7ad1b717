#include "comm/coalescing.h"

#include "comm/collective_call.h"
#include "comm/gil.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <utility>

namespace shardtensor::comm {

namespace {

thread_local CoalescedCalls* t_open = nullptr;

bool alike(const Collective& a, const Collective& b) {
  return a.kind == b.kind && a.mesh == b.mesh && a.mesh_dim == b.mesh_dim && a.of_summands == b.of_summands &&
         a.callers == b.callers && (!a.reduces() || (a.op == b.op && a.out.scalar_type() == b.out.scalar_type()));
}

} // namespace

// One call that several collectives share. The first of them that waits does so for all; if the call fails, each of them raises
// the error.
struct CoalescedCalls::SharedCall {
  std::mutex mutex;
  InFlight rest;
  std::exception_ptr error;
  bool begun = false;

  // `used`: the tensor that the waiting collective gets.
  void wait(const at::Tensor& used) {
    const NoGilGuard released; // the thread that has the lock may need the GIL
    const std::lock_guard<std::mutex> lock(mutex);
    TORCH_INTERNAL_ASSERT(begun, "a collective is waited for before CoalescedCalls::go()");
    if (rest) {
      try {
        rest.wait_on_each_stream(used);
      } catch (...) {
        if (rest) { // a CUDA graph is being captured: the caller may wait again later
          throw;
        }
        error = std::current_exception();
      }
    }
    if (error) {
      std::rethrow_exception(error);
    }
  }
};

CoalescedCalls::CoalescedCalls() : outer_(std::exchange(t_open, this)) {}

CoalescedCalls::~CoalescedCalls() {
  close();
}

void CoalescedCalls::close() {
  if (t_open == this) {
    t_open = outer_;
  }
}

CoalescedCalls* CoalescedCalls::open() {
  return t_open;
}

InFlight CoalescedCalls::note(Collective c) {
  auto same = std::find_if(noted_.begin(), noted_.end(), [&](const auto& n) { return alike(n.all[0], c); });
  if (same == noted_.end()) {
    noted_.push_back({{}, std::make_shared<SharedCall>()});
    same = noted_.end() - 1;
  }
  const auto used = c.kind == CollectiveKind::AllGather ? c.pieces : std::vector<at::Tensor>{c.out};
  const CollectiveCall where(c);
  same->all.push_back(std::move(c));
  return share(
      where, [joint = same->joint, used = used.front()] { joint->wait(used); }, used);
}

void CoalescedCalls::begin(SharedCall& joint, InFlight rest) {
  joint.rest = std::move(rest);
  joint.begun = true;
}

} // namespace shardtensor::comm
