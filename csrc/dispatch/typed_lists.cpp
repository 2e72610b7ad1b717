#include "dispatch/call.h"
#include "dispatch/errors.h"
#include "dispatch/lists.h"

#include <ATen/ATen.h>
#include <ATen/core/boxing/impl/boxing.h>

#include <array>
#include <string>
#include <unordered_map>

namespace shardtensor {

namespace {

using at::Tensor;
using at::TensorList;
using torch::jit::Stack;

// ---- whether an argument is as the quick way needs it; local tensors of a list go to `locals` ----

// Every index has the layout and the shape that it has in the first list, without summands.
bool stays(const Op& op, size_t arg, TensorList list, TensorList first, std::vector<Tensor>& locals) {
  if (list.empty()) {
    return true; // amsgrad's, or momentum's
  }
  if (list.size() != first.size()) {
    return false;
  }
  locals.reserve(list.size());
  const bool written = op.mutated >> arg & 1;
  for (size_t n = 0; n < list.size(); ++n) {
    const auto& t = list[n];
    const auto* impl = as_shard_tensor(t);
    const auto* lead = as_shard_tensor(first[n]);
    if (!lead || (written && (!impl || impl->broken_view()))) {
      return false;
    }
    if (!impl) {
      if (t.dim() != 0) {
        return false;
      }
      locals.push_back(t);
      continue;
    }
    if (impl->layout().has_partial() || impl->layout_ptr() != lead->layout_ptr() || impl->sizes() != lead->sizes()) {
      return false;
    }
    locals.push_back(impl->local());
  }
  return true;
}
bool stays(const Op&, size_t, const Tensor& t, TensorList, std::vector<Tensor>&) {
  return t.dim() == 0 && !as_shard_tensor(t);
}
bool stays(const Op& op, size_t arg, const std::optional<Tensor>& t, TensorList first, std::vector<Tensor>& locals) {
  return !t || !t->defined() || stays(op, arg, *t, first, locals);
}
template <typename T>
bool stays(const Op&, size_t, const T&, TensorList, std::vector<Tensor>&) {
  return true;
}

TensorList localized(TensorList given, const std::vector<Tensor>& locals) {
  return given.empty() ? given : TensorList(locals);
}
template <typename T>
const T& localized(const T& given, const std::vector<Tensor>&) {
  return given;
}

template <typename Signature>
class TypedList;

template <typename Result, typename... Args>
class TypedList<Result(TensorList, Args...)> final : public c10::OperatorKernel {
 public:
  explicit TypedList(const Op& op) : op_(op), call_(op.handle.typed<Result(TensorList, Args...)>()) {}

  Result operator()(TensorList first, Args... args) {
    return run(std::index_sequence_for<Args...>(), first, args...);
  }

 private:
  template <size_t... I>
  Result run(std::index_sequence<I...>, TensorList first, Args... args) {
    std::array<std::vector<Tensor>, sizeof...(Args) + 1> locals;
    std::vector<rules::SolutionPtr> solutions;
    if (!stays(op_, 0, first, first, locals[0]) || !(stays(op_, I + 1, args, first, locals[I + 1]) && ...)) {
      return boxed(first, args...);
    }
    if constexpr (std::is_void_v<Result>) {
      c10::impl::ExcludeDispatchKeyGuard below(kBelow);
      call_.call(localized(first, locals[0]), localized(args, locals[I + 1])...);
    } else {
      if (!op_.entry->options.elementwise && !solve_each(first, locals[0], solutions, args...)) {
        return boxed(first, args...);
      }
      c10::impl::ExcludeDispatchKeyGuard below(kBelow);
      auto results = call_.call(localized(first, locals[0]), localized(args, locals[I + 1])...);
      for (size_t n = 0; n < results.size(); ++n) {
        results[n] = solutions.empty() ? like(first[n], std::move(results[n]))
                                       : wrap_result(op_, std::move(results[n]), *solutions[n], 0, {Ref(0, 0, first[n])});
      }
      return results;
    }
  }

  // An elementwise op's result lies where its argument does.
  static Tensor like(const Tensor& lead, Tensor&& local) {
    const auto strides = strides_like(lead.sizes(), local);
    return wrap(std::move(local), as_shard_tensor(lead)->layout_ptr(), lead.sizes(), strides);
  }

  // For one list: what each index's rule says. False where something has to move, or an empty piece needs a kernel.
  bool solve_each(
      TensorList first, const std::vector<Tensor>& locals, std::vector<rules::SolutionPtr>& solutions, Args... args) const {
    const Stack stack = c10::impl::boxArgs<TensorList, Args...>(TensorList(), args...);
    solutions.reserve(first.size());
    for (size_t n = 0; n < first.size(); ++n) {
      solutions.push_back(find_solution(op_, stack, 0, {Ref(0, 0, first[n])}));
      if (solutions.back()->moves || (solutions.back()->empty_kernel && locals[n].numel() == 0)) {
        return false;
      }
    }
    return true;
  }

  Result boxed(TensorList first, Args... args) {
    Stack stack = c10::impl::boxArgs<TensorList, Args...>(first, args...);
    handle_lists(op_, &stack);
    if constexpr (!std::is_void_v<Result>) {
      return c10::impl::PopResult<Result>::call(stack);
    }
  }

  const Op& op_;
  c10::TypedOperatorHandle<Result(TensorList, Args...)> call_;
};

template <typename Signature>
c10::KernelFunction make(const Op& op) {
  return c10::KernelFunction::makeFromUnboxedFunctor<false, TypedList<Signature>>(std::make_unique<TypedList<Signature>>(op));
}

using Make = c10::KernelFunction (*)(const Op&);
using Table = std::unordered_map<std::string, Make>;

template <typename Signature>
void add(Table& table, std::initializer_list<const char*> ops) {
  for (const char* op : ops) {
    table.emplace(std::string("aten::") + op, &make<Signature>);
  }
}

// One line per signature: what torch.optim and clip_grad_norm_ call. Any other list op is right without.
Table make_table() {
  using List = TensorList;
  using Lists = std::vector<Tensor>;
  using Scalar = c10::Scalar;
  using Scalars = at::ArrayRef<c10::Scalar>;
  using Maybe = std::optional<Tensor>;
  Table t;
  add<void(List)>(t, {"_foreach_neg_", "_foreach_reciprocal_", "_foreach_sqrt_", "_foreach_zero_"});
  add<void(List, const Scalar&)>(
      t,
      {"_foreach_add_.Scalar", "_foreach_div_.Scalar", "_foreach_mul_.Scalar", "_foreach_pow_.Scalar", "_foreach_sub_.Scalar"});
  add<void(List, Scalars)>(t, {"_foreach_add_.ScalarList", "_foreach_div_.ScalarList", "_foreach_mul_.ScalarList"});
  add<void(List, const Tensor&)>(t, {"_foreach_div_.Tensor", "_foreach_mul_.Tensor"});
  add<void(List, List)>(t, {"_foreach_div_.List", "_foreach_maximum_.List", "_foreach_mul_.List"});
  add<void(List, List, const Scalar&)>(t, {"_foreach_add_.List", "_foreach_lerp_.Scalar", "_foreach_sub_.List"});
  add<void(List, List, bool)>(t, {"_foreach_copy_"});
  add<void(List, List, List, const Scalar&)>(t, {"_foreach_addcdiv_.Scalar", "_foreach_addcmul_.Scalar"});
  add<void(List, List, List, Scalars)>(t, {"_foreach_addcdiv_.ScalarList", "_foreach_addcmul_.ScalarList"});
  add<Lists(List)>(t, {"_foreach_abs", "_foreach_neg", "_foreach_sqrt"});
  add<Lists(List, const Scalar&)>(t, {"_foreach_add.Scalar", "_foreach_div.Scalar", "_foreach_mul.Scalar"});
  add<Lists(List, Scalars)>(t, {"_foreach_div.ScalarList", "_foreach_mul.ScalarList"});
  add<Lists(List, List)>(t, {"_foreach_div.List", "_foreach_mul.List"});
  add<Lists(List, List, const Scalar&)>(t, {"_foreach_add.List", "_foreach_sub.List"});
  add<Lists(List, const Scalar&, std::optional<at::ScalarType>)>(t, {"_foreach_norm.Scalar"});
  add<void(List, List, List, List, List, List, double, double, double, double, double, bool, bool, const Maybe&, const Maybe&)>(
      t, {"_fused_adam_", "_fused_adamw_"});
  add<void(
      List, List, List, List, List, List, const Tensor&, double, double, double, double, bool, bool, const Maybe&, const Maybe&)>(
      t, {"_fused_adam_.tensor_lr", "_fused_adamw_.tensor_lr"});
  add<void(List, List, List, double, double, double, double, bool, bool, bool, const Maybe&, const Maybe&)>(t, {"_fused_sgd_"});
  return t;
}

} // namespace

std::optional<c10::KernelFunction> typed_list_kernel(const Op& op) {
  static const Table table = make_table();
  const auto it = table.find(op.name);
  return it == table.end() ? std::nullopt : std::optional(it->second(op));
}

} // namespace shardtensor
