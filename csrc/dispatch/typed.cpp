#include "dispatch/typed.h"

#include "dispatch/call.h"
#include "dispatch/check.h"
#include "dispatch/errors.h"
#include "dispatch/excluded_keys.h"
#include "dispatch/kernel_table.h"
#include "dispatch/plain_tensors.h"

#include <ATen/ATen.h>
#include <ATen/core/boxing/impl/boxing.h>

#include <algorithm>
#include <array>

namespace shardtensor {

namespace {

using at::Tensor;
using torch::jit::Stack;

// Iterating over an IListRef checks its kind at every step.
template <typename Use>
void for_each(const at::ITensorListRef& list, const Use& use) {
  if (list.isUnboxed()) {
    for (const auto& t : list.toUnboxed()) {
      use(t);
    }
  } else {
    for (const auto& t : list) {
      use(t);
    }
  }
}

// ---- what each kind of argument contributes to the call ----

void collect(size_t i, const Tensor& t, Refs& refs) {
  if (t.defined()) {
    refs.emplace_back(i, -1, t);
  }
}
void collect(size_t i, const std::optional<Tensor>& t, Refs& refs) {
  if (t && t->defined()) {
    refs.emplace_back(i, -1, *t);
  }
}
void collect(size_t i, const at::ITensorListRef& list, Refs& refs) {
  int64_t k = 0;
  for_each(list, [&](const Tensor& t) {
    if (t.defined()) {
      refs.emplace_back(i, k, t);
    }
    ++k;
  });
}
void collect(size_t i, at::TensorList list, Refs& refs) {
  collect(i, at::ITensorListRef(list), refs);
}
template <typename T>
void collect(size_t, const T&, Refs&) {}

// ---- the same argument with local tensors in it ----

struct ArgumentLocalizer {
  const rules::Solution& solution;
  const Refs& refs;
  const Locals& locals;
  size_t next = 0;

  const Tensor& local(const Tensor& t) {
    return t.defined() ? locals[next++] : t;
  }
};

// A list of tensors that others own.
class BorrowedList {
  using Borrow = c10::MaybeOwnedTraits<Tensor>;

 public:
  BorrowedList() = default;
  BorrowedList(const BorrowedList&) = delete;
  BorrowedList& operator=(const BorrowedList&) = delete;
  ~BorrowedList() {
    std::for_each(tensors_.begin(), tensors_.end(), &Borrow::destroyBorrow);
  }
  void add(const Tensor& t) {
    tensors_.push_back(Borrow::createBorrow(t));
  }
  at::TensorList list() const {
    return tensors_;
  }

 private:
  c10::SmallVector<Tensor, 4> tensors_;
};

// The local form of an argument, and the memory that it needs while the op runs; the default is the argument itself.
template <typename T>
struct LocalArgument {
  const T& operator()(ArgumentLocalizer&, size_t, const T& given) {
    return given;
  }
};
template <>
struct LocalArgument<const Tensor&> {
  Tensor& operator()(ArgumentLocalizer& l, size_t, const Tensor& given) {
    return const_cast<Tensor&>(l.local(given)); // in-place ops take their first argument like this
  }
};
template <>
struct LocalArgument<Tensor&> : LocalArgument<const Tensor&> {};
template <>
struct LocalArgument<const std::optional<Tensor>&> {
  std::optional<Tensor> kept;
  const std::optional<Tensor>& operator()(ArgumentLocalizer& l, size_t, const std::optional<Tensor>& given) {
    return given && given->defined() ? kept = l.local(*given) : given;
  }
};
template <>
struct LocalArgument<at::TensorList> {
  BorrowedList kept;
  at::TensorList operator()(ArgumentLocalizer& l, size_t, const at::ITensorListRef& given) {
    for_each(given, [&](const Tensor& t) { kept.add(l.local(t)); });
    return kept.list();
  }
};
template <>
struct LocalArgument<const at::ITensorListRef&> : LocalArgument<at::TensorList> {};
template <>
struct LocalArgument<c10::SymIntArrayRef> {
  Sizes kept;
  c10::SymIntArrayRef operator()(ArgumentLocalizer& l, size_t i, c10::SymIntArrayRef given) {
    if (l.solution.sizes_arg != static_cast<int64_t>(i) || !l.solution.results[0].layout->is_sharded()) {
      return given; // a result that nothing cuts has its global sizes on every rank
    }
    kept = local_sizes_argument<Numbers>(l.solution, l.refs);
    return c10::SymIntArrayRef(reinterpret_cast<const c10::SymInt*>(kept.data()), kept.size());
  }
};

// ---- results ----

Tensor wrap_all(const Op& op, Tensor&& out, const rules::Solution& s, const Refs& refs, const Locals& locals) {
  return wrap_result(op, locals.result(std::move(out)), s, 0, refs);
}
template <typename... T>
std::tuple<T...> wrap_all(
    const Op& op, std::tuple<T...>&& out, const rules::Solution& s, const Refs& refs, const Locals& locals) {
  size_t n = 0;
  const auto one = [&](Tensor& t) {
    const auto nth = n++;
    return t.defined() ? wrap_result(op, locals.result(std::move(t)), s, nth, refs) : Tensor();
  };
  return std::apply([&](auto&... t) { return std::tuple<T...>{one(t)...}; }, out);
}

// In-place ops return their first argument.
template <typename First, typename... Rest>
Tensor& first(First& f, Rest&...) {
  return const_cast<Tensor&>(f);
}

// The same call on a stack.
template <typename Result, typename... Args>
struct BoxedCall {
  template <typename Run>
  static Result call(const Run& run, Args... args) {
    Stack stack = c10::impl::boxArgs<Args...>(args...);
    run(&stack);
    if constexpr (std::is_same_v<Result, Tensor&>) {
      return first(args...);
    } else {
      return c10::impl::PopResult<Result>::call(stack);
    }
  }
};

template <typename T>
void push_read(CacheKey& key, size_t arg, const T& value) {
  if (key.holds(rules::Reads::arg(arg))) {
    push(key, value);
  } else if constexpr (std::is_arithmetic_v<T> || std::is_same_v<T, c10::Scalar>) {
    if (key.holds(rules::Reads::kNumbers)) {
      key.push(rules::kind_of_number(c10::Scalar(value)));
    }
  }
}

template <typename Signature>
class Typed;

template <typename Result, typename... Args>
class Typed<Result(Args...)> final : public c10::OperatorKernel {
 public:
  explicit Typed(const Op& op) : op_(op), call_(op.handle.typed<Result(Args...)>()) {}

  Result operator()(Args... args) {
    return run(std::index_sequence_for<Args...>(), args...);
  }

 private:
  template <size_t... I>
  Result run(std::index_sequence<I...>, Args... args) {
    if (check::on()) {
      return BoxedCall<Result, Args...>::call([&](Stack* stack) { handle(op_, stack); }, args...);
    }
    Refs refs;
    (collect(I, args, refs), ...);
    check_plain(op_, refs);
    const auto make_key = [&] {
      auto key = key_of(op_, refs);
      (push_read(key, I, args), ...);
      return key;
    };
    const auto solution = Cache::get(
        op_.id, make_key, [&](CacheKey& key) { add_sizes(refs, key); },
        [&] {
          Stack stack = c10::impl::boxArgs<Args...>(args...);
          return new_solution(op_, stack, 0, refs);
        });
    if (needs_more(*solution, refs)) {
      return BoxedCall<Result, Args...>::call([&](Stack* stack) { run_call(op_, *stack, refs, solution); }, args...);
    }
    c10::impl::ExcludeDispatchKeyGuard below(kBelow);
    return guarded_call(op_, refs, *solution, [&]() -> Result {
      Locals locals;
      local_arguments(op_, refs, *solution, locals);
      ArgumentLocalizer localizer{*solution, refs, locals};
      std::tuple<LocalArgument<Args>...> kept;
      // Braces keep the order of evaluation: the localizer walks through the tensors.
      std::tuple<decltype(std::get<I>(kept)(localizer, I, args))...> local{std::get<I>(kept)(localizer, I, args)...};
      if constexpr (std::is_same_v<Result, Tensor&>) {
        call_.call(std::get<I>(local)...);
        note_writes(op_, refs);
        return first(args...);
      } else {
        return wrap_all(op_, call_.call(std::get<I>(local)...), *solution, refs, locals);
      }
    });
  }

  // Check before anything moves: if only one rank moved twice, ranks would fall out of step.
  bool needs_more(const rules::Solution& s, const Refs& refs) const {
    const auto is_such = [&](const Ref& r) { return s.kernel_if(r.impl ? r.impl->local() : *r.tensor); };
    const bool kernel = s.kernel && (!s.kernel_if || s.moves || std::any_of(refs.begin(), refs.end(), is_such));
    return kernel || !s.write_back.empty() || !s.replicated->mesh().has_this_rank() || needs_forms(op_, s, refs) ||
           (op_.is_view && (s.moves || s.put_back)) || !s.halos.empty();
  }

  const Op& op_;
  c10::TypedOperatorHandle<Result(Args...)> call_;
};

// Whether `is` holds for any tensor of the argument.
template <typename Is>
bool any(const Tensor& t, const Is& is) {
  return t.defined() && is(t);
}
template <typename Is>
bool any(const std::optional<Tensor>& t, const Is& is) {
  return t && any(*t, is);
}
template <typename Is>
bool any(const at::ITensorListRef& list, const Is& is) {
  bool found = false;
  for_each(list, [&](const Tensor& t) { found |= any(t, is); });
  return found;
}
template <typename Is>
bool any(at::TensorList list, const Is& is) {
  return any(at::ITensorListRef(list), is);
}
template <typename T, typename Is>
bool any(const T&, const Is&) {
  return false;
}

// record() for one signature.
template <typename Signature>
class TypedRecord;

template <typename Result, typename... Args>
class TypedRecord<Result(Args...)> final : public c10::OperatorKernel {
 public:
  explicit TypedRecord(const Op& op) : op_(op), call_(op.handle.typed<Result(Args...)>()) {}

  Result operator()(c10::DispatchKeySet keys, Args... args) {
    const auto below = below_autograd(keys);
    if (skips_autograd(op_, below, [&] { return (any(args, is_tracked) || ...); })) {
      return call_.redispatch(below, args...); // a user's handler may stand there instead of our kernel
    }
    if (!(any(args, needs_promotion) || ...) && !(any(args, has_tangent) || ...)) {
      return call_.redispatch(torchs_autograd(keys), args...);
    }
    return BoxedCall<Result, Args...>::call([&](Stack* stack) { record(op_, keys, stack); }, args...);
  }

 private:
  const Op& op_;
  c10::TypedOperatorHandle<Result(Args...)> call_;
};

// The signatures of ops that run often in training. All others are boxed.
template <template <typename> class Kernel>
using TypedKernels = KernelTable<
    Kernel,
    Tensor(const Tensor&),
    Tensor(const Tensor&, const Tensor&),
    Tensor(const Tensor&, const Tensor&, const c10::Scalar&),
    Tensor(const Tensor&, const Tensor&, const Tensor&),
    Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&),
    Tensor(const Tensor&, const c10::Scalar&),
    Tensor(const Tensor&, at::OptionalIntArrayRef, bool, std::optional<at::ScalarType>),
    Tensor(const Tensor&, std::optional<at::ScalarType>),
    Tensor(const Tensor&, const c10::Scalar&, at::OptionalIntArrayRef, bool, std::optional<at::ScalarType>),
    Tensor(const Tensor&, int64_t, bool),
    Tensor(const Tensor&, const Tensor&, int64_t, at::ScalarType),
    Tensor(const Tensor&, int64_t, int64_t),
    Tensor(const Tensor&, int64_t),
    Tensor(const Tensor&, c10::IntArrayRef),
    Tensor(const Tensor&, c10::SymIntArrayRef),
    Tensor(const Tensor&, c10::SymIntArrayRef, bool),
    Tensor(const Tensor&, std::optional<at::MemoryFormat>),
    Tensor(const Tensor&, const Tensor&, const Tensor&, const c10::Scalar&, const c10::Scalar&),
    Tensor(const at::ITensorListRef&, int64_t),
    Tensor(at::TensorList, int64_t),
    std::tuple<Tensor, Tensor, Tensor>(
        const Tensor&, c10::SymIntArrayRef, const std::optional<Tensor>&, const std::optional<Tensor>&, double),
    Tensor&(Tensor&),
    Tensor&(Tensor&, const Tensor&),
    Tensor&(Tensor&, const Tensor&, const c10::Scalar&),
    Tensor&(Tensor&, const c10::Scalar&),
    Tensor&(Tensor&, const Tensor&, bool),
    Tensor&(Tensor&, const Tensor&, const Tensor&, const c10::Scalar&)>;

// Returns nothing for ops that write other arguments than the first, or that make the first a view of itself.
template <template <typename> class Kernel>
std::optional<c10::KernelFunction> find(const Op& op) {
  static const TypedKernels<Kernel> table;
  return op.mutated > 1 || op.reshapes_self ? std::nullopt : table.kernel_for(op);
}

} // namespace

std::optional<c10::KernelFunction> typed_kernel(const Op& op) {
  return find<Typed>(op);
}

std::optional<c10::KernelFunction> typed_record(const Op& op) {
  return find<TypedRecord>(op);
}

} // namespace shardtensor
