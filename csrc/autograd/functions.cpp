#include "autograd/functions.h"

#include "dispatch/check.h"
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

// Lists of numbers alone come back from a saved IValue as such.
SymSizes symbols_of(const c10::IValue& list) {
  return list.isIntList() ? symbols(list.toIntVector()) : list.toSymIntVector();
}

at::Tensor as_dtype(const at::Tensor& t, const std::optional<at::ScalarType>& dtype) {
  return dtype && *dtype != t.scalar_type() ? t.to(*dtype) : t;
}

// No autograd: the data moves, the result is fresh.
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
    // What is on its way cannot be laid out anew. It comes one dim after the other.
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
    auto grad = as_dtype(grads[0], backward_dtype.isNone() ? std::nullopt : std::optional(backward_dtype.toScalarType()));
    grad = redistribute(grad, held(ctx->saved_data["from"]), {}, {}, ctx->saved_data["async"].toBool());
    return {as_dtype(grad, ctx->saved_data["dtype"].toScalarType()), at::Tensor(), at::Tensor(), at::Tensor()};
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

// A gradient that comes to from_local in another layout than its input had.
void tell_of_gradient(const at::Tensor& grad, const Layout& want) {
  static const std::string op = "from_local", argument = "gradient";
  const auto* impl = as_shard_tensor(grad);
  if (impl && &impl->layout() != &want) {
    tell_watcher(op, argument, "its input had another layout", impl->layout(), want, grad);
  }
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
    ctx->saved_data["grad_layout"] = grad_layout;
    return made(local, held(layout), sizes, strides);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    auto grad = grads[0];
    if (grad.defined()) {
      const auto& want = held(ctx->saved_data["grad_layout"]);
      tell_of_gradient(grad, *want);
      grad = to_local(redistribute(grad, want));
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
  if (!grad_layout) {
    grad_layout = without_partial(layout);
  }
  return FromLocal::apply(local, hold(std::move(layout)), sizes.vec(), strides.vec(), hold(std::move(grad_layout)));
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
    const auto& local = self.local(); // not the piece itself: to_local().unsqueeze_(0) is no business of the ShardTensor's
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
  if (&self.layout() == layout.get() && !cast && !backward_dtype) {
    return t;
  }
  if (!t.requires_grad() || !at::GradMode::is_enabled()) {
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
