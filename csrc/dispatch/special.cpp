#include "dispatch/special.h"

#include "comm/comm.h"
#include "dispatch/call.h"
#include "dispatch/lists.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace shardtensor {

namespace {

using torch::jit::Stack;

// GradScaler's check: a bad value in any rank's piece counts on all ranks.
void handle_found_inf(const Op& op, Stack* stack_ptr) {
  auto& stack = *stack_ptr;
  const auto base = stack.size() - op.kinds.size();
  const auto refs = collect(op, stack, base);
  c10::impl::ExcludeDispatchKeyGuard below(kBelow);
  std::vector<MeshPtr> meshes;
  const auto local_of = [&](const at::Tensor& t) {
    const auto* impl = as_shard_tensor(t);
    if (!impl) {
      return t;
    }
    const auto& mesh = impl->layout().mesh_ptr();
    if (std::find(meshes.begin(), meshes.end(), mesh) == meshes.end()) {
      meshes.push_back(mesh);
    }
    return impl->local();
  };
  std::vector<at::Tensor> gradients;
  for (const auto& r : refs) {
    if (r.index >= 0) {
      gradients.push_back(local_of(*r.tensor));
    }
  }
  auto found = local_of(stack[base + 1].toTensor());
  const auto scale = local_of(stack[base + 2].toTensor());
  at::_amp_foreach_non_finite_check_and_unscale_(gradients, found, scale);
  note_writes(op, refs);
  for (const auto& mesh : meshes) {
    for (int64_t m = 0; m < mesh->ndim(); ++m) {
      comm::all_reduce(found, *mesh, m, ReduceOp::Max);
    }
  }
  stack.erase(stack.begin() + static_cast<int64_t>(base), stack.end());
}

// Arguments of a Fourier transform: (self, dims, normalization, forward or onesided or the result's last size).
void handle_transform(const Op& op, Stack* stack) {
  using rules::Transform;
  const auto& last = op.handle.schema().arguments()[3].name();
  const auto kind = last == "forward" ? Transform::C2C : last == "onesided" ? Transform::R2C : Transform::C2R;
  const auto self = torch::jit::peek(*stack, 0, 4).toTensor();
  const auto* impl = as_shard_tensor(self);
  Sizes dims;
  bool known = impl;
  for (const auto& given : known ? torch::jit::peek(*stack, 1, 4).toSymIntVector() : std::vector<c10::SymInt>()) {
    const auto d = given.guard_int(__FILE__, __LINE__), at = d < 0 ? d + self.dim() : d;
    known = known && at >= 0 && at < self.dim() && std::find(dims.begin(), dims.end(), at) == dims.end();
    dims.push_back(at);
  }
  const auto stages = known ? rules::stages_of(kind, impl->layout(), self.sym_sizes(), dims) : std::nullopt;
  if (!stages) {
    return handle(op, stack);
  }
  const auto normalization = torch::jit::peek(*stack, 2, 4).toInt();
  const auto more = torch::jit::pop(*stack);
  torch::jit::drop(*stack, 3);
  const auto c2c = [&](const at::Tensor& t, const Sizes& along, bool forward) {
    return at::_fft_c2c(t, along, normalization, forward);
  };
  if (kind == Transform::C2C) {
    stack->emplace_back(c2c(c2c(self, stages->first, more.toBool()), stages->rest, more.toBool()));
  } else if (kind == Transform::R2C) {
    stack->emplace_back(c2c(at::_fft_r2c(self, stages->first, normalization, more.toBool()), stages->rest, true));
  } else {
    stack->emplace_back(at::_fft_c2r_symint(c2c(self, stages->first, false), stages->rest, normalization, more.toSymInt()));
  }
}

} // namespace

void handle_specially(const Op& op, Stack* stack) {
  if (op.is(rules::Way::Decomposed)) {
    using c10::DispatchKey;
    const bool usual = op.handle.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd);
    op.handle.callBoxedForDispatchKey(
        usual ? DispatchKey::CompositeExplicitAutograd : DispatchKey::CompositeExplicitAutogradNonFunctional, *stack);
  } else if (op.is(rules::Way::FoundInf)) {
    handle_found_inf(op, stack);
  } else if (is_transform(op)) {
    handle_transform(op, stack);
  } else {
    handle_lists(op, stack);
  }
}

} // namespace shardtensor
