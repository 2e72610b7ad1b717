#include "dispatch/call.h"
#include "dispatch/check.h"
#include "dispatch/excluded_keys.h"
#include "dispatch/kernel_table.h"
#include "dispatch/lists.h"
#include "tensor/lists.h"
#include "tensor/move.h"
#include "tensor/versions.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/boxing/impl/boxing.h>

#include <array>

namespace shardtensor {

namespace {

using at::Tensor;
using at::TensorList;
using torch::jit::Stack;

// ---- whether an argument fits the fast path; local tensors of a list go to `locals` ----

// Whether every index has the same layout and shape as in the first list, without summands.
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
    if (!lead || (written && (!impl || impl->is_detached_view() || at::has_internal_overlap(t) == at::MemOverlap::Yes))) {
      return false;
    }
    if (!impl) {
      if (t.dim() != 0) {
        return false;
      }
      locals.push_back(t);
      continue;
    }
    if (!can_combine_locally(*impl, *lead) || (op.entry->options.dense && !same_dense_order(impl->local(), lead->local()))) {
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

void note_writes(const Op& op, size_t arg, TensorList list) {
  for (size_t n = 0; (op.mutated >> arg & 1) && n < list.size(); ++n) {
    if (auto* impl = as_shard_tensor(list[n])) {
      note_write_in_list(*impl);
    }
  }
}
template <typename T>
void note_writes(const Op&, size_t, const T&) {}

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
    if (check::on() || !stays(op_, 0, first, first, locals[0]) || !(stays(op_, I + 1, args, first, locals[I + 1]) && ...)) {
      return boxed(first, args...);
    }
    if constexpr (std::is_void_v<Result>) {
      c10::impl::ExcludeDispatchKeyGuard below(kBelow);
      call_.call(localized(first, locals[0]), localized(args, locals[I + 1])...);
      note_writes(op_, 0, first);
      (note_writes(op_, I + 1, args), ...);
    } else {
      if (!op_.entry->options.elementwise && !solve_each(first, locals[0], solutions, args...)) {
        return boxed(first, args...);
      }
      c10::impl::ExcludeDispatchKeyGuard below(kBelow);
      auto results = call_.call(localized(first, locals[0]), localized(args, locals[I + 1])...);
      for (size_t n = 0; n < results.size(); ++n) {
        results[n] = solutions.empty() ? with_piece(first[n], std::move(results[n]), as_shard_tensor(first[n])->layout_ptr())
                                       : wrap_result(op_, std::move(results[n]), *solutions[n], 0, {Ref(0, 0, first[n])});
      }
      return results;
    }
  }

  // For one list: solves each index. False if something has to move, or a piece needs a kernel.
  bool solve_each(
      TensorList first, const std::vector<Tensor>& locals, std::vector<rules::SolutionPtr>& solutions, Args... args) const {
    const Stack stack = c10::impl::boxArgs<TensorList, Args...>(TensorList(), args...);
    solutions.reserve(first.size());
    for (size_t n = 0; n < first.size(); ++n) {
      solutions.push_back(find_solution(op_, stack, 0, {Ref(0, 0, first[n])}));
      if (solutions.back()->moves || (solutions.back()->kernel_if && solutions.back()->kernel_if(locals[n]))) {
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

using TensorVector = std::vector<Tensor>;
using Scalar = c10::Scalar;
using Scalars = at::ArrayRef<c10::Scalar>;
using OptionalTensor = const std::optional<Tensor>&;

// The signatures of list ops in torch.optim and clip_grad_norm_. All other list ops are boxed.
using ListTable = KernelTable<
    TypedList,
    void(TensorList),
    void(TensorList, const Scalar&),
    void(TensorList, Scalars),
    void(TensorList, const Tensor&),
    void(TensorList, TensorList),
    void(TensorList, TensorList, const Scalar&),
    void(TensorList, TensorList, bool),
    void(TensorList, TensorList, TensorList, const Scalar&),
    void(TensorList, TensorList, TensorList, Scalars),
    TensorVector(TensorList),
    TensorVector(TensorList, const Scalar&),
    TensorVector(TensorList, Scalars),
    TensorVector(TensorList, TensorList),
    TensorVector(TensorList, TensorList, const Scalar&),
    TensorVector(TensorList, const Scalar&, std::optional<at::ScalarType>),
    void(
        TensorList,
        TensorList,
        TensorList,
        TensorList,
        TensorList,
        TensorList,
        double,
        double,
        double,
        double,
        double,
        bool,
        bool,
        OptionalTensor,
        OptionalTensor),
    void(
        TensorList,
        TensorList,
        TensorList,
        TensorList,
        TensorList,
        TensorList,
        const Tensor&,
        double,
        double,
        double,
        double,
        bool,
        bool,
        OptionalTensor,
        OptionalTensor),
    void(TensorList, TensorList, TensorList, double, double, double, double, bool, bool, bool, OptionalTensor, OptionalTensor)>;

} // namespace

std::optional<c10::KernelFunction> typed_list_kernel(const Op& op) {
  static const ListTable table;
  return op.is(rules::Way::Lists) ? table.kernel_for(op) : std::nullopt;
}

} // namespace shardtensor
