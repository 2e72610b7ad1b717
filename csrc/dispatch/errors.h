// The texts of the handler's errors, so that all read alike: op, argument, layouts, rank, way out.
#pragma once

#include "comm/doing.h"
#include "dispatch/call.h"

namespace shardtensor::errors {

std::string layouts_of(const rules::Call& call);
std::string plain_tensor_text(const Op& op, int64_t arg, const at::Tensor& t);
[[noreturn]] void plain_tensor(const Op& op, int64_t arg, const at::Tensor& t);
[[noreturn]] void different_meshes(const Op& op, const Layout& a, const Layout& b);
// A dim of one of two arguments whose sizes must agree but do not.
struct Place {
  int64_t arg;
  const at::Tensor& tensor;
  int64_t dim;
};
[[noreturn]] void sizes_differ(const Op& op, const Place& a, const Place& b, const Mesh& mesh);
[[noreturn]] void refused(const Op& op, const std::string& why, const rules::Call& call);
// Raises if the op does not take the dtype of its first tensor.
void check_taken(const Op& op, const rules::Call& call);
// Strict mode forbids gathering an op's inputs.
[[noreturn]] void gathers(const Op& op, const rules::Call& call);
const char* why_gathered(const Op& op);
// Raises if the op may not write to the tensor: a plain tensor, or a view that had to move data.
void check_writable(const Op& op, int64_t arg, const at::Tensor& t, const ShardTensorImpl* impl);
// Raises if a written argument shares some of its memory with another argument. Does not look at this rank's pieces.
void check_apart(const Op& op, const Refs& refs, size_t written);

// Runs `run`, which communicates for an op.
template <typename F>
decltype(auto) while_doing(const Op& op, const F& run) {
  const auto text = [&] { return op.name; };
  const comm::Frame frame(text);
  return run();
}
// Runs the rest of a call whose solution is found. An error gets the call's operands as its context; as this rank may be the only
// one that fails, the others are told.
void call_failed(const Op& op, const Refs& refs, const rules::Solution& solution, c10::Error* error);
template <typename F>
decltype(auto) guarded(const Op& op, const Refs& refs, const rules::Solution& solution, const F& run) {
  try {
    return run();
  } catch (c10::Error& e) {
    call_failed(op, refs, solution, &e);
    throw;
  } catch (...) {
    call_failed(op, refs, solution, nullptr);
    throw;
  }
}

} // namespace shardtensor::errors
