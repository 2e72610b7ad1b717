#include "comm/backend.h"

#include <torch/headeronly/version.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <array>

namespace shardtensor::comm {

namespace {

constexpr uint64_t bits(std::initializer_list<at::ScalarType> dtypes) {
  uint64_t out = 0;
  for (const auto dtype : dtypes) {
    out |= uint64_t{1} << static_cast<int>(dtype);
  }
  return out;
}
constexpr auto kIntegers = bits({at::kLong, at::kInt, at::kChar, at::kByte});
constexpr auto kFloats = bits({at::kDouble, at::kFloat, at::kHalf, at::kBFloat16});

// torch has two NCCL groups. "nccl" is the older one; since torch 2.15, "nccl" makes one that calls itself "nccl2", and
// "nccl-lazy" one with a communicator for each pair of ranks that send. The older group would make a communicator of the whole
// group for a batch, and then all ranks would have to call. Two differences are not in the table, because comm/ does for every
// backend what one of them needs. If a work is dropped, nccl2 keeps only the inputs of the call, Gloo cancels the message, and
// the older NCCL group keeps all buffers (in_flight.cpp). And a tensor must be on the device that the group is bound to
// (device_of() in comm.h).
const std::array kBackends = {
    Backend{.name = "nccl", .gathers = true, .reduces = kIntegers | kFloats, .scatters = true, .aligned = true},
    Backend{
        .name = "nccl2",
        .gathers = true,
        .batches = true,
        .reduces = kIntegers | kFloats,
        .scatters = true,
        .aligned = true,
        .by_address = true,
        .at_once = true},
    Backend{
        .name = "nccl-lazy",
        .gathers = true,
        .reduces = kIntegers | kFloats,
        .scatters = true,
        .aligned = true,
        .by_address = true},
    Backend{
        .name = "gloo", //
        .bitwise = true,
        .sends = true,
        .latency = 16 << 10,
        .blocks = true},
};

} // namespace

Backend backend_of(c10d::ProcessGroup& group, c10::Device device) {
  const auto types = group.getDeviceTypes();
  if (std::none_of(types.begin(), types.end(), [&](c10::Device d) { return d.type() == device.type(); })) {
    return {}; // a group written in Python
  }
  const auto name = group.getBackend(device.type())->getBackendName();
  const auto row = std::find_if(kBackends.begin(), kBackends.end(), [&](const Backend& b) { return name == b.name; });
  if (row == kBackends.end()) {
    return {};
  }
  auto out = *row;
  if (out.blocks && !device.is_cpu()) { // Gloo copies tensors of other devices to main memory, except for messages
    out.sends = false;
    out.by_host = true;
  }
  return out;
}

bool scatters(const Backend& rules, at::ScalarType dtype, ReduceOp op) {
  if (!rules.scatters || !(rules.reduces >> static_cast<int>(dtype) & 1)) {
    return false;
  }
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Product:
      return true;
    case ReduceOp::Avg:
    case ReduceOp::Norm:
      return at::isFloatingType(dtype);
    case ReduceOp::Min:
    case ReduceOp::Max: // of floats, a NaN must win
      return !at::isFloatingType(dtype);
    default:
      return false;
  }
}

bool ready_for_some(const Backend& rules, c10d::ProcessGroup& group, c10::Device device) {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 14
  return true; // there is no such backend
#endif
  // A group that makes its communicator late cannot be split before.
  return !rules.at_once || group.getBackend(device.type())->supportsSplitting();
}

} // namespace shardtensor::comm
