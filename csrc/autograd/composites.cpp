// Autograd for three kinds of ops: ops that torch would decompose, but that have a rule or are decomposed in another way here;
// ops whose torch formula lacks an argument that we need (embedding, mean); and ops whose formula asks what the kernel has found
// (det).
#include "autograd/functions.h"
#include "autograd/with_gradient.h"
#include "comm/tensor_kind.h"
#include "dispatch/op.h"
#include "dispatch/plain_tensors.h"
#include "dispatch/typed.h"
#include "tensor/shard_tensor.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_to_copy_ops.h>
#include <ATen/ops/cross_entropy_loss_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/embedding_ops.h>
#include <ATen/ops/linear_ops.h>
#include <ATen/ops/matmul_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/matmul_ops.h>
#include <ATen/ops/mean_ops.h>
#include <ATen/ops/tensor_split_compositeimplicitautograd_dispatch.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <numeric>

namespace shardtensor {

namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// Below autograd, at the next key of `keys`: the handler.
template <typename Op, typename... Args>
at::Tensor call_below(c10::DispatchKeySet keys, const Args&... args) {
  at::AutoDispatchBelowADInplaceOrView guard;
  return Op::redispatch(keys & c10::after_autograd_keyset, args...);
}

at::Tensor sum_rows(const at::Tensor& grad) {
  std::vector<int64_t> dims(grad.dim() - 1);
  std::iota(dims.begin(), dims.end(), 0);
  return dims.empty() ? grad : grad.sum(dims);
}

// Saves only the operands that the required gradients will read: x for the weight's, the weight for x's.
struct LinearBackward final : Node {
  SavedVariable x, weight;

  std::string name() const override {
    return "LinearBackward0";
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    x.reset_data();
    weight.reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto& grad = grads[0];
    variable_list out(3);
    if (!grad.defined()) {
      return out;
    }
    const std::array<bool, 3> want{task_should_compute_output(0), task_should_compute_output(1), task_should_compute_output(2)};
    if (want[1]) {
      std::tie(out[0], out[1], out[2]) = at::linear_backward(x.unpack(), grad, weight.unpack(), want);
      return out;
    }
    if (want[0]) {
      out[0] = at::matmul(grad, weight.unpack().conj());
    }
    if (want[2]) {
      out[2] = sum_rows(grad);
    }
    return out;
  }
};

// Holds the table, whose layout says which rows' gradient this rank needs.
struct EmbeddingBackward final : Node {
  at::Tensor table; // only its layout is read
  SavedVariable indices;
  int64_t padding_idx;
  bool scale_grad_by_freq;

  std::string name() const override {
    return "EmbeddingBackward0";
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    table.reset();
    indices.reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto& grad = grads[0];
    if (!grad.defined()) {
      return {at::Tensor()};
    }
    TORCH_CHECK(table.defined(), "Trying to backward through the graph a second time: specify retain_graph=True the first time.");
    const auto at = indices.unpack();
    if (at::GradMode::is_enabled()) { // differentiable in turn
      return {at::embedding_dense_backward_symint(grad, at, table.sym_size(0), padding_idx, scale_grad_by_freq)};
    }
    static const auto op =
        own_op<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, c10::SymInt, int64_t, bool)>(
            "shardtensor::embedding_backward");
    return {op.call(grad, at, table, table.sym_size(0), padding_idx, scale_grad_by_freq)};
  }
};

struct MatmulBackward final : Node {
  SavedVariable self, other;
  std::vector<int64_t> self_sizes, other_sizes;

  std::string name() const override {
    return "MatmulBackward0";
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    self.reset_data();
    other.reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto& grad = grads[0];
    variable_list out(2);
    if (!grad.defined()) {
      return out;
    }
    const std::array<bool, 2> want{task_should_compute_output(0), task_should_compute_output(1)};
    if (want[0] && want[1] && !at::GradMode::is_enabled()) {
      std::tie(out[0], out[1]) = at::matmul_backward(grad, self.unpack(), other.unpack(), want);
      return out;
    }
    // By products, which are differentiable again (matmul_backward is not).
    auto g = self_sizes.size() == 1 ? grad.unsqueeze(other_sizes.size() == 1 ? grad.dim() : grad.dim() - 1) : grad;
    g = other_sizes.size() == 1 ? g.unsqueeze(-1) : g;
    if (want[0]) {
      const auto b = other.unpack();
      const auto full = at::matmul(g, b.dim() == 1 ? b.conj().unsqueeze(0) : b.mH());
      out[0] = at::sum_to(self_sizes.size() == 1 ? full.squeeze(-2) : full, self_sizes);
    }
    if (want[1]) {
      const auto a = self.unpack();
      const auto full = at::matmul(a.dim() == 1 ? a.conj().unsqueeze(1) : a.mH(), g);
      out[1] = at::sum_to(other_sizes.size() == 1 ? full.squeeze(-1) : full, other_sizes);
    }
    return out;
  }
};

// torch's formula expands the gradient to the mean's operand and then divides: a replicated gradient would take the memory of
// the whole on every rank. This makes only the rank's piece, by the operand's cuts.
struct MeanBackward final : Node {
  LayoutPtr layout;
  std::vector<c10::SymInt> sizes;
  std::vector<int64_t> dims; // ascending
  bool keepdim;

  std::string name() const override {
    return "MeanBackward1";
  }

  variable_list apply(variable_list&& grads) override {
    auto grad = grads[0];
    if (!grad.defined()) {
      return {at::Tensor()};
    }
    c10::SymInt count = 1;
    for (const auto d : dims) {
      count = count * sizes[d];
      grad = keepdim ? grad : grad.unsqueeze(d);
    }
    return {cut(grad.div(at::Scalar(count)).expand_symint(sizes))};
  }

 private:
  // Cuts the gradient like the operand along the averaged dims, for mesh dims along which the gradient is replicated.
  at::Tensor cut(const at::Tensor& grad) const {
    const auto* impl = as_shard_tensor(grad);
    if (!impl || impl->layout().mesh_ptr() != layout->mesh_ptr()) {
      return grad;
    }
    auto to = impl->layout_ptr();
    for (const auto d : dims) {
      auto next = to;
      bool whole = true;
      for (int64_t m = 0; m < layout->ndim(); ++m) {
        if (layout->placement(m).is_shard(d)) {
          whole = whole && to->placement(m).is_replicate();
          next = next->with(m, layout->placement(m));
        }
      }
      for (int64_t m = 0; m < layout->ndim() && whole; ++m) { // inner cuts once the outer ones are there
        next = layout->placement(m).is_shard(d) ? next->with(m, layout->placement(m), layout->cut(m)) : next;
      }
      to = whole ? next : to;
    }
    return to == impl->layout_ptr() ? grad : redistribute(grad, to);
  }
};

// torch 2.15 counts references in the node itself, earlier versions in a shared_ptr.
template <typename T>
auto new_node() {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, T>) {
    return c10::make_intrusive<T>();
  } else {
    return std::shared_ptr<T>(new T(), [](T* node) { deleteNode(node); });
  }
}
template <typename T>
using NodePtr = decltype(new_node<T>());

at::Tensor linear(
    const Op& op,
    c10::DispatchKeySet keys,
    const at::Tensor& x,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias_) {
  const auto bias = bias_ && bias_->defined() ? *bias_ : at::Tensor();
  if (needs_promotion(x) || needs_promotion(weight) || needs_promotion(bias)) {
    torch::jit::Stack in{x, weight, bias_};
    if (promote_plain(op, in, 0, collect(op, in, 0))) {
      return at::linear(in[0].toTensor(), in[1].toTensor(), in[2].toOptional<at::Tensor>());
    }
  }
  // Forward mode and undocumented shapes run by other ops, which have formulas for them.
  const bool plain_shapes =
      weight.dim() == 2 && x.dim() > 0 && (!bias.defined() || (bias.dim() == 1 && bias.size(0) == weight.size(0)));
  const bool symbolic = is_symbolic(x) || is_symbolic(weight);
  if (!plain_shapes || symbolic || has_tangent(x) || has_tangent(weight) || has_tangent(bias)) {
    const auto out = at::matmul(x, weight.t());
    return bias.defined() ? out + bias : out;
  }
  NodePtr<LinearBackward> node;
  if (torch::autograd::compute_requires_grad(x, weight, bias)) {
    node = new_node<LinearBackward>();
    node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias));
    if (node->should_compute_output(1)) {
      node->x = SavedVariable(x, false);
    }
    if (node->should_compute_output(0) || node->should_compute_output(1)) {
      node->weight = SavedVariable(weight, false);
    }
  }
  auto out = call_below<at::_ops::linear>(keys, x, weight, bias_);
  if (node) {
    torch::autograd::set_history(out, node);
  }
  return out;
}

at::Tensor matmul(const Op& op, c10::DispatchKeySet keys, const at::Tensor& self, const at::Tensor& other) {
  if (needs_promotion(self) || needs_promotion(other)) {
    torch::jit::Stack in{self, other};
    if (promote_plain(op, in, 0, collect(op, in, 0))) {
      return at::matmul(in[0].toTensor(), in[1].toTensor());
    }
  }
  if (has_tangent(self) || has_tangent(other) || is_symbolic(self) || is_symbolic(other)) {
    return at::compositeimplicitautograd::matmul(self, other);
  }
  NodePtr<MatmulBackward> node;
  if (torch::autograd::compute_requires_grad(self, other)) {
    node = new_node<MatmulBackward>();
    node->set_next_edges(torch::autograd::collect_next_edges(self, other));
    node->self_sizes = self.sizes().vec();
    node->other_sizes = other.sizes().vec();
    if (node->should_compute_output(1)) {
      node->self = SavedVariable(self, false);
    }
    if (node->should_compute_output(0)) {
      node->other = SavedVariable(other, false);
    }
  }
  auto out = call_below<at::_ops::matmul>(keys, self, other);
  if (node) {
    torch::autograd::set_history(out, node);
  }
  return out;
}

at::Tensor embedding(
    const Op& op,
    c10::DispatchKeySet keys,
    const at::Tensor& weight,
    const at::Tensor& indices,
    c10::SymInt padding_idx,
    bool scale_grad_by_freq,
    bool sparse) {
  if (needs_promotion(weight)) {
    torch::jit::Stack in{weight, indices, padding_idx, scale_grad_by_freq, sparse};
    if (promote_plain(op, in, 0, collect(op, in, 0))) {
      return at::embedding_symint(in[0].toTensor(), indices, padding_idx, scale_grad_by_freq, sparse);
    }
  }
  if (!as_shard_tensor(weight) || has_tangent(weight) || !torch::autograd::compute_requires_grad(weight)) {
    return at::_ops::embedding::redispatch(torchs_autograd(keys), weight, indices, padding_idx, scale_grad_by_freq, sparse);
  }
  auto node = new_node<EmbeddingBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(weight));
  node->table = weight.detach();
  node->indices = SavedVariable(indices, false);
  node->padding_idx = padding_idx.guard_int(__FILE__, __LINE__);
  node->scale_grad_by_freq = scale_grad_by_freq;
  auto out = call_below<at::_ops::embedding>(keys, weight, indices, padding_idx, scale_grad_by_freq, sparse);
  torch::autograd::set_history(out, node);
  return out;
}

template <typename Op, typename... Args>
at::Tensor mean_of(
    c10::DispatchKeySet keys, const at::Tensor& self, at::OptionalIntArrayRef given, bool keepdim, const Args&... args) {
  const auto* impl = as_shard_tensor(self);
  if (!impl || !impl->layout().is_sharded() || !torch::autograd::compute_requires_grad(self) || has_tangent(self)) {
    return Op::redispatch(torchs_autograd(keys), self, args...);
  }
  std::vector<int64_t> dims(given ? given->vec() : std::vector<int64_t>());
  if (dims.empty()) {
    dims.resize(self.dim());
    std::iota(dims.begin(), dims.end(), 0);
  }
  for (auto& d : dims) {
    d = at::maybe_wrap_dim(d, self.dim());
  }
  std::sort(dims.begin(), dims.end());
  if (std::none_of(dims.begin(), dims.end(), [&](int64_t d) { return impl->layout().shards(d); })) {
    return Op::redispatch(torchs_autograd(keys), self, args...);
  }
  const auto node = new_node<MeanBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(self));
  node->layout = impl->layout_ptr();
  node->sizes = self.sym_sizes().vec();
  node->dims = std::move(dims);
  node->keepdim = keepdim;
  auto out = call_below<Op>(keys, self, args...);
  torch::autograd::set_history(out, node);
  return out;
}

at::Tensor mean_dim(
    c10::DispatchKeySet keys,
    const at::Tensor& self,
    at::OptionalIntArrayRef dims,
    bool keepdim,
    std::optional<at::ScalarType> dtype) {
  return mean_of<at::_ops::mean_dim>(keys, self, dims, keepdim, dims, keepdim, dtype);
}

at::Tensor mean(c10::DispatchKeySet keys, const at::Tensor& self, std::optional<at::ScalarType> dtype) {
  return mean_of<at::_ops::mean>(keys, self, std::nullopt, false, dtype);
}

// For a copy to the meta device, torch would call that device's kernel: its key is above ours, and it does not know pieces.
at::Tensor to_copy(
    c10::DispatchKeySet keys,
    const at::Tensor& self,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory,
    bool non_blocking,
    std::optional<at::MemoryFormat> memory_format) {
  if (device && device->is_meta() && as_shard_tensor(self)) {
    auto out = at::empty_like(self.detach(), dtype, layout, device, pin_memory, memory_format);
    return out.set_requires_grad(self.requires_grad());
  }
  return at::_ops::_to_copy::redispatch(
      torchs_autograd(keys), self, dtype, layout, device, pin_memory, non_blocking, memory_format);
}

// torch allows empty 1-d tensors anywhere in the list. Their gradients would be plain tensors; as views with the others'
// number of dims they get ShardTensors.
at::Tensor cat(const Op& op, c10::DispatchKeySet keys, const at::ITensorListRef& tensors, int64_t dim) {
  static const auto recorder = *typed_record(op);
  const auto call = [&](const at::ITensorListRef& list) {
    return recorder.call<at::Tensor, const at::ITensorListRef&, int64_t>(op.handle, keys, list, dim);
  };
  const auto is_odd = [](const at::Tensor& t) {
    return t.dim() == 1 && t.sym_sizes()[0] == 0 && t.requires_grad() && as_shard_tensor(t);
  };
  const at::Tensor* shaped = nullptr;
  bool odd = false;
  for (const auto& t : tensors) {
    odd |= is_odd(t);
    shaped = t.dim() > 1 ? &t : shaped;
  }
  if (C10_LIKELY(!odd || !shaped)) {
    return call(tensors);
  }
  auto sizes = shaped->sym_sizes().vec();
  sizes[at::maybe_wrap_dim(dim, shaped->dim())] = 0;
  std::vector<at::Tensor> list;
  for (const auto& t : tensors) {
    list.push_back(is_odd(t) ? t.view_symint(sizes) : t);
  }
  return call(list);
}

at::Tensor max_pool1d(
    const at::Tensor& x,
    at::IntArrayRef kernel_size,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool ceil_mode) {
  return std::get<0>(at::max_pool1d_with_indices(x, kernel_size, stride, padding, dilation, ceil_mode));
}

// The kernel reads the values of `sections`, so every rank needs all of them.
std::vector<at::Tensor> tensor_split(const at::Tensor& self, const at::Tensor& sections, int64_t dim) {
  const auto* impl = as_shard_tensor(sections);
  TORCH_CHECK_NOT_IMPLEMENTED(
      !impl || impl->layout().mesh().has_this_rank(), "aten::tensor_split.tensor_indices_or_sections: rank ",
      impl->layout().mesh().rank(), " is not in ", impl->layout().mesh().str(),
      ", so it does not have the values that the sizes of the results depend on; call this only on that mesh's ranks, or pass "
      "the indices as a list of numbers");
  return at::compositeimplicitautograd::tensor_split(self, whole(sections).to(at::kCPU), dim);
}

// torch's version looks up the elements with a plain mask.
at::Tensor combinations(const at::Tensor& self, int64_t r, bool with_replacement) {
  TORCH_CHECK(self.dim() == 1, "Expect a 1D vector, but got shape ", self.sym_sizes());
  TORCH_CHECK(r >= 0, "Expect a non-negative number, but got ", r);
  if (r == 0) {
    return self.new_empty({0});
  }
  const auto numbers =
      at::arange(self.sym_size(0).guard_int(__FILE__, __LINE__), at::TensorOptions(self.device()).dtype(at::kLong));
  const auto rows = at::combinations(numbers, r, with_replacement);
  const AsReplicatedGuard all_ranks_alike;
  return at::index(self, {rows});
}

// torch's version writes the powers into a plain tensor.
at::Tensor vander(const at::Tensor& x, std::optional<int64_t> columns, bool increasing) {
  TORCH_CHECK(x.dim() == 1, "x must be a one-dimensional tensor.");
  const auto n = columns ? c10::SymInt(*columns) : x.sym_size(0);
  TORCH_CHECK(n >= 0, "N must be non-negative.");
  const auto column = x.to(at::promote_types(x.scalar_type(), at::kLong)).unsqueeze(1);
  const auto ones = at::ones_like(column);
  if (n < 2) {
    return ones.narrow_symint(1, 0, n).clone();
  }
  const auto powers = at::cat({ones, column.expand_symint({-1, n - 1}).cumprod(1)}, 1);
  return increasing ? powers : powers.flip(1);
}

// Puts grad on the diagonal of zeros. torch's formula writes it into a plain tensor.
at::Tensor trace_backward(const at::Tensor& grad, c10::SymIntArrayRef sizes) {
  TORCH_CHECK(sizes.size() == 2, "expected matrix input");
  return at::diagonal_backward_symint(grad.expand_symint({sizes[0].min(sizes[1])}), sizes, 0, 0, 1);
}

// torch's version writes through a stride that a cut tensor cannot have.
at::Tensor& fill_diagonal_(at::Tensor& self, const at::Scalar& value, bool wrap) {
  TORCH_CHECK(self.dim() >= 2, "dimensions must larger than 1");
  const auto rows = self.sym_size(0), columns = self.sym_size(1);
  if (self.dim() > 2) {
    const auto sizes = self.sym_sizes();
    TORCH_CHECK(
        std::all_of(sizes.begin(), sizes.end(), [&](const auto& n) { return n == rows; }),
        "all dimensions of input must be of equal length");
  }
  if (wrap && self.dim() == 2 && columns > 0) {
    for (c10::SymInt first = 0; first < rows; first = plus(first, columns + 1)) { // skips a row between two diagonals
      const auto left = plus(rows, -first);
      self.narrow_symint(0, first, left < columns ? left : columns).diagonal().fill_(value);
    }
    return self;
  }
  auto diagonal = self.diagonal();
  while (diagonal.dim() > 1) {
    diagonal = diagonal.diagonal();
  }
  diagonal.fill_(value);
  return self;
}

// torch's version writes the sequences into a plain tensor.
at::Tensor pad_sequence(at::TensorList sequences, bool batch_first, double value, c10::string_view side) {
  TORCH_CHECK(!sequences.empty(), "received an empty list of sequences");
  TORCH_CHECK(side == "left" || side == "right", "Expected padding_side to be one of left or right, but got ", side, ".");
  const auto rest = sequences[0].sizes().slice(1);
  int64_t longest = 0;
  for (const auto& s : sequences) {
    TORCH_CHECK(
        s.dim() > 0 && s.sizes().slice(1) == rest, "pad_sequence: all sequences need the trailing sizes ", rest,
        ", but one has sizes ", s.sizes());
    longest = std::max(longest, s.size(0));
  }
  std::vector<at::Tensor> padded;
  for (const auto& s : sequences) {
    std::vector<int64_t> pad(2 * s.dim(), 0); // the last dim first
    pad[pad.size() - (side == "left" ? 2 : 1)] = longest - s.size(0);
    padded.push_back(at::constant_pad_nd(s, pad, value));
  }
  return at::stack(padded, batch_first ? 0 : 1);
}

// The positions, from 0, of the quantiles in sorted rows. NaN is sorted last: a row with NaN has quantiles NaN, or `skip_nan`
// ignores it.
at::Tensor ranks_of(const at::Tensor& sorted, const at::Tensor& q, bool skip_nan) {
  const auto nan = sorted.isnan();
  if (skip_nan) {
    return (q * (nan.logical_not().sum(-1, true) - 1).to(q.scalar_type())).clamp_min(0);
  }
  const auto last = static_cast<double>(sorted.size(-1) - 1);
  return (q * last).masked_fill(nan.any(-1, true), last);
}

// Like torch's version, which however compares data pointers unless it sorts everything.
at::Tensor quantiles(
    const at::Tensor& self, const at::Tensor& q, std::optional<int64_t> dim, bool keepdim, c10::string_view how, bool skip_nan) {
  const auto* name = skip_nan ? "nanquantile" : "quantile";
  TORCH_CHECK(self.numel() > 0, name, "() input tensor must be non-empty");
  TORCH_CHECK(q.dim() <= 1, name, "() q must be a scalar or 1D tensor");
  TORCH_CHECK(c10::isFloatingType(self.scalar_type()), name, "() input tensor must be either float or double dtype");
  TORCH_CHECK(self.scalar_type() == q.scalar_type(), name, "() q tensor must be same dtype as the input tensor");
  const auto& ours = shard_tensor(q, name);
  TORCH_CHECK(
      !q.device().is_cpu() || is_traced(ours.local()) || !ours.layout().mesh().has_this_rank() ||
          q.ge(0).logical_and(q.le(1)).all().item<bool>(),
      name, "() q values must be in the range [0, 1]");
  const auto along = dim ? at::maybe_wrap_dim(*dim, self.dim()) : 0;
  const auto rows = !dim || self.dim() == 0 ? self.reshape({-1}) : self.movedim(along, -1);
  const auto sorted = std::get<0>(rows.sort(/*dim=*/-1));
  auto ranks = ranks_of(sorted, q.reshape({-1}), skip_nan);
  auto sizes = sorted.sizes().vec();
  sizes.back() = q.numel();
  ranks = ranks.expand(sizes);
  TORCH_CHECK(
      how == "linear" || how == "lower" || how == "higher" || how == "midpoint" || how == "nearest", name,
      "() interpolation must be one of linear, lower, higher, midpoint or nearest, but got ", how);
  ranks = how == "lower" ? ranks.floor() : how == "higher" ? ranks.ceil() : how == "nearest" ? ranks.round() : ranks;
  const auto below = ranks.floor();
  auto out = sorted.gather(-1, below.to(at::kLong));
  if (how == "linear" || how == "midpoint") {
    const auto weights = how == "midpoint" ? at::full_like(ranks, 0.5) : ranks - below;
    out = out.lerp(sorted.gather(-1, ranks.ceil().to(at::kLong)), weights);
  }
  // The quantiles first, then self's dims.
  out = out.movedim(-1, 0);
  if (keepdim) {
    std::vector<int64_t> kept(self.dim() + 1, 1);
    kept[0] = q.numel();
    out = dim && self.dim() > 0 ? out.unsqueeze(along + 1) : out.reshape(kept);
  }
  return q.dim() == 0 ? out.squeeze(0) : out;
}

template <bool skip_nan>
at::Tensor quantile(
    const at::Tensor& self, const at::Tensor& q, std::optional<int64_t> dim, bool keepdim, c10::string_view interpolation) {
  return quantiles(self, q, dim, keepdim, interpolation, skip_nan);
}

template <bool skip_nan>
at::Tensor quantile_number(
    const at::Tensor& self, double q, std::optional<int64_t> dim, bool keepdim, c10::string_view interpolation) {
  TORCH_CHECK(q >= 0 && q <= 1, "quantile() q must be in the range [0, 1] but got ", q);
  const auto layout = Layout::replicated(shard_tensor(self, "quantile").layout().mesh_ptr());
  const auto whole = from_local(at::scalar_tensor(q, self.options()), layout, c10::IntArrayRef{}, c10::IntArrayRef{});
  return quantiles(self, whole, dim, keepdim, interpolation, skip_nan);
}

at::Reduction::Reduction reduction_of(const c10::IValue& name) {
  const std::string text = name.isNone() ? "none" : name.toStringRef();
  return text == "none" ? at::Reduction::None : text == "mean" ? at::Reduction::Mean : at::Reduction::Sum;
}

// torch's custom op saves memory by computing the logits chunk by chunk, into plain buffers. Here the logits are sharded.
// After the loss, torch's op returns gradients for its own formula; that formula is not used here, so there are none.
void chunked_cross_entropy(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto base = stack->size() - schema.arguments().size();
  const auto argument = [&](const char* name) {
    const auto at = schema.argumentIndexWithName(name);
    return at ? (*stack)[base + *at] : c10::IValue();
  };
  const auto smoothing = argument("label_smoothing");
  const auto logits = at::linear(
      argument("input").toTensor(), argument("linear_weight").toTensor(), argument("linear_bias").toOptional<at::Tensor>());
  auto loss = at::cross_entropy_loss(
      logits, argument("target").toTensor(), argument("weight").toOptional<at::Tensor>(), reduction_of(argument("reduction")),
      argument("ignore_index").toInt(), smoothing.isNone() ? 0.0 : smoothing.toDouble());
  stack->resize(base);
  stack->emplace_back(std::move(loss));
  for (size_t i = 1; i < schema.returns().size(); ++i) {
    stack->emplace_back(at::empty({0}, logits.options().requires_grad(false)));
  }
}

// The same steps as torch. In a graph, torch makes the number of classes a number.
at::Tensor smoothed(
    const at::Tensor& x,
    const at::Tensor& target,
    const at::Tensor& weight,
    int64_t reduction,
    const c10::SymInt& ignore_index,
    double smoothing) {
  TORCH_CHECK(smoothing <= 1.0, "label_smoothing must be between 0.0 and 1.0. Got: ", smoothing);
  const int64_t class_dim = x.dim() == 1 ? 0 : 1;
  const auto log_p = at::log_softmax(x, class_dim, x.scalar_type());
  const auto of_labels = at::nll_loss_nd_symint(log_p, target, weight, reduction, ignore_index);
  std::vector<c10::SymInt> along(x.dim(), 1);
  along[class_dim] = weight.sym_size(0);
  const auto ignored = target.eq(at::Scalar(ignore_index));
  auto of_all = (log_p * weight.view_symint(along)).sum(class_dim).neg().masked_fill_(ignored, 0);
  if (reduction == at::Reduction::Mean) {
    const auto weights = weight.gather(0, target.masked_fill(ignored, 0).flatten()).masked_fill_(ignored.flatten(), 0);
    of_all = of_all.sum() / weights.sum();
  } else if (reduction == at::Reduction::Sum) {
    of_all = of_all.sum();
  }
  return (1 - smoothing) * of_labels + of_all * at::Scalar(smoothing / log_p.sym_size(class_dim));
}

// While this lives, plain targets and weights are taken as replicated, if they are allowed.
struct PlainTargets {
  std::optional<AsReplicatedGuard> taken;
  PlainTargets() {
    if (kPlainTargets.get() == 1) {
      taken.emplace();
    }
  }
};

// As in torch: log-softmax and the loss by labels both have rules.
void loss_of_labels(const Op& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const PlainTargets taken;
  op.handle.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
}

at::Tensor cross_entropy(
    const at::Tensor& x,
    const at::Tensor& target,
    const std::optional<at::Tensor>& weight,
    int64_t reduction,
    c10::SymInt ignore_index,
    double smoothing) {
  const PlainTargets taken;
  const auto* impl = as_shard_tensor(x);
  const bool weighted = weight && weight->defined();
  if (impl && impl->traced() && weighted && smoothing > 0 && x.sym_sizes() != target.sym_sizes()) {
    return smoothed(x, target, *weight, reduction, ignore_index, smoothing);
  }
  return at::compositeimplicitautograd::cross_entropy_loss_symint(
      x, target, weight, reduction, std::move(ignore_index), smoothing);
}

// torch's kernels factor the transposes of contiguous matrices, and the formulas for gradients check again whether the matrices
// were contiguous. A piece may be contiguous although the whole is not (one matrix of a batch, a moved slice), so the whole is
// made contiguous. The formulas for complex matrices do not check.
void factored(const Op& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  auto& matrices = stack->at(stack->size() - op.kinds.size());
  if (const auto t = matrices.toTensor(); as_shard_tensor(t) && !t.is_complex()) {
    matrices = t.contiguous();
  }
  record(op, keys, stack);
}

void take_chunked(torch::Library& m) {
  for (const char* name : {"_linear_cross_entropy_batch_chunked", "_linear_cross_entropy_batch_chunked_no_reduction"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<chunked_cross_entropy>());
  }
}

} // namespace

const Formula formulas::cat = formula<&shardtensor::cat>;
const Formula formulas::combinations = formula<&shardtensor::combinations>;
const Formula formulas::cross_entropy = formula<&shardtensor::cross_entropy>;
const Formula formulas::embedding = formula<&shardtensor::embedding>;
const Formula formulas::factored = formula<&shardtensor::factored>;
const Formula formulas::fill_diagonal_ = formula<&shardtensor::fill_diagonal_>;
const Formula formulas::integers = [](const Op&) { return torch::CppFunction::makeFallthrough(); }; // they have no gradient
const Formula formulas::linear = formula<&shardtensor::linear>;
const Formula formulas::loss_of_labels = formula<&shardtensor::loss_of_labels>;
const Formula formulas::matmul = formula<&shardtensor::matmul>;
const Formula formulas::max_pool1d = formula<&shardtensor::max_pool1d>;
const Formula formulas::mean = formula<&shardtensor::mean>;
const Formula formulas::mean_dim = formula<&shardtensor::mean_dim>;
const Formula formulas::nanquantile = formula<&shardtensor::quantile<true>>;
const Formula formulas::nanquantile_number = formula<&shardtensor::quantile_number<true>>;
const Formula formulas::pad_sequence = formula<&shardtensor::pad_sequence>;
const Formula formulas::quantile = formula<&shardtensor::quantile<false>>;
const Formula formulas::quantile_number = formula<&shardtensor::quantile_number<false>>;
const Formula formulas::tensor_split = formula<&shardtensor::tensor_split>;
const Formula formulas::to_copy = formula<&shardtensor::to_copy>;
const Formula formulas::trace_backward = formula<&shardtensor::trace_backward>;
const Formula formulas::vander = formula<&shardtensor::vander>;

// An op that torch.nn defines in Python, perhaps later.
TORCH_LIBRARY_IMPL(torch_nn, AutogradPrivateUse2, m) {
  take_chunked(m);
}
TORCH_LIBRARY_IMPL(torch_nn, PrivateUse2, m) { // in inference mode
  take_chunked(m);
}

} // namespace shardtensor
