#include "comm/together.h"

#include "comm/gil.h"
#include "comm/where.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <utility>

namespace shardtensor::comm {

namespace {

thread_local Together* t_open = nullptr;

using Call = Together::Call;

Kind kind_of(const Call& call) {
  switch (call.what) {
    case Call::What::Reduce:
      return Kind::AllReduce;
    case Call::What::Gather:
      return Kind::AllGather;
    case Call::What::Scatter:
      return Kind::ReduceScatter;
    case Call::What::Exchange:
    case Call::What::Send:
      return call.of_summands ? Kind::ReduceScatter : Kind::AllToAll;
  }
  return Kind::AllToAll;
}

bool alike(const Call& a, const Call& b) {
  const bool reduces = a.what == Call::What::Reduce || a.what == Call::What::Scatter;
  return a.what == b.what && a.mesh == b.mesh && a.mesh_dim == b.mesh_dim && a.of_summands == b.of_summands &&
         a.callers == b.callers && (!reduces || (a.op == b.op && a.out.scalar_type() == b.out.scalar_type()));
}

} // namespace

// The one call that several are. Whichever of them comes first waits for it; an error is raised for each.
struct Together::Joint {
  std::mutex mutex;
  InFlight rest;
  std::exception_ptr error;
  bool begun = false;

  // `used`: of what it writes for the one who waits.
  void wait(const at::Tensor& used) {
    const WithoutGil released; // the one who has the lock may need it
    const std::lock_guard<std::mutex> lock(mutex);
    TORCH_INTERNAL_ASSERT(begun, "a collective is waited for before Together::go()");
    if (rest) {
      try {
        rest.wait_on_each_stream(used);
      } catch (...) {
        if (rest) { // not now, but later
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

Together::Together() : outer_(std::exchange(t_open, this)) {}

Together::~Together() {
  close();
}

void Together::close() {
  if (t_open == this) {
    t_open = outer_;
  }
}

Together* Together::open() {
  return t_open;
}

InFlight Together::note(Call call) {
  auto same = std::find_if(noted_.begin(), noted_.end(), [&](const auto& n) { return alike(n.calls[0], call); });
  if (same == noted_.end()) {
    noted_.push_back({{}, std::make_shared<Joint>()});
    same = noted_.end() - 1;
  }
  const auto used = call.what == Call::What::Gather ? call.pieces : std::vector<at::Tensor>{call.out};
  const Where where(kind_of(call), *call.mesh, call.mesh_dim);
  same->calls.push_back(std::move(call));
  return share(
      where, [joint = same->joint, used = used.front()] { joint->wait(used); }, used);
}

void Together::begin(Joint& joint, InFlight rest) {
  joint.rest = std::move(rest);
  joint.begun = true;
}

} // namespace shardtensor::comm
