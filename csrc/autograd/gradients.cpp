// The tensors that autograd makes for gradients. Uses autograd/functions, dispatch/, tensor/.
//
// The gradient that a leaf keeps (torch's AccumulateGrad) has the leaf's layout along the mesh dims that cut the leaf: a rank
// that holds a part of the leaf keeps the same part of the gradient.
//
// The backward of a write through a view (torch's CopySlices) copies the gradient of the base into a new tensor, takes the same
// view of that and writes there. The gradient may have another layout than the base had, so this view might have to move data
// and could then not be written. Then the new tensor is whole along the mesh dims that cut the gradient.
//
// The gradients of a tensor with several uses are added up, in place where autograd's engine holds the only reference to the sum
// so far. In place, a replicated sum would have to gather a gradient that is cut; and only some ranks may hold another reference.
// So if the layouts differ, the sum gets the one that a new tensor would have.
//
// For some operands, whose gradients are zeros, torch keeps only the sizes and makes the zeros as plain tensors. The nodes of
// such ops get a hook that makes them ShardTensors in the operand's layout.
#include "autograd/gradients.h"

#include "autograd/functions.h"
#include "autograd/make_formula.h"
#include "dispatch/call.h"
#include "dispatch/plain_tensors.h"
#include "dispatch/typed.h"
#include "tensor/reduced_partials.h"

#include <ATen/ATen.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/detach_ops.h>
#include <ATen/ops/new_empty_strided_ops.h>
#include <c10/util/strides.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

namespace shardtensor {

namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::CopySlices;

// The node of the graph that runs on this thread, if it is a `Node`.
template <typename Node>
const Node* running() {
  return dynamic_cast<const Node*>(torch::autograd::get_current_node().get()); // autograd's engine keeps it alive
}

// The leaf's placements and cuts along the mesh dims that cut the leaf. Along other mesh dims the gradient's own: summands may
// stay summands until their sum is needed.
LayoutPtr layout_to_keep(const LayoutPtr& grad, const Layout& leaf) {
  auto out = grad;
  for (int64_t m = 0; m < leaf.ndim(); ++m) {
    const auto& p = grad->placement(m);
    const bool crosses = p.is_shard() && leaf.shards(p.dim); // the leaf cuts that dim along another mesh dim
    if (leaf.placement(m).is_shard() || crosses) {
      out = out->with(m, leaf.placement(m), leaf.cut(m));
    }
  }
  return out;
}

// The layout in which a leaf keeps `grad`; null if `grad` has it already.
LayoutPtr wanted_by(const at::Tensor& leaf_, const at::Tensor& grad) {
  const auto* leaf = as_shard_tensor(leaf_);
  const auto* impl = leaf ? as_shard_tensor(grad) : nullptr;
  if (!impl || &impl->layout() == &leaf->layout() || !leaf->layout().is_sharded() || leaf->traced() || impl->traced() ||
      impl->layout().mesh_ptr() != leaf->layout().mesh_ptr()) {
    return nullptr;
  }
  auto out = layout_to_keep(impl->layout_ptr(), leaf->layout());
  return out == impl->layout_ptr() ? nullptr : out;
}

// The same for the leaf of the running node; null if no AccumulateGrad is running.
LayoutPtr wanted_by_leaf(const at::Tensor& grad) {
  const auto* accumulate = running<AccumulateGrad>();
  return accumulate ? wanted_by(accumulate->variable, grad) : nullptr;
}

constexpr MoveCause kLeaf{"AccumulateGrad", "gradient", "its leaf has these cuts"};

at::Tensor detach(c10::DispatchKeySet keys, const at::Tensor& self) {
  if (const auto layout = wanted_by_leaf(self)) {
    return redistribute_for(kLeaf, self, layout);
  }
  return at::_ops::detach::redispatch(torchs_autograd(keys), self);
}

// Whether `other`, which has another layout, is added to a gradient that neither Python nor another tensor refers to.
bool adds_gradients(const at::Tensor& sum, const at::Tensor& other) {
  const auto *to = as_shard_tensor(sum), *from = as_shard_tensor(other);
  if (!to || !from || &to->layout() == &from->layout() || to->layout().mesh_ptr() != from->layout().mesh_ptr() || to->traced() ||
      from->traced() || at::GradMode::is_enabled() || torch::autograd::get_current_graph_task_id() == -1) {
    return false;
  }
  // C++ refers to the tensor, so the tensor owns its Python object, and nothing else refers to that object.
  const bool unseen = sum.use_count() > 1 && to->pyobj_slot()->has_unique_reference();
  return unseen && to->storage().use_count() == 1;
}

// Whether `other` is added to a plain gradient that only autograd's engine refers to: the zeros that torch makes for views
// without elements, for any base.
bool adds_to_zeros(const at::Tensor& sum, const at::Tensor& other) {
  return !as_shard_tensor(sum) && as_shard_tensor(other) && !at::GradMode::is_enabled() &&
         torch::autograd::get_current_graph_task_id() != -1 && sum.use_count() == 1 &&
         !sum.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
}

at::Tensor& add_(const Op& op, c10::DispatchKeySet keys, at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  if (C10_UNLIKELY(adds_to_zeros(self, other))) {
    return self = at::add(self, other, alpha); // the engine keeps the tensor that `self` refers to
  }
  if (C10_UNLIKELY(adds_gradients(self, other))) {
    const auto sum = at::add(self, other, alpha);
    shard_tensor(self, "the gradient").shallow_copy_from(sum.getIntrusivePtr());
    return self;
  }
  static const auto recorder = *typed_record(op);
  return recorder.call<at::Tensor&, at::Tensor&, const at::Tensor&, const at::Scalar&>(op.handle, keys, self, other, alpha);
}

bool view_moves(const at::Tensor& base, const CopySlices& write) {
  static const auto& op = installed_op("aten::as_strided");
  torch::jit::Stack stack{
      base, write.view.sizes(), write.view.strides(), write.view.storage_offset() - write.base.storage_offset()};
  return find_solution(op, stack, 0, collect(op, stack, 0))->moves;
}

bool has_gaps(const at::Tensor& t) {
  return !is_symbolic(t) && Sizes(t.strides().begin(), t.strides().end()) != dense_strides(t.sizes(), order_of(t.strides()));
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
  const auto empty = [&](const at::Tensor& like, const LayoutPtr& in) {
    const auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
    const auto options = shard_tensor(like, "the gradient").local().options();
    return wrap(
        in_dim_order(at::empty(in->local_sizes(sizes), options.dtype(dtype.value_or(like.scalar_type()))), strides), in, sizes,
        strides);
  };
  if (const auto in = wanted_by_leaf(self)) {
    return empty(self, in);
  }
  auto made = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return at::_ops::new_empty_strided::redispatch(
        keys & c10::after_autograd_keyset, self, size, stride, dtype, layout, device, pin_memory);
  }();
  const auto* write = running<CopySlices>();
  if (!write || write->view_fn) {
    return made;
  }
  const auto whole = shard_tensor(made, "the gradient").layout().uncut(~uint64_t{0});
  if (has_gaps(made) && whole->local_sizes(made.sizes()) == made.sizes()) { // a view of a piece without gaps would be a copy
    auto local = shard_tensor(made, "the gradient").local().new_empty_strided(made.sizes(), made.strides());
    return wrap(std::move(local), whole, made.sizes(), made.strides());
  }
  return view_moves(made, *write) ? empty(made, whole) : made;
}

// Whether the gradient is cut along all mesh dims that `other` is cut along.
bool is_cut_where(const Layout& grad, const Layout& other) {
  return !grad.any_mesh_dim([&](int64_t m) { return other.placement(m).is_shard() && !grad.placement(m).is_shard(); });
}

} // namespace

at::Tensor with_cuts_of(const at::Tensor& leaf, const at::Tensor& grad) {
  const auto layout = wanted_by(leaf, grad);
  if (!layout || is_cut_where(shard_tensor(grad, "the gradient").layout(), *layout)) {
    return grad;
  }
  return redistribute_for(kLeaf, grad, layout);
}

namespace {

struct OperandShape {
  LayoutPtr layout; // null if it is no ShardTensor
  Sizes sizes;
};

at::Tensor zeros_like(const OperandShape& operand, const at::Tensor& plain) {
  const auto local = operand.layout->mesh().has_this_rank() ? operand.layout->local_sizes(operand.sizes)
                                                            : Sizes(operand.sizes.empty() ? 0 : 1, 0);
  return wrap(at::zeros(local, plain.options()), operand.layout, operand.sizes, c10::contiguous_strides(operand.sizes));
}

class MakeShardTensorsHook final : public torch::autograd::FunctionPostHook {
 public:
  explicit MakeShardTensorsHook(std::vector<OperandShape> operands) : operands_(std::move(operands)) {}

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients, const torch::autograd::variable_list&) override {
    auto out = gradients;
    for (size_t i = 0; i < std::min(out.size(), operands_.size()); ++i) {
      const auto& operand = operands_[i];
      if (operand.layout && out[i].defined() && !as_shard_tensor(out[i]) && out[i].sizes() == c10::IntArrayRef(operand.sizes)) {
        out[i] = zeros_like(operand, out[i]);
      }
    }
    return out;
  }

 private:
  std::vector<OperandShape> operands_;
};

void with_zeros(const Op& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  std::vector<OperandShape> operands;
  if (at::GradMode::is_enabled()) {
    for (const auto& value : torch::jit::last(*stack, op.kinds.size())) {
      if (value.isTensor()) {
        const auto& t = value.toTensor();
        const auto* impl = t.defined() ? as_shard_tensor(t) : nullptr;
        operands.push_back(
            impl && !impl->is_symbolic()
                ? OperandShape{without_partial(impl->layout_ptr()), Sizes(t.sizes().begin(), t.sizes().end())}
                : OperandShape{});
      }
    }
  }
  record(op, keys, stack);
  const auto& result = stack->back().toTensor();
  if (!operands.empty() && result.grad_fn()) {
    result.grad_fn()->add_post_hook(std::make_unique<MakeShardTensorsHook>(std::move(operands)));
  }
}

// torch asks whether a tangent may stay as it is, or must be copied into zeros like its tensor. A view of the tensor later
// takes the same view of the tangent, and the two must still match; so their layouts must match too.
bool has_same_storage(const at::Tensor& tangent, const at::Tensor& tensor) {
  const auto *a = as_shard_tensor(tangent), *b = as_shard_tensor(tensor);
  const auto numel = [](const at::Tensor& t) { return t.storage().sym_nbytes() / static_cast<int64_t>(t.itemsize()); };
  return (!a || !b || a->layout_ptr() == b->layout_ptr()) && numel(tangent) == numel(tensor);
}

} // namespace

const Formula formulas::add_ = formula<&shardtensor::add_>;
const Formula formulas::detach = formula<&shardtensor::detach>;
const Formula formulas::has_same_storage = formula<&shardtensor::has_same_storage>;
const Formula formulas::new_empty_strided = formula<&shardtensor::new_empty_strided>;
const Formula formulas::with_zeros = formula<&shardtensor::with_zeros>;

} // namespace shardtensor
