// The backward of a write through a view (torch's CopySlices): it copies the gradient of the base into a new tensor, takes the
// same view of that and writes there. The gradient may lie in another way than the base did, so that this view would have to move
// data, and could not be written to. Then the new tensor is whole where the gradient is cut. Uses dispatch/, tensor/. Registers
// itself; used by nobody.
#include "dispatch/call.h"

#include <ATen/ATen.h>
#include <ATen/ops/new_empty_strided_ops.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/library.h>

namespace shardtensor {

namespace {

bool view_moves(const at::Tensor& base, const torch::autograd::CopySlices& write) {
  static const auto& op = installed_op("aten::as_strided");
  torch::jit::Stack stack{
      base, write.view.sizes(), write.view.strides(), write.view.storage_offset() - write.base.storage_offset()};
  return find_solution(op, stack, 0, collect(op, stack, 0))->moves;
}

LayoutPtr uncut(LayoutPtr layout) {
  for (int64_t m = 0; m < layout->mesh().ndim(); ++m) {
    if (layout->placement(m).is_shard()) {
      layout = layout->with(m, Placement::replicate());
    }
  }
  return layout;
}

at::Tensor new_empty_strided(
    c10::DispatchKeySet keys,
    const at::Tensor& self,
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory) {
  auto made = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return at::_ops::new_empty_strided::redispatch(
        keys & c10::after_autograd_keyset, self, size, stride, dtype, layout, device, pin_memory);
  }();
  const auto node = torch::autograd::get_current_node();
  const auto* write = dynamic_cast<const torch::autograd::CopySlices*>(node.get());
  if (!write || write->view_fn || !view_moves(made, *write)) {
    return made;
  }
  const auto& impl = shard_tensor(made, "the gradient");
  const auto sizes = impl.sizes(), strides = impl.strides();
  return wrap(at::empty_strided(sizes, strides, impl.local().options()), uncut(impl.layout_ptr()), sizes, strides);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse2, m) {
  m.impl("new_empty_strided", new_empty_strided);
}

} // namespace

} // namespace shardtensor
