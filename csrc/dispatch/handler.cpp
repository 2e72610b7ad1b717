#include "dispatch/handler.h"

#include "dispatch/cache.h"
#include "dispatch/errors.h"
#include "dispatch/op.h"
#include "dispatch/special.h"
#include "redistribute/redistribute.h"
#include "rules/resolve.h"
#include "tensor/shard_tensor.h"

#include <ATen/ATen.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <atomic>
#include <deque>

namespace shardtensor {

namespace {

using c10::IValue;
using rules::Call;
using rules::Run;
using rules::Solution;
using rules::SolutionPtr;
using torch::jit::Stack;

std::atomic<Promotion> g_promotion{Promotion::Error};
std::atomic<bool> g_strict{false};
std::atomic<FallbackLog> g_fallback_log{nullptr};

// One tensor of the call, as it came.
struct Ref {
  int16_t arg;
  int16_t index;
  at::Tensor tensor; // keeps the wrapper alive while its place on the stack holds the local tensor
  ShardTensorImpl* impl; // null: plain
};
using Refs = c10::SmallVector<Ref, 4>;

// The keys that a local tensor must not meet again below the handler.
const c10::DispatchKeySet kBelow = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;

Refs collect(const Op& op, Stack& stack, size_t base) {
  Refs refs;
  for (size_t i = 0; i < op.kinds.size(); ++i) {
    auto& value = stack[base + i];
    if (op.kinds[i] == ArgKind::Tensor) {
      if (value.isTensor() && value.toTensor().defined()) {
        const auto& t = value.toTensor();
        refs.push_back({static_cast<int16_t>(i), -1, t, as_shard_tensor(t)});
      }
    } else if (op.kinds[i] == ArgKind::TensorList && !value.isNone()) {
      const auto list = value.toListRef();
      for (size_t k = 0; k < list.size(); ++k) {
        if (list[k].isTensor() && list[k].toTensor().defined()) {
          const auto& t = list[k].toTensor();
          refs.push_back({static_cast<int16_t>(i), static_cast<int16_t>(k), t, as_shard_tensor(t)});
        }
      }
    }
  }
  return refs;
}

const MeshPtr& mesh_of(const Op& op, const Refs& refs) {
  const ShardTensorImpl* first = nullptr;
  for (const auto& r : refs) {
    if (!r.impl) {
      continue;
    }
    if (!first) {
      first = r.impl;
    } else if (&r.impl->layout().mesh() != &first->layout().mesh()) {
      errors::different_meshes(op, first->layout(), r.impl->layout());
    }
  }
  TORCH_INTERNAL_ASSERT(first, op.name, ": no ShardTensor among the arguments");
  return first->layout().mesh_ptr();
}

void check_plain(const Op& op, const Refs& refs) {
  for (const auto& r : refs) {
    if (r.impl || r.tensor.dim() == 0) {
      continue;
    }
    const auto mode = g_promotion.load(std::memory_order_relaxed);
    if (mode == Promotion::Error) {
      errors::plain_tensor(op, r.arg, r.tensor);
    }
    if (mode == Promotion::Warn) {
      TORCH_WARN_ONCE(errors::plain_tensor_text(op, r.arg, r.tensor), " It is taken as replicated.");
    }
  }
}

// ---- the cache's key ----

void key_of(const IValue& v, Key& key) {
  if (v.isNone()) {
    key.push(1);
  } else if (v.isInt()) {
    key.push(2, static_cast<uint64_t>(v.toInt()));
  } else if (v.isBool()) {
    key.push(v.toBool() ? 3 : 4);
  } else if (v.isDouble()) {
    uint64_t bits;
    const double d = v.toDouble();
    std::memcpy(&bits, &d, sizeof bits);
    key.push(5, bits);
  } else if (v.isIntList()) {
    const auto list = v.toIntList();
    key.push(6, list.size());
    for (const int64_t x : list) {
      key.push(static_cast<uint64_t>(x));
    }
  } else if (v.isBoolList()) {
    const auto list = v.toBoolList();
    uint64_t bits = 1;
    for (const bool x : list) {
      bits = bits << 1 | static_cast<uint64_t>(x);
    }
    key.push(7, bits);
  } else if (v.isString()) {
    key.push(8, std::hash<std::string>()(v.toStringRef()));
  } else if (v.isDevice()) {
    key.push(9, static_cast<uint64_t>(v.toDevice().type()));
  } else if (v.isList()) {
    const auto list = v.toListRef();
    key.push(10, list.size());
    for (const auto& x : list) {
      key_of(x, key);
    }
  } else {
    key.push(11); // generators, complex numbers: no rule looks at them
  }
}

void key_of(const Refs& refs, bool sizes, bool strides, Key& key) {
  for (const auto& r : refs) {
    const auto shape = r.tensor.sizes();
    uint64_t ones = 0;
    for (size_t d = 0; d < shape.size(); ++d) {
      ones |= static_cast<uint64_t>(shape[d] == 1) << (d & 15);
    }
    key.push(
        (r.impl ? static_cast<uint64_t>(r.impl->layout().id()) : 0) |
        static_cast<uint64_t>(r.arg) << 40 | static_cast<uint64_t>(shape.size()) << 48 |
        static_cast<uint64_t>(r.tensor.scalar_type()) << 54);
    key.push(ones | static_cast<uint64_t>(static_cast<uint16_t>(r.index)) << 16);
    if (sizes || shape.size() > 16) {
      for (const auto s : shape) {
        key.push(static_cast<uint64_t>(s));
      }
    }
    if (strides) {
      for (const auto s : r.tensor.strides()) {
        key.push(static_cast<uint64_t>(s));
      }
      key.push(static_cast<uint64_t>(r.tensor.storage_offset()));
    }
  }
}

Key full_key(const Op& op, const Stack& stack, size_t base, const Refs& refs, bool sizes, bool args) {
  Key key;
  key_of(refs, sizes, op.entry && op.entry->options.strided, key);
  for (size_t i = 0; args && i < op.kinds.size(); ++i) {
    if (op.kinds[i] == ArgKind::Other) {
      key_of(stack[base + i], key);
    }
  }
  return key;
}

// ---- the cold path ----

Call describe(const Op& op, const Stack& stack, size_t base, const Refs& refs, const Layout& replicated) {
  Call call{op.schema(), c10::ArrayRef<IValue>(stack.data() + base, op.kinds.size()), {}, replicated.mesh()};
  for (const auto& r : refs) {
    call.tensors.push_back(
        {r.arg,
         r.index,
         (op.mutated >> r.arg & 1) != 0,
         r.impl ? &r.impl->layout() : &replicated,
         r.tensor.sizes(),
         r.tensor.scalar_type(),
         r.tensor.strides(),
         r.tensor.storage_offset()});
  }
  return call;
}

SolutionPtr solve(const Op& op, const Stack& stack, size_t base, const Refs& refs) {
  const auto replicated = Layout::replicated(mesh_of(op, refs));
  const auto call = describe(op, stack, base, refs, *replicated);
  if (op.entry && op.entry->options.refuse) {
    errors::refused(op, op.entry->options.refuse, call);
  }
  if (!op.entry || !op.entry->rule) {
    if (op.is_random) {
      errors::refused(op, "it draws random numbers and has no rule, so its ranks would draw different ones", call);
    }
    if (g_strict.load(std::memory_order_relaxed)) {
      errors::no_rule(op, call);
    }
    if (auto* log = g_fallback_log.load(std::memory_order_relaxed)) {
      log(op.name, errors::layouts_of(call));
    }
    return rules::resolve(call, rules::replicate(call));
  }
  return rules::resolve(call, op.entry->rule(call));
}

SolutionPtr find(const Op& op, const Stack& stack, size_t base, const Refs& refs) {
  const bool sized = op.entry && op.entry->options.sized;
  const bool args = !(op.entry && op.entry->options.any_args);
  auto& cache = Cache::of(op.id);
  auto key = full_key(op, stack, base, refs, sized, args);
  if (auto* hit = cache.find(key)) {
    if (sized || !(*hit)->sized) {
      return *hit;
    }
    // The choice weighs bytes. Keyed by sizes it stays the same on every rank, whatever each rank has seen before.
    auto sized_key = full_key(op, stack, base, refs, true, args);
    if (auto* exact = cache.find(sized_key)) {
      return *exact;
    }
    auto solution = solve(op, stack, base, refs);
    cache.put(std::move(sized_key), solution);
    return solution;
  }
  auto solution = solve(op, stack, base, refs);
  if (!sized && solution->sized) {
    cache.put(full_key(op, stack, base, refs, true, args), solution);
  }
  cache.put(std::move(key), solution);
  return solution;
}

// ---- running ----

void put_local(Stack& stack, size_t base, const Refs& refs, c10::ArrayRef<at::Tensor> locals) {
  for (size_t i = 0; i < refs.size(); ++i) {
    auto& slot = stack[base + refs[i].arg];
    if (refs[i].index < 0) {
      slot = locals[i];
      continue;
    }
    // A list: rebuild it once, at its first tensor.
    if (i > 0 && refs[i - 1].arg == refs[i].arg) {
      continue;
    }
    auto fill = [&](auto list) {
      for (size_t k = i; k < refs.size() && refs[k].arg == refs[i].arg; ++k) {
        list.set(static_cast<size_t>(refs[k].index), locals[k]);
      }
      slot = std::move(list);
    };
    if (slot.isTensorList()) {
      fill(slot.toTensorList().copy());
    } else {
      fill(c10::impl::toTypedList<std::optional<at::Tensor>>(slot.toList()).copy());
    }
  }
}

Sizes global_sizes(const Solution::Result& result, const Refs& refs, const at::Tensor& local) {
  Sizes sizes(local.sizes().begin(), local.sizes().end());
  if (result.sizes.empty()) {
    return sizes;
  }
  sizes.resize(result.sizes.size());
  for (size_t d = 0; d < result.sizes.size(); ++d) {
    const auto& from = result.sizes[d];
    if (from.operand >= 0) {
      sizes[d] = refs[from.operand].tensor.sizes()[from.dim];
    } else {
      sizes[d] = from.operand == -1 ? local.size(static_cast<int64_t>(d)) : from.value;
    }
  }
  return sizes;
}

// How a view lies in its base's memory, which is imaginary, but autograd goes by it.
struct Form {
  Sizes strides;
  int64_t offset;
};

Form form_of(const rules::Geometry& geometry, const at::Tensor& base, c10::IntArrayRef sizes) {
  Form form{{}, base.storage_offset()};
  const auto strides = base.strides();
  if (geometry.reshaped) {
    if (base.is_contiguous()) {
      form.strides = c10::contiguous_strides(sizes);
      return form;
    }
    const auto found = at::detail::computeStride(base.sizes(), strides, sizes);
    if (found) {
      form.strides.append(found->begin(), found->end());
    } else {
      form.strides = c10::contiguous_strides(sizes);
    }
    return form;
  }
  for (const auto& term : geometry.strides) {
    form.strides.push_back(term.dim < 0 ? 0 : strides[term.dim] * term.times);
  }
  for (const auto& term : geometry.offset) {
    form.offset += strides[term.dim] * term.times;
  }
  return form;
}

// The same by running the op on a meta tensor with the base's sizes and strides: for rules that do not say.
std::vector<Form> forms_of(const Op& op, const at::Tensor& base, const Stack& stack, size_t at) {
  c10::impl::ExcludeDispatchKeyGuard below(kBelow);
  const auto strides = base.strides();
  const auto meta = at::empty({0}, base.options().device(at::kMeta).requires_grad(false))
                        .as_strided(base.sizes(), strides, base.storage_offset());
  Stack call(stack.begin() + static_cast<int64_t>(at), stack.end());
  call[0] = meta;
  op.handle.callBoxed(&call);
  std::vector<Form> forms;
  const auto add = [&](const at::Tensor& t) {
    forms.push_back({Sizes(t.strides().begin(), t.strides().end()), t.storage_offset()});
  };
  for (const auto& value : call) {
    if (value.isTensor()) {
      add(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorList()) {
        add(t);
      }
    }
  }
  return forms;
}

at::Tensor wrap_result(
    const Op& op,
    at::Tensor local,
    const Solution& solution,
    const Solution::Result* result,
    const Refs& refs,
    const Form* form) {
  const ShardTensorImpl* base = op.is_view || op.reshapes_self ? refs[0].impl : nullptr;
  // A copy, or a view of what was moved here: writing to it does not reach the base everywhere.
  const bool broken = base && ((solution.operands.size() && solution.operands[0]) || !local.is_alias_of(base->local()));
  if (broken) {
    base = nullptr;
  }
  at::Tensor out;
  if (base) {
    const auto& layout = result ? result->layout : solution.replicated;
    const auto sizes = result && layout->is_sharded() ? global_sizes(*result, refs, local)
                                                      : Sizes(local.sizes().begin(), local.sizes().end());
    const auto found = form ? *form : form_of(*result->geometry, refs[0].tensor, sizes);
    return wrap(std::move(local), layout, sizes, found.strides, base, found.offset);
  }
  if (!result || !result->layout->is_sharded()) {
    const auto sizes = local.sizes();
    const auto strides = local.strides();
    const auto& layout = result ? result->layout : solution.replicated;
    out = wrap(local, layout, sizes, strides, base);
  } else {
    const auto sizes = global_sizes(*result, refs, local);
    const auto strides = strides_like(sizes, local);
    out = wrap(std::move(local), result->layout, sizes, strides, base);
  }
  if (broken) {
    as_shard_tensor(out)->set_broken_view();
  }
  return out;
}

void localize_sizes(const Solution& solution, const Refs& refs, Stack& stack, size_t base) {
  for (const auto& a : solution.size_args) {
    const auto& result = solution.results[a.result];
    Sizes sizes;
    for (const auto& s : result.sizes) {
      sizes.push_back(s.operand >= 0 ? refs[s.operand].tensor.sizes()[s.dim] : s.value);
    }
    const auto local = result.layout->local_sizes(sizes);
    stack[base + a.arg] = c10::List<int64_t>(c10::IntArrayRef(local));
  }
}

void carry_back(const Refs& refs, const Solution& solution, c10::ArrayRef<at::Tensor> locals) {
  for (size_t i = 0; i < refs.size(); ++i) {
    if (!(solution.write_back >> i & 1)) {
      continue;
    }
    auto* self = refs[i].impl;
    TORCH_INTERNAL_ASSERT(self, "a plain tensor is written");
    auto back = redistribute(locals[i], *solution.operands[i], self->layout(), refs[i].tensor.sizes());
    at::Tensor local = self->local();
    local.copy_(back);
  }
}

void handle(const Op& op, Stack* stack_ptr) {
  auto& stack = *stack_ptr;
  const auto base = stack.size() - op.kinds.size();
  const auto refs = collect(op, stack, base);
  check_plain(op, refs);
  const auto solution = find(op, stack, base, refs);

  c10::impl::ExcludeDispatchKeyGuard below(kBelow);
  c10::SmallVector<at::Tensor, 4> locals;
  for (size_t i = 0; i < refs.size(); ++i) {
    const auto& r = refs[i];
    const bool written = op.mutated >> r.arg & 1;
    if (written) {
      errors::check_writable(op, r.arg, r.tensor, r.impl);
    }
    const auto& local = r.impl ? r.impl->local() : r.tensor;
    const auto& need = solution->operands[i];
    if (!need) {
      locals.push_back(local);
      continue;
    }
    const auto& have = r.impl ? r.impl->layout() : *solution->replicated;
    auto moved = redistribute(local, have, *need, r.tensor.sizes());
    locals.push_back(written && moved.is_alias_of(local) ? moved.clone() : std::move(moved));
  }
  std::vector<Form> forms;
  if ((op.is_view || op.reshapes_self) && !solution->geometry && !solution->operands[0]) {
    forms = forms_of(op, refs[0].tensor, stack, base);
  }
  put_local(stack, base, refs, locals);
  if (!solution->size_args.empty()) {
    localize_sizes(*solution, refs, stack, base);
  }
  if (solution->kernel) {
    c10::SmallVector<Run::At, 4> at;
    for (size_t i = 0; i < refs.size(); ++i) {
      const auto& need = solution->operands[i];
      at.push_back({need ? need.get() : refs[i].impl ? &refs[i].impl->layout() : solution->replicated.get(), refs[i].tensor.sizes()});
    }
    Run run{op.handle, stack, at, *solution};
    solution->kernel(run);
  } else {
    op.handle.callBoxed(stack_ptr);
  }
  if (solution->write_back) {
    carry_back(refs, *solution, locals);
  }

  const auto returned = op.returns_argument.size();
  size_t nth = 0;
  const auto finish = [&](at::Tensor local) {
    const auto* result = nth < solution->results.size() ? &solution->results[nth] : nullptr;
    const auto* form = nth < forms.size() ? &forms[nth] : nullptr;
    ++nth;
    return wrap_result(op, std::move(local), *solution, result, refs, form);
  };
  for (size_t i = 0; i < returned; ++i) {
    auto& value = stack[stack.size() - returned + i];
    const auto same = op.returns_argument[i];
    if (value.isTensor()) {
      if (same >= 0 && op.reshapes_self) {
        refs[0].impl->shallow_copy_from(finish(std::move(value).toTensor()).getIntrusivePtr());
        value = refs[0].tensor;
      } else if (same >= 0) {
        ++nth;
        for (const auto& r : refs) {
          if (r.arg == same) {
            value = r.tensor;
            break;
          }
        }
      } else if (value.toTensor().defined()) {
        value = finish(std::move(value).toTensor());
      }
    } else if (value.isTensorList()) {
      auto list = value.toTensorList();
      c10::List<at::Tensor> out;
      out.reserve(list.size());
      for (size_t k = 0; k < list.size(); ++k) {
        out.push_back(finish(list.extract(k)));
      }
      value = std::move(out);
    }
  }
}

struct Handler final : c10::OperatorKernel {
  explicit Handler(const Op* op) : op_(op) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
    if (op_->entry && (op_->entry->options.decompose || op_->entry->options.lists)) {
      handle_specially(*op_, stack);
    } else {
      handle(*op_, stack);
    }
  }
  const Op* op_;
};

std::deque<Op>& ops() {
  static auto* all = new std::deque<Op>();
  return *all;
}

// Ops that appear after import (torch.library) reach the key's fallback; each is described once.
void fallback(const c10::OperatorHandle& handle_, c10::DispatchKeySet, Stack* stack) {
  static std::mutex mutex;
  static std::unordered_map<std::string, const Op*> known;
  const Op* op = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto name = c10::toString(handle_.operator_name());
    auto it = known.find(name);
    if (it == known.end()) {
      ops().emplace_back(handle_);
      it = known.emplace(std::move(name), &ops().back()).first;
    }
    op = it->second;
  }
  handle(*op, stack);
}

bool takes_tensors(const c10::FunctionSchema& schema) {
  for (const auto& a : schema.arguments()) {
    if (a.type()->annotation_str().find("Tensor") != std::string::npos) {
      return true;
    }
  }
  return false;
}

} // namespace

Op::Op(c10::OperatorHandle h) : handle(h), id(static_cast<int32_t>(ops().size())) {
  const auto& schema_ = handle.schema();
  name = c10::toString(handle.operator_name());
  const auto& arguments = schema_.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto type = arguments[i].type()->annotation_str();
    kinds.push_back(
        type.find("Tensor") == std::string::npos ? ArgKind::Other
            : type.find("List") == std::string::npos ? ArgKind::Tensor
                                                     : ArgKind::TensorList);
    if (arguments[i].alias_info() && arguments[i].alias_info()->isWrite()) {
      mutated |= uint64_t{1} << i;
    }
  }
  for (const auto& r : schema_.returns()) {
    int8_t same = -1;
    if (const auto* alias = r.alias_info()) {
      is_view |= !alias->isWrite();
      for (size_t i = 0; i < arguments.size() && alias->isWrite(); ++i) {
        if (arguments[i].alias_info() && arguments[i].alias_info()->beforeSets() == alias->beforeSets()) {
          same = static_cast<int8_t>(i);
        }
      }
    }
    returns_argument.push_back(same);
  }
  is_random = handle.hasTag(at::Tag::nondeterministic_seeded);
  reshapes_self = handle.hasTag(at::Tag::inplace_view);
  if (reshapes_self) {
    mutated = 0; // no value of it
  }
  if (name.rfind("aten::", 0) == 0) {
    entry = rules::registry().find(name.substr(6));
  }
}

int64_t install_handler() {
  static std::deque<torch::Library> libraries;
  auto& dispatcher = c10::Dispatcher::singleton();
  auto& aten = libraries.emplace_back(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  auto& rest = libraries.emplace_back(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
  rest.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  int64_t count = 0;
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) {
      continue;
    }
    const auto handle_ = dispatcher.findOp(name);
    if (!handle_ || !handle_->hasSchema() || !takes_tensors(handle_->schema())) {
      continue;
    }
    const auto local_name = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    const auto* entry = rules::registry().find(local_name);
    if (handle_->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
        !(entry && entry->options.composite)) {
      continue;
    }
    ops().emplace_back(*handle_);
    aten.impl(
        local_name.c_str(),
        torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Handler>(&ops().back())));
    ++count;
  }
  return count;
}

Promotion promotion_mode() {
  return g_promotion;
}
void set_promotion_mode(Promotion mode) {
  g_promotion = mode;
}
bool strict_mode() {
  return g_strict;
}
void set_strict_mode(bool strict) {
  g_strict = strict;
  clear_cache();
}
void set_fallback_log(FallbackLog log) {
  g_fallback_log = log;
}

} // namespace shardtensor
