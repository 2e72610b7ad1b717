// The texts of the handler's errors, so that all read alike: op, argument, layouts, rank, way out.
#pragma once

#include "comm/error_context.h"
#include "dispatch/op.h"

namespace shardtensor::errors {

std::string layouts_of(const rules::Call& call);
std::string plain_tensor_text(const Op& op, int64_t arg, const at::Tensor& t);
[[noreturn]] void plain_tensor(const Op& op, int64_t arg, const at::Tensor& t);
[[noreturn]] void different_meshes(const Op& op, const Layout& a, const Layout& b);
// A dim of one of two arguments whose sizes must agree but do not.
struct ArgumentDim {
  int64_t arg;
  const at::Tensor& tensor;
  int64_t dim;
};
[[noreturn]] void sizes_differ(const Op& op, const ArgumentDim& a, const ArgumentDim& b, const Mesh& mesh);
[[noreturn]] void refused(const Op& op, const std::string& why, const rules::Call& call);
// Raises if the op does not take the dtype of its first tensor.
void check_taken(const Op& op, const rules::Call& call);
// Strict mode forbids gathering an op's inputs.
[[noreturn]] void gathers(const Op& op, const rules::Call& call);
const char* why_gathered(const Op& op);

// Runs `run`, which communicates for an op.
template <typename F>
decltype(auto) while_doing(const Op& op, const F& run) {
  const auto text = [&] { return op.name; };
  const comm::Frame frame(text);
  return run();
}

} // namespace shardtensor::errors
