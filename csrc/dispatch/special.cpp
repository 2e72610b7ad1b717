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

} // namespace

void handle_specially(const Op& op, Stack* stack) {
  if (op.is(rules::Way::Decomposed)) {
    using c10::DispatchKey;
    const bool usual = op.handle.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd);
    op.handle.callBoxedForDispatchKey(
        usual ? DispatchKey::CompositeExplicitAutograd : DispatchKey::CompositeExplicitAutogradNonFunctional, *stack);
  } else if (op.is(rules::Way::FoundInf)) {
    handle_found_inf(op, stack);
  } else {
    handle_lists(op, stack);
  }
}

} // namespace shardtensor
