// The texts of the handler's errors, so that all read alike: op, argument, layouts, rank, way out.
#pragma once

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

// Runs `run`, which communicates for an op. If it fails (a dead peer, a time-out), the error names the op and what `where`
// returns.
template <typename F, typename Where>
auto while_doing(const Op& op, F&& run, Where&& where) {
  try {
    return run();
  } catch (c10::DistError& e) {
    e.add_context(c10::str("in ", op.name, where()));
    throw;
  }
}
template <typename F>
auto while_doing(const Op& op, F&& run) {
  return while_doing(op, run, [] { return ""; });
}
// A rule's kernel, which may communicate by itself.
void run_kernel(const Op& op, const rules::Kernel& kernel, rules::Run& run);

} // namespace shardtensor::errors
