#include "autograd/functions.h"

#include "dispatch/check.h"
#include "dispatch/localize.h"
#include "dispatch/traced.h"
#include "redistribute/redistribute.h"
#include "redistribute/watch.h"
#include "tensor/shard_tensor.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/custom_function.h>

namespace shardtensor {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Held final : torch::CustomClassHolder {
  explicit Held(LayoutPtr l) : layout(std::move(l)) {}
  LayoutPtr layout;
};

c10::IValue hold(LayoutPtr layout) {
  return c10::IValue::make_capsule(c10::make_intrusive<Held>(std::move(layout)));
}
const LayoutPtr& held(const c10::IValue& value) {
  return c10::static_intrusive_pointer_cast<Held>(value.toCapsule())->layout;
}

// A list that has only numbers comes back from a saved IValue as an int list.
SymSizes symbols_of(const c10::IValue& list) {
  return list.isIntList() ? symbols(list.toIntVector()) : list.toSymIntVector();
}

at::Tensor as_dtype(const at::Tensor& t, const std::optional<at::ScalarType>& dtype) {
  return dtype && *dtype != t.scalar_type() ? t.to(*dtype) : t;
}

// Without autograd: moves the data into a new tensor.
at::Tensor move(const at::Tensor& t, const LayoutPtr& layout, bool async) {
  const auto& self = shard_tensor(t, "redistribute");
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  if (check::on() && &self.layout().mesh() == &layout->mesh()) {
    check::same_call(
        c10::str("redistribute(", t.scalar_type(), " ", t.sym_sizes(), " ", self.layout().str(), " to ", layout->str(), ")"),
        layout->mesh(), self.local());
  }
  comm::Completion completion;
  auto local = moved_once(self, layout, [&] {
    return self.is_symbolic() ? redistribute(self.local(), self.layout(), *layout, t.sym_sizes())
                              : redistribute(self.local(), self.layout(), *layout, t.sizes(), async ? &completion : nullptr);
  });
  // Never a silent alias: writing to the result must not reach the input.
  if (&self.layout() != layout.get() && local.is_alias_of(self.local())) {
    local = local.clone();
  }
  at::Tensor out;
  if (self.is_symbolic()) {
    out = wrap_symbolic(std::move(local), layout, t.sym_sizes(), sym_strides_like(t.sym_sizes(), t));
  } else {
    // A pending piece cannot be copied into another order, so it is contiguous.
    const auto strides = async ? dense_strides(t.sizes(), {}) : strides_like(t.sizes(), t);
    out = wrap(completion ? std::move(local) : laid(std::move(local), strides), layout, t.sizes(), strides);
  }
  if (completion) {
    as_shard_tensor(out)->set_pending(c10::make_intrusive<Pending>(std::move(completion)));
  }
  if (check::on() && !async) {
    check::result("redistribute", out);
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

struct Redistribute : torch::autograd::Function<Redistribute> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& t, c10::IValue to, c10::IValue dtypes, bool async) {
    const auto& self = shard_tensor(t, "redistribute");
    const auto pair = dtypes.toList();
    const auto dtype_at = [&](size_t i) {
      const c10::IValue v = pair.get(i);
      return v.isNone() ? std::nullopt : std::optional(v.toScalarType());
    };
    ctx->set_materialize_grads(false);
    ctx->saved_data["from"] = hold(without_partial(self.layout_ptr()));
    ctx->saved_data["dtype"] = t.scalar_type();
    ctx->saved_data["backward_dtype"] = pair.get(1);
    ctx->saved_data["async"] = async;
    return move(as_dtype(t, dtype_at(0)), held(to), async);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) {
      return {at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
    }
    const auto& backward_dtype = ctx->saved_data["backward_dtype"];
    const auto grad = moved_back(
        grads[0], held(ctx->saved_data["from"]),
        backward_dtype.isNone() ? std::nullopt : std::optional(backward_dtype.toScalarType()),
        ctx->saved_data["dtype"].toScalarType(), ctx->saved_data["async"].toBool());
    return {grad, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

at::Tensor made(const at::Tensor& local, const LayoutPtr& layout, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  if (check::on()) {
    check::same_call(c10::str("from_local(", local.scalar_type(), " ", sizes, " ", layout->str(), ")"), layout->mesh(), local);
  }
  auto out = wrap_symbolic(local.detach(), layout, sizes, strides);
  if (check::on()) {
    check::result("from_local", out);
  }
  return out;
}

// Reports a gradient that arrives at from_local in another layout than its input had.
void tell_of_gradient(const at::Tensor& grad, const Layout& want) {
  static const std::string op = "from_local", argument = "gradient";
  const auto* impl = as_shard_tensor(grad);
  if (impl && &impl->layout() != &want) {
    tell_watcher(op, argument, "its input had another layout", impl->layout(), want, grad);
  }
}

// The number of ranks over whose summands an element is averaged.
int64_t averaged(const Layout& layout) {
  int64_t n = 1;
  for (int64_t m = 0; m < layout.ndim(); ++m) {
    const auto& p = layout.placement(m);
    n *= p.is_partial() && p.reduce == ReduceOp::Avg ? layout.mesh().size(m) : 1;
  }
  return n;
}

// The first mesh dim whose summands are maxima, minima, factors or norms, or -1. The gradient of such a summand depends on the
// others.
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
      sym_strides_like(all_sizes, at::Tensor()));
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
    ctx->saved_data["grad_layout"] = told ? grad_layout : hold(without_partial(have));
    ctx->saved_data["averaged"] = told ? 1 : averaged(*have);
    return made(local, have, sizes, strides);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    auto grad = grads[0];
    if (grad.defined()) {
      const auto& want = held(ctx->saved_data["grad_layout"]);
      tell_of_gradient(grad, *want);
      grad = to_local(redistribute(grad, want));
      if (const auto n = ctx->saved_data["averaged"].toInt(); n > 1) {
        grad = grad / n;
      }
    }
    return {grad, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
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
      if (const auto numbers = c10::asIntArrayRefSlowOpt(sizes); numbers && !is_symbolic(grad)) {
        const auto want = layout->local_sizes(*numbers);
        TORCH_CHECK(
            grad.sizes() == c10::IntArrayRef(want), "to_local: the gradient on rank ", layout->mesh().rank(), " has sizes ",
            grad.sizes(), ", but under ", layout->str(), " a tensor of sizes ", *numbers, " has ", c10::IntArrayRef(want),
            " there; pass grad_placements that fit");
        if (const auto order = c10::asIntArrayRefSlowOpt(strides)) {
          grad = laid(std::move(grad), *order);
        }
      }
      grad = from_local(grad, layout, sizes, strides);
    }
    return {grad, at::Tensor()};
  }
};

} // namespace

LayoutPtr without_partial(const LayoutPtr& layout) {
  auto out = layout;
  for (int64_t m = 0; m < layout->ndim(); ++m) {
    if (layout->placement(m).is_partial()) {
      out = out->with(m, Placement::replicate());
    }
  }
  return out;
}

at::Tensor from_local(
    const at::Tensor& local, LayoutPtr layout, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, LayoutPtr grad_layout) {
  if (!local.requires_grad() || !at::GradMode::is_enabled()) {
    return made(local, layout, sizes, strides);
  }
  if (const auto m = entangled(*layout); m >= 0 && !grad_layout && layout->mesh().has_me()) {
    return reduced_over_ranks(local, layout, sizes, m);
  }
  auto told = grad_layout ? hold(std::move(grad_layout)) : c10::IValue();
  return FromLocal::apply(local, hold(std::move(layout)), sizes.vec(), strides.vec(), std::move(told));
}

at::Tensor from_local(
    const at::Tensor& local, LayoutPtr layout, c10::IntArrayRef sizes, c10::IntArrayRef strides, LayoutPtr grad_layout) {
  if (!local.requires_grad() || !at::GradMode::is_enabled()) {
    return check::on() ? made(local, layout, symbols(sizes), symbols(strides))
                       : wrap(local.detach(), std::move(layout), sizes, strides);
  }
  return from_local(local, std::move(layout), symbols(sizes), symbols(strides), std::move(grad_layout));
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
    // A view, so that it can be written. The gradient still moves: it may arrive in any layout.
    auto out = at::alias(t);
    out.register_hook([from = without_partial(layout), backward_dtype, dtype = t.scalar_type(), async](const at::Tensor& grad) {
      return grad.defined() ? moved_back(grad, from, backward_dtype, dtype, async) : grad;
    });
    return out;
  }
  if (!records) {
    return move(as_dtype(t, forward_dtype), layout, async);
  }
  c10::List<c10::IValue> dtypes(c10::AnyType::get());
  dtypes.push_back(forward_dtype ? c10::IValue(*forward_dtype) : c10::IValue());
  dtypes.push_back(backward_dtype ? c10::IValue(*backward_dtype) : c10::IValue());
  return Redistribute::apply(t, hold(std::move(layout)), c10::IValue(dtypes), async);
}

at::Tensor whole(const at::Tensor& t) {
  const auto* impl = as_shard_tensor(t);
  return impl ? to_local(redistribute(t, Layout::replicated(impl->layout().mesh_ptr()))) : t;
}

} // namespace shardtensor
