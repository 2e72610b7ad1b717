#include "comm/collective_call.h"

namespace shardtensor::comm {

namespace {

thread_local int64_t t_calling = 0;

} // namespace

bool is_calling() {
  return t_calling > 0;
}

BackendCallGuard::BackendCallGuard() {
  ++t_calling;
}
BackendCallGuard::~BackendCallGuard() {
  --t_calling;
}

void wait(const CollectiveCall& where, const WorkPtr& work) {
  if (!work) {
    return;
  }
  try {
    guarded(where, [&] { desync::wait(*work, where.ticket, [&] { return where.str(); }); });
  } catch (c10::Error& e) {
    if (const auto silent = desync::broke(where.ticket, e.what_without_backtrace()); !silent.empty()) {
      e.add_context(silent);
    }
    throw;
  }
}

} // namespace shardtensor::comm
