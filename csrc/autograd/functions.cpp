#include "autograd/functions.h"

#include "dispatch/check.h"
#include "kernels/boxes.h"
#include "tensor/move.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/custom_function.h>

namespace shardtensor {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct LayoutHolder final : torch::CustomClassHolder {
  explicit LayoutHolder(std::vector<LayoutPtr> l) : layouts(std::move(l)) {}
  std::vector<LayoutPtr> layouts;
};

c10::IValue hold(std::vector<LayoutPtr> layouts) {
  return c10::IValue::make_capsule(c10::make_intrusive<LayoutHolder>(std::move(layouts)));
}
c10::IValue hold(LayoutPtr layout) {
  return hold(std::vector<LayoutPtr>{std::move(layout)});
}
const std::vector<LayoutPtr>& held_all(const c10::IValue& value) {
  return c10::static_intrusive_pointer_cast<LayoutHolder>(value.toCapsule())->layouts;
}
const LayoutPtr& held(const c10::IValue& value) {
  return held_all(value)[0];
}

// A list that has only numbers comes back from a saved IValue as an int list.
SymSizes symbols_of(const c10::IValue& list) {
  return list.isIntList() ? symbols(list.toIntVector()) : list.toSymIntVector();
}

at::Tensor as_dtype(const at::Tensor& t, const std::optional<at::ScalarType>& dtype) {
  return dtype && *dtype != t.scalar_type() ? t.to(*dtype) : t;
}

void check_same_move(const at::Tensor& t, const LayoutPtr& layout) {
  const auto& self = shard_tensor(t, "redistribute");
  if (check::on() && &self.layout().mesh() == &layout->mesh()) {
    check::same_call(
        c10::str("redistribute(", t.scalar_type(), " ", t.sym_sizes(), " ", self.layout().str(), " to ", layout->str(), ")"),
        layout->mesh(), self.local());
  }
}

// Without autograd: moves the data into a new tensor.
at::Tensor move(const at::Tensor& t, const LayoutPtr& layout, bool async) {
  check_same_move(t, layout);
  auto out = moved(t, layout, {}, async);
  if (check::on() && !async) {
    check::result("redistribute", out);
  }
  return out;
}

// The same for several.
std::vector<at::Tensor> move_all(const std::vector<at::Tensor>& tensors, const std::vector<LayoutPtr>& layouts, bool async) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_same_move(tensors[i], layouts[i]);
  }
  auto out = moved(tensors, layouts, {}, async);
  for (size_t i = 0; check::on() && !async && i < out.size(); ++i) {
    check::result("redistribute", out[i]);
  }
  return out;
}

// Moves the gradient of a tensor that came from one of layout `from` and of `dtype`.
at::Tensor moved_back(
    const at::Tensor& grad,
    const LayoutPtr& from,
    std::optional<at::ScalarType> backward_dtype,
    at::ScalarType dtype,
    bool async) {
  return as_dtype(redistribute(as_dtype(grad, backward_dtype), from, {}, {}, async), dtype);
}

std::optional<at::ScalarType> dtype_of(const c10::IValue& value) {
  return value.isNone() ? std::nullopt : std::optional(value.toScalarType());
}
c10::IValue value_of(const std::optional<at::ScalarType>& dtype) {
  return dtype ? c10::IValue(*dtype) : c10::IValue();
}

// Several at once; their gradients too, when all have arrived.
struct Redistribute : torch::autograd::Function<Redistribute> {
  static variable_list forward(
      AutogradContext* ctx,
      at::TensorList tensors,
      c10::IValue to,
      c10::IValue forward_dtype,
      c10::IValue backward_dtype,
      bool async) {
    std::vector<LayoutPtr> from;
    std::vector<int64_t> dtypes;
    variable_list cast;
    for (const auto& t : tensors) {
      from.push_back(without_partial(shard_tensor(t, "redistribute").layout_ptr()));
      dtypes.push_back(static_cast<int64_t>(t.scalar_type()));
      cast.push_back(as_dtype(t, dtype_of(forward_dtype)));
    }
    ctx->set_materialize_grads(false);
    ctx->saved_data["from"] = hold(std::move(from));
    ctx->saved_data["dtypes"] = dtypes;
    ctx->saved_data["backward_dtype"] = backward_dtype;
    ctx->saved_data["async"] = async;
    auto out = move_all(cast, held_all(to), async);
    variable_list constant;
    for (size_t i = 0; i < out.size(); ++i) {
      if (!tensors[i].requires_grad()) {
        constant.push_back(out[i]);
      }
    }
    ctx->mark_non_differentiable(constant);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto& from = held_all(ctx->saved_data["from"]);
    const auto dtypes = ctx->saved_data["dtypes"].toIntVector();
    const auto backward_dtype = dtype_of(ctx->saved_data["backward_dtype"]);
    variable_list there;
    std::vector<LayoutPtr> layouts;
    std::vector<size_t> index;
    for (size_t i = 0; i < grads.size(); ++i) {
      if (grads[i].defined()) {
        there.push_back(as_dtype(grads[i], backward_dtype));
        layouts.push_back(from[i]);
        index.push_back(i);
      }
    }
    const auto back = redistribute_all(there, layouts, {}, {}, ctx->saved_data["async"].toBool());
    variable_list out(grads.size() + 4);
    for (size_t n = 0; n < index.size(); ++n) {
      out[index[n]] = as_dtype(back[n], static_cast<at::ScalarType>(dtypes[index[n]]));
    }
    return out;
  }
};

// Computes a lazy conjugate or negative: this rank does not know whether the other ranks' pieces have one.
at::Tensor detached(const at::Tensor& local) {
  return kernels::resolved(local.detach());
}

at::Tensor made(const at::Tensor& local, const LayoutPtr& layout, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  if (check::on()) {
    check::same_call(c10::str("from_local(", local.scalar_type(), " ", sizes, " ", layout->str(), ")"), layout->mesh(), local);
  }
  auto out = wrap_symbolic(detached(local), layout, sizes, strides);
  if (check::on()) {
    check::result("from_local", out);
  }
  return out;
}

// The number of ranks over whose summands an element is averaged.
int64_t averaged(const Layout& layout) {
  return layout.ranks_where([&](int64_t m) {
    const auto& p = layout.placement(m);
    return p.is_partial() && p.reduce == ReduceOp::Avg;
  });
}

// `grad_layout`, with Partial along mesh dims where `layout` has Partial and `grad_layout` has Replicate. Each rank's summand
// has the whole gradient, so the second derivatives that ranks compute from it are summands.
LayoutPtr layout_of_second(const LayoutPtr& grad_layout, const Layout& layout) {
  const auto is_such = [&](int64_t m) { return layout.placement(m).is_partial() && grad_layout->placement(m).is_replicate(); };
  return grad_layout->with_where(is_such, Placement::partial(ReduceOp::Sum));
}

// The first mesh dim whose summands are maxima, minima, factors or norms, or -1. The gradient of such a summand depends on
// other ranks' summands.
int64_t entangled(const Layout& layout) {
  for (int64_t m = 0; m < layout.ndim(); ++m) {
    const auto& p = layout.placement(m);
    if (p.is_partial() && p.reduce != ReduceOp::Sum && p.reduce != ReduceOp::Avg) {
      return m;
    }
  }
  return -1;
}

// Reduces the summands of mesh dim `m` as a tensor with one dim for the ranks: torch knows the gradient of that reduction.
at::Tensor reduced_over_ranks(const at::Tensor& local, const LayoutPtr& layout, c10::SymIntArrayRef sizes, int64_t m) {
  auto placements = layout->placements();
  for (auto& p : placements) {
    p.dim = static_cast<int16_t>(p.is_shard() ? p.dim + 1 : p.dim);
  }
  const auto summand = std::exchange(placements[m], Placement::shard(0));
  auto all_sizes = sizes.vec();
  all_sizes.insert(all_sizes.begin(), layout->mesh().size(m));
  const auto all = from_local(
      local.unsqueeze(0), Layout::make(layout->mesh_ptr(), std::move(placements), layout->cuts()), all_sizes,
      strides_like(all_sizes, at::Tensor()));
  static constexpr int64_t kRanks = 0; // their dim
  const auto out = summand.reduce == ReduceOp::Max   ? at::amax(all, kRanks)
                   : summand.reduce == ReduceOp::Min ? at::amin(all, kRanks)
                   : summand.reduce == ReduceOp::Product
                       ? at::prod(all, kRanks)
                       : at::linalg_vector_norm(all, summand.norm_order, c10::IntArrayRef(kRanks));
  return shard_tensor(out, "from_local").layout_ptr() == layout ? out : redistribute(out, layout);
}

struct FromLocal : torch::autograd::Function<FromLocal> {
  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& local,
      c10::IValue layout,
      SymSizes sizes,
      SymSizes strides,
      c10::IValue grad_layout) {
    ctx->set_materialize_grads(false);
    const auto& have = held(layout);
    const bool told = !grad_layout.isNone();
    const auto want = told ? held(grad_layout) : without_partial(have);
    ctx->saved_data["grad_layout"] = hold(want);
    ctx->saved_data["second_layout"] = hold(layout_of_second(want, *have));
    ctx->saved_data["averaged"] = told ? 1 : averaged(*have);
    return made(local, have, sizes, strides);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    auto grad = grads[0];
    if (grad.defined()) {
      const auto& want = held(ctx->saved_data["grad_layout"]);
      grad = to_local(
          redistribute_for({"from_local", "gradient", "its input had another layout"}, grad, want),
          held(ctx->saved_data["second_layout"]));
      if (const auto n = ctx->saved_data["averaged"].toInt(); n > 1) {
        grad = grad / n;
      }
    }
    return {grad, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

struct ShardedGradient : torch::autograd::Function<ShardedGradient> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& t) {
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({t});
    return t.clone();
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto& grad = grads[0];
    return {grad.defined() && !as_shard_tensor(grad) ? at::zeros_like(ctx->get_saved_variables()[0]) : grad};
  }
};

struct ToLocal : torch::autograd::Function<ToLocal> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& t, c10::IValue grad_layout) {
    const auto& self = shard_tensor(t, "to_local");
    ctx->set_materialize_grads(false);
    ctx->saved_data["grad_layout"] = grad_layout;
    ctx->saved_data["sizes"] = t.sym_sizes();
    ctx->saved_data["strides"] = t.sym_strides();
    return self.local().view_as(self.local());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    auto grad = grads[0];
    if (grad.defined()) {
      const auto sizes = symbols_of(ctx->saved_data["sizes"]), strides = symbols_of(ctx->saved_data["strides"]);
      const auto& layout = held(ctx->saved_data["grad_layout"]);
      if (const auto numbers = c10::asIntArrayRefSlowOpt(sizes);
          numbers && !is_symbolic(grad) && layout->mesh().has_this_rank()) {
        const auto want = layout->local_sizes(*numbers);
        TORCH_CHECK(
            grad.sizes() == c10::IntArrayRef(want), "to_local: the gradient on rank ", layout->mesh().rank(), " has sizes ",
            grad.sizes(), ", but under ", layout->str(), " a tensor of sizes ", *numbers, " has ", c10::IntArrayRef(want),
            " there; pass grad_placements that fit");
        if (const auto order = c10::asIntArrayRefSlowOpt(strides)) {
          grad = in_dim_order(std::move(grad), *order);
        }
      }
      grad = from_local(grad, layout, sizes, strides);
    }
    return {grad, at::Tensor()};
  }
};

} // namespace

at::Tensor with_sharded_gradient(const at::Tensor& t) {
  return ShardedGradient::apply(t);
}

at::Tensor from_local(
    const at::Tensor& local, LayoutPtr layout, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, LayoutPtr grad_layout) {
  if (!local.requires_grad() || !at::GradMode::is_enabled()) {
    return made(local, layout, sizes, strides);
  }
  if (const auto m = entangled(*layout); m >= 0 && !grad_layout && layout->mesh().has_this_rank()) {
    return reduced_over_ranks(local, layout, sizes, m);
  }
  auto told = grad_layout ? hold(std::move(grad_layout)) : c10::IValue();
  return FromLocal::apply(local, hold(std::move(layout)), sizes.vec(), strides.vec(), std::move(told));
}

at::Tensor from_local(
    const at::Tensor& local, LayoutPtr layout, c10::IntArrayRef sizes, c10::IntArrayRef strides, LayoutPtr grad_layout) {
  if (!local.requires_grad() || !at::GradMode::is_enabled()) {
    return check::on() ? made(local, layout, symbols(sizes), symbols(strides))
                       : wrap(detached(local), std::move(layout), sizes, strides);
  }
  return from_local(local, std::move(layout), symbols(sizes), symbols(strides), std::move(grad_layout));
}

at::Tensor from_local_of_equal_pieces(const at::Tensor& local, LayoutPtr layout, LayoutPtr grad_layout) {
  const auto& mesh = layout->mesh();
  for (int64_t m = 0; m < layout->ndim(); ++m) {
    if (layout->placement(m).is_shard() && mesh.size(m) > 1) {
      mesh.note_equal_piece(m, local.sizes());
    }
  }
  const auto sizes = layout->sizes_of_equal_pieces(Sizes(local.sizes().begin(), local.sizes().end()));
  return from_local(local, std::move(layout), sizes, strides_like(sizes, local), std::move(grad_layout));
}

at::Tensor to_local(const at::Tensor& t, LayoutPtr grad_layout) {
  const auto& self = shard_tensor(t, "to_local");
  if (!t.requires_grad()) {
    const auto& local = self.local(); // return an alias: to_local().unsqueeze_(0) must not change the ShardTensor
    return local.key_set().has(c10::DispatchKey::Python) ? local : at::alias(local);
  }
  if (!grad_layout) {
    grad_layout = without_partial(self.layout_ptr());
  }
  return ToLocal::apply(t, hold(std::move(grad_layout)));
}

at::Tensor redistribute(
    const at::Tensor& t,
    LayoutPtr layout,
    std::optional<at::ScalarType> forward_dtype,
    std::optional<at::ScalarType> backward_dtype,
    bool async) {
  const auto& self = shard_tensor(t, "redistribute");
  const bool cast = forward_dtype && *forward_dtype != t.scalar_type();
  const bool records = t.requires_grad() && at::GradMode::is_enabled();
  if (&self.layout() == layout.get() && !cast) {
    if (!records) {
      return t;
    }
    // Returns a view, so that the result can be written. The gradient still moves, because it may arrive in any layout.
    auto out = at::alias(t);
    out.register_hook([from = without_partial(layout), backward_dtype, dtype = t.scalar_type(), async](const at::Tensor& grad) {
      return grad.defined() ? moved_back(grad, from, backward_dtype, dtype, async) : grad;
    });
    return out;
  }
  if (!records) {
    return move(as_dtype(t, forward_dtype), layout, async);
  }
  return Redistribute::apply(
      at::TensorList(t), hold(std::move(layout)), value_of(forward_dtype), value_of(backward_dtype), async)[0];
}

at::Tensor redistribute_for(const MoveCause& cause, const at::Tensor& t, LayoutPtr layout) {
  const auto& have = shard_tensor(t, "redistribute").layout();
  if (&have != layout.get()) {
    tell_watcher(cause, have, *layout, t.sym_sizes(), t.element_size());
  }
  return redistribute(t, std::move(layout));
}

std::vector<at::Tensor> redistribute_all(
    const std::vector<at::Tensor>& tensors,
    const std::vector<LayoutPtr>& layouts,
    std::optional<at::ScalarType> forward_dtype,
    std::optional<at::ScalarType> backward_dtype,
    bool async) {
  TORCH_CHECK_VALUE(tensors.size() == layouts.size(), "redistribute: ", tensors.size(), " tensors, ", layouts.size(), " layouts");
  std::vector<at::Tensor> out(tensors.size());
  struct MoveGroup {
    std::vector<at::Tensor> tensors;
    std::vector<LayoutPtr> layouts;
    std::vector<size_t> index;
  };
  MoveGroup moving;
  bool records = false;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& t = tensors[i];
    const bool stays = shard_tensor(t, "redistribute").layout_ptr() == layouts[i];
    if (stays && (!forward_dtype || *forward_dtype == t.scalar_type())) {
      out[i] = redistribute(t, layouts[i], forward_dtype, backward_dtype, async);
      continue;
    }
    records = records || (t.requires_grad() && at::GradMode::is_enabled());
    moving.tensors.push_back(t);
    moving.layouts.push_back(layouts[i]);
    moving.index.push_back(i);
  }
  if (!records) {
    for (auto& t : moving.tensors) {
      t = as_dtype(t, forward_dtype);
    }
  }
  auto moved = !records ? move_all(moving.tensors, moving.layouts, async)
                        : Redistribute::apply(
                              at::TensorList(moving.tensors), hold(moving.layouts), value_of(forward_dtype),
                              value_of(backward_dtype), async);
  for (size_t n = 0; n < moved.size(); ++n) {
    out[moving.index[n]] = std::move(moved[n]);
  }
  return out;
}

at::Tensor whole(const at::Tensor& t) {
  const auto* impl = as_shard_tensor(t);
  return impl ? to_local(redistribute(t, Layout::replicated(impl->layout().mesh_ptr()))) : t;
}

} // namespace shardtensor
