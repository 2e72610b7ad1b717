#include "dispatch/call.h"

#include "comm/traced.h"
#include "dispatch/check.h"
#include "dispatch/errors.h"
#include "dispatch/handler.h"
#include "dispatch/outputs.h"
#include "dispatch/plain.h"
#include "dispatch/results.h"
#include "dispatch/traced.h"
#include "redistribute/redistribute.h"
#include "redistribute/watch.h"

#include <ATen/ATen.h>
#include <ATen/TensorUtils.h>
#include <c10/util/strides.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <atomic>
#include <cstring>

namespace shardtensor {

using c10::IValue;
using rules::Call;
using rules::Run;
using rules::Solution;
using rules::SolutionPtr;
using torch::jit::Stack;

namespace {

std::atomic<bool> g_strict{false};
std::atomic<FallbackLog> g_fallback_log{nullptr};

// A fake tensor on the way of a graph is described by the numbers at hand.
c10::IntArrayRef sizes_of(const Ref& r) {
  return r.impl ? r.impl->sizes_hint() : r.tensor->sizes();
}

Call describe(const Op& op, const Stack& stack, size_t base, const Refs& refs, const Layout& replicated) {
  Call call{op.schema(), c10::ArrayRef<IValue>(stack.data() + base, op.kinds.size()), {}, replicated.mesh()};
  for (const auto& r : refs) {
    const bool symbolic = is_symbolic(*r.tensor);
    call.tensors.push_back(
        {r.arg, r.index, (op.mutated >> r.arg & 1) != 0, (op.outputs >> r.arg & 1) != 0, r.impl ? &r.impl->layout() : &replicated,
         sizes_of(r), r.tensor->scalar_type(), symbolic && !op.strided ? c10::IntArrayRef() : r.tensor->strides(),
         symbolic && !op.strided ? 0 : r.tensor->storage_offset(),
         nominal_bytes(r.tensor->sym_sizes(), r.tensor->element_size())});
  }
  return call;
}

} // namespace

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

void key_of(const IValue& v, Key& key) {
  if (v.isNone()) {
    key.push(Key::kNone);
  } else if (v.isScalar() || v.isUnsigned()) {
    key.push_scalar(v.toScalar());
  } else if (v.isIntList()) {
    const auto list = v.toIntList();
    key.push(Key::kInts, list.size());
    for (const int64_t x : list) {
      key.push(static_cast<uint64_t>(x));
    }
  } else if (v.isString()) {
    key.push(Key::kString, std::hash<std::string>()(v.toStringRef()));
  } else if (v.isDevice()) {
    key.push(Key::kDevice, static_cast<uint64_t>(v.toDevice().type()));
  } else if (v.isList()) {
    const auto list = v.toListRef();
    key.push(Key::kList, list.size());
    for (const auto& x : list) {
      key_of(x, key);
    }
  } else {
    key.push(Key::kOpaque); // a generator: no rule looks at it
  }
}

namespace {

// What the order of a result's dims depends on: the order of the operands' dims, and whether they have gaps or lie on each other.
void push_form(Key& key, const at::Tensor& t) {
  const auto strides = t.strides();
  uint64_t word = t.is_non_overlapping_and_dense();
  for (const auto s : strides) {
    word = word << 1 | static_cast<uint64_t>(s == 0);
  }
  key.push(word);
  for (const auto d : order_of(strides)) {
    key.push(static_cast<uint64_t>(d));
  }
  key.push(Key::kOrder);
}

} // namespace

void key_of(const Op& op, const Refs& refs, Key& key) {
  for (const auto& r : refs) {
    const auto shape = sizes_of(r);
    uint64_t ones = 0;
    for (size_t d = 0; d < shape.size(); ++d) {
      ones |= static_cast<uint64_t>(shape[d] == 1) << (d & 15);
    }
    key.push(
        (r.impl ? static_cast<uint64_t>(r.impl->layout().id()) : 0) | static_cast<uint64_t>(r.arg) << 40 |
        static_cast<uint64_t>(shape.size()) << 48 | static_cast<uint64_t>(r.tensor->scalar_type()) << 54);
    key.push(ones | static_cast<uint64_t>(static_cast<uint32_t>(r.index)) << 16);
    if (shape.size() > 16) {
      key.push_all(shape);
    }
    if (op.strided) {
      key.push_all(r.tensor->strides());
      key.push(static_cast<uint64_t>(r.tensor->storage_offset()));
    } else if (!is_symbolic(*r.tensor) && !r.tensor->is_contiguous()) {
      push_form(key, *r.tensor);
    }
  }
}

void add_sizes(const Refs& refs, Key& key) {
  key.push(Key::kSizes);
  for (const auto& r : refs) {
    key.push_all(sizes_of(r));
  }
}

namespace {

// Of a dtype that few of torch's kernels take.
bool is_rare(const Ref& r) {
  const auto dtype = r.tensor->scalar_type();
  return c10::isFloat8Type(dtype) || c10::isBarebonesUnsignedType(dtype) || dtype == at::kComplexHalf;
}

// Whether the op takes such a dtype its kernel alone knows, which says nothing on a rank whose piece is empty: so all ranks ask
// it with few elements.
void ask_kernel(const Op& op, const Stack& stack, size_t base, const Call& call, const Refs& refs) {
  const auto listed = [](const Ref& r) { return r.index >= 0; };
  if (op.is_random || std::none_of(refs.begin(), refs.end(), is_rare) || std::any_of(refs.begin(), refs.end(), listed)) {
    return;
  }
  const auto first = stack.begin() + static_cast<std::ptrdiff_t>(base);
  Stack args(first, first + static_cast<std::ptrdiff_t>(op.kinds.size()));
  for (const auto& r : refs) {
    auto sizes = r.tensor->sizes().vec();
    for (auto& n : sizes) {
      n = std::min<int64_t>(n, 2); // of a single one some kernels need not look at the dtype
    }
    args[r.arg] = at::zeros(sizes, r.tensor->options());
  }
  c10::impl::ExcludeDispatchKeyGuard aside(kAside);
  try {
    op.handle.callBoxed(args);
  } catch (const c10::Error& error) {
    // Others may be of the sizes.
    for (const char* of_dtypes : {"not implemented for '", "can't be cast", "Promotion for"}) {
      const auto* why = error.what_without_backtrace();
      TORCH_CHECK_NOT_IMPLEMENTED(!std::strstr(why, of_dtypes), op.name, ": ", why, " (", errors::layouts_of(call), ")");
    }
  }
}

} // namespace

namespace {

// The tensors among boxed results, those of a list one by one.
template <typename Use>
void each_tensor(const Stack& results, const Use& use) {
  for (const auto& value : results) {
    if (value.isTensor()) {
      use(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorList()) {
        use(t);
      }
    }
  }
}

// Whether results may lie otherwise than one dim after the other.
bool asks_order(const Op& op, const Stack& stack, size_t base, const Refs& refs, const Solution& solution) {
  if (!(solution.shards || solution.moves) || op.is_view || op.reshapes_self || !op.entry || op.entry->options.lists ||
      any_symbolic(refs)) {
    return false;
  }
  const auto format = op.schema().argumentIndexWithName("memory_format");
  return op.entry->options.asks_order || (format && !stack[base + *format].isNone()) ||
         std::any_of(refs.begin(), refs.end(), [](const Ref& r) { return !r.tensor->is_contiguous(); });
}

// In which order the results' dims lie is torch's to say: its TensorIterator and its meta kernels are asked, with the whole
// tensors' sizes and strides. An op without a meta kernel gives results one dim after the other.
void ask_orders(const Op& op, const Stack& stack, size_t base, const Refs& refs, Solution& solution) {
  if (!asks_order(op, stack, base, refs, solution)) {
    return;
  }
  auto call = on_meta(op, stack, base, refs);
  try {
    c10::impl::ExcludeDispatchKeyGuard aside(kAside);
    op.handle.callBoxed(&call);
  } catch (const std::exception&) {
    return;
  }
  size_t nth = 0;
  each_tensor(call, [&](const at::Tensor& t) {
    if (nth < solution.results.size() && t.defined() && !solution.results[nth].order) {
      solution.results[nth].order = order_of(t.strides());
    }
    ++nth;
  });
}

} // namespace

SolutionPtr solve(const Op& op, const Stack& stack, size_t base, const Refs& refs) {
  const auto replicated = Layout::replicated(mesh_of(op, refs));
  const auto call = describe(op, stack, base, refs, *replicated);
  if (op.entry && op.entry->options.refuse) {
    errors::refused(op, op.entry->options.refuse, call);
  }
  if (op.entry && op.entry->rule) {
    errors::check_taken(op, call);
    ask_kernel(op, stack, base, call, refs);
    auto solution = rules::resolve(call, op.entry->rule(call));
    ask_orders(op, stack, base, refs, *solution);
    return solution;
  }
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

namespace {

Key key_for(const Op& op, const Stack& stack, size_t base, const Refs& refs) {
  Key key;
  key_of(op, refs, key);
  for (size_t i = 0; op.keyed_args && i < op.kinds.size(); ++i) {
    if (op.kinds[i] == ArgKind::Other) {
      key_of(stack[base + i], key);
    }
  }
  if (C10_UNLIKELY(any_symbolic(refs))) {
    key_of_symbols(refs, key);
  }
  return key;
}

} // namespace

SolutionPtr known_for_sizes(const Op& op, const Stack& stack, size_t base, const Refs& refs) {
  auto key = key_for(op, stack, base, refs);
  add_sizes(refs, key);
  const auto* found = Cache::of(op.id).find(key);
  return found ? *found : nullptr;
}

SolutionPtr find_solution(const Op& op, const Stack& stack, size_t base, const Refs& refs) {
  auto key = key_for(op, stack, base, refs);
  auto solution = Cache::get(
      op.id, op.sized, key, [&](Key& k) { add_sizes(refs, k); }, [&] { return solve(op, stack, base, refs); });
  if (C10_UNLIKELY(any_symbolic(refs))) {
    settle_sizes(op, refs, *solution);
  }
  return solution;
}

at::Tensor move_for(
    const Op& op, const Ref& ref, const char* why, const at::Tensor& local, const Layout& from, const Layout& to) {
  return errors::while_doing(op, [&] {
    tell_watcher(op.name, op.schema().arguments()[ref.arg].name(), why, from, to, *ref.tensor);
    return is_symbolic(*ref.tensor) ? redistribute(local, from, to, ref.tensor->sym_sizes())
                                    : redistribute(local, from, to, ref.tensor->sizes());
  });
}

namespace {
bool replicates(const Op& op) {
  return !op.entry || !op.entry->rule || op.entry->rule == rules::replicate;
}
} // namespace

const char* why_moved(const Op& op) {
  return op.entry && op.entry->rule ? "its rule needs it so" : "it has no sharding rule, so its inputs are gathered";
}

void check_alike(const Op& op, const Refs& refs, const Solution& solution) {
  for (const auto& [a, b] : solution.alike) {
    const auto &x = *refs[a.operand].tensor, &y = *refs[b.operand].tensor;
    if (C10_UNLIKELY(is_symbolic(x) || is_symbolic(y))) {
      check_alike_symbols(op, x, a, y, b);
      continue;
    }
    if (C10_UNLIKELY(x.sizes()[a.dim] * b.inner != y.sizes()[b.dim] * a.inner)) {
      errors::sizes_differ(op, {refs[a.operand].arg, x, a.dim}, {refs[b.operand].arg, y, b.dim}, solution.replicated->mesh());
    }
  }
}

void local_arguments(const Op& op, const Refs& refs, const Solution& solution, Locals& locals) {
  check_alike(op, refs, solution);
  const auto is_traced_one = [](const Ref& r) { return r.impl && r.impl->traced(); };
  if (solution.moves || C10_UNLIKELY(std::any_of(refs.begin(), refs.end(), is_traced_one))) {
    locals.reserve(refs.size());
  }
  for (size_t i = 0; i < refs.size(); ++i) {
    const auto& r = refs[i];
    const bool written = op.mutated >> r.arg & 1;
    if (written) {
      errors::check_writable(op, r.arg, *r.tensor, r.impl);
      errors::check_apart(op, refs, i);
    }
    const auto& need = solution.operands[i];
    const auto& given = r.impl ? r.impl->local(op.is_view && !need && !solution.kernel) : *r.tensor;
    at::Tensor numbers;
    if (C10_UNLIKELY(is_symbolic(given)) && !has_symbols(*r.tensor)) {
      numbers = in_numbers(given);
    }
    const auto& local = numbers.defined() ? numbers : given;
    if (!need) {
      numbers.defined() ? locals.hold(std::move(numbers)) : locals.borrow(given);
      continue;
    }
    if (op.outputs >> r.arg & 1) { // nobody reads what is in it
      locals.hold(at::empty(need->local_sizes(r.tensor->sizes()), local.options()));
      continue;
    }
    const auto& have = r.impl ? r.impl->layout() : *solution.replicated;
    const auto move = [&] { return move_for(op, r, why_moved(op), local, have, *need); };
    auto moved =
        C10_UNLIKELY(r.impl && r.impl->traced() && !written && !numbers.defined()) ? moved_once(*r.impl, need, move) : move();
    if (!written && replicates(op) && !is_symbolic(moved)) {
      moved = laid(std::move(moved), r.tensor->strides()); // so that its results lie as they do in torch
    }
    // Written copies are contiguous: some of torch's out= kernels take that for granted.
    locals.hold(!written ? std::move(moved) : moved.is_alias_of(local) ? moved.clone() : moved.contiguous());
  }
}

void note_writes(const Op& op, const Refs& refs) {
  for (const auto& r : refs) {
    if ((op.mutated >> r.arg & 1) && r.impl) {
      r.impl->note_write();
    }
  }
}

c10::SmallVector<Run::At, 4> after_moves(const Refs& refs, const Solution& solution) {
  c10::SmallVector<Run::At, 4> out;
  for (size_t i = 0; i < refs.size(); ++i) {
    const auto* impl = refs[i].impl;
    const auto* need = solution.operands[i].get();
    out.push_back({need ? need : impl ? &impl->layout() : solution.replicated.get(), refs[i].tensor->sizes()});
  }
  return out;
}

void carry_back(const Op& op, const Refs& refs, const Solution& solution, const Locals& locals) {
  for (size_t i = 0; i < refs.size(); ++i) {
    if (!solution.write_back.has(i)) {
      continue;
    }
    auto* self = refs[i].impl;
    TORCH_INTERNAL_ASSERT(self, "a plain tensor is written");
    auto back = move_for(op, refs[i], kWrittenBack, locals[i], *solution.operands[i], self->layout());
    at::Tensor local = self->local();
    local.copy_(back);
  }
}

Sizes local_size_argument(const Solution& solution, const rules::SizeArg& a, const Refs& refs) {
  const auto& result = solution.results[a.result];
  Sizes sizes;
  for (const auto& s : result.sizes) {
    sizes.push_back(s.operand >= 0 ? refs[s.operand].tensor->sizes()[s.dim] : s.value);
  }
  return result.layout->local_sizes(sizes);
}

Sizes global_sizes(const Solution::Result& result, const Refs& refs, const at::Tensor& local) {
  if (result.sizes.empty()) {
    return Sizes(local.sizes().begin(), local.sizes().end());
  }
  Sizes sizes(result.sizes.size());
  for (size_t d = 0; d < result.sizes.size(); ++d) {
    const auto& from = result.sizes[d];
    if (from.operand >= 0) {
      sizes[d] = refs[from.operand].tensor->sizes()[from.dim];
    } else {
      sizes[d] = from.operand == -1 ? local.size(static_cast<int64_t>(d)) : from.value;
    }
  }
  return sizes;
}

namespace {

// The operand it lies like, if that is as large in every dim and contiguous: then sizes and strides are there already.
const at::Tensor* twin_of(const Solution::Result& result, const Refs& refs, const at::Tensor& local) {
  if (result.like < 0 || (result.order && !result.order->empty())) {
    return nullptr;
  }
  const auto& lead = *refs[result.like].tensor;
  const auto have = local.sizes(), want = lead.sizes();
  if (result.sizes.size() != want.size() || have.size() != want.size() || !lead.is_contiguous()) {
    return nullptr;
  }
  for (size_t d = 0; d < want.size(); ++d) {
    const auto& from = result.sizes[d];
    const bool same =
        from.operand == result.like ? from.dim == static_cast<int16_t>(d) : from.operand == -1 && have[d] == want[d];
    if (!same) {
      return nullptr;
    }
  }
  return &lead;
}

} // namespace

Sizes strides_of(const Solution::Result& result, const Refs& refs, c10::IntArrayRef sizes) {
  if (result.order) {
    return dense_strides(sizes, *result.order);
  }
  return result.like >= 0 ? strides_like(sizes, *refs[result.like].tensor) : Sizes(c10::contiguous_strides(sizes));
}

namespace {

Form form_of(const rules::Geometry& geometry, const at::Tensor& base, c10::IntArrayRef sizes) {
  Form form{{}, base.storage_offset()};
  const auto strides = base.strides();
  if (geometry.reshaped) {
    if (base.is_contiguous()) {
      form.strides = c10::contiguous_strides(sizes);
      return form;
    }
    const auto found = at::detail::computeStride(base.sizes(), strides, sizes);
    // Whether a piece can be viewed so says nothing: all ranks refuse alike, as torch does for the whole.
    TORCH_CHECK(
        found,
        "view size is not compatible with input tensor's size and stride (at least one dimension spans across two "
        "contiguous subspaces). Use .reshape(...) instead: sizes ",
        base.sizes(), ", strides ", strides, " as ", sizes);
    form.strides.append(found->begin(), found->end());
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
  c10::impl::ExcludeDispatchKeyGuard aside(kAside);
  const auto strides = base.strides();
  const auto meta = at::empty({0}, base.options().device(at::kMeta).requires_grad(false))
                        .as_strided(base.sizes(), strides, base.storage_offset());
  Stack call(stack.begin() + static_cast<int64_t>(at), stack.end());
  call[0] = meta;
  op.handle.callBoxed(&call);
  std::vector<Form> forms;
  each_tensor(call, [&](const at::Tensor& t) {
    forms.push_back({Sizes(t.strides().begin(), t.strides().end()), t.storage_offset()});
  });
  return forms;
}

// Nobody sees the bases of autograd's own views, nor need they be looked after; and what it keeps as a gradient it detaches.
void mark_broken(const Op& op, ShardTensorImpl& view, const ShardTensorImpl& base) {
  const bool autograds = torch::autograd::get_current_node() && !base.watches();
  if (!autograds || op.name != "aten::detach") {
    view.set_broken_view(base, !autograds);
  }
}

} // namespace

at::Tensor wrap_result(
    const Op& op,
    at::Tensor local,
    const Solution& solution,
    size_t nth,
    const Refs& refs,
    const Form* form,
    const SymSizes* given) {
  const auto* result = nth < solution.results.size() ? &solution.results[nth] : nullptr;
  const ShardTensorImpl* base = op.is_view || op.reshapes_self ? refs[0].impl : nullptr;
  // A copy, or a view of what was moved here: writing to it does not reach the base everywhere.
  const bool moved = base && (base->broken_view() || solution.operands[0] || !local.is_alias_of(base->local(true)));
  const auto& layout = result ? result->layout : solution.replicated;
  if (C10_UNLIKELY(is_symbolic(local) || any_symbolic(refs))) {
    auto out = wrap_symbolic_result(op, std::move(local), solution, nth, refs, form, base, moved, given);
    if (moved) {
      mark_broken(op, *as_shard_tensor(out), *base);
    }
    return out;
  }
  if (!base && result && result->strides.empty()) {
    if (const auto* twin = twin_of(*result, refs, local)) {
      return wrap(laid(std::move(local), twin->strides()), layout, twin->sizes(), twin->strides());
    }
  }
  Sizes own_sizes, own_strides;
  c10::IntArrayRef sizes = local.sizes(), strides = local.strides(); // which outlives the move into the result
  if (result && layout->is_sharded()) {
    sizes = own_sizes = global_sizes(*result, refs, local);
  }
  if (base && (!moved || (result && result->geometry && result->geometry->reshaped))) {
    const auto found = form ? *form : form_of(*result->geometry, *refs[0].tensor, sizes); // raises where torch would
    if (!moved) {
      return wrap(std::move(local), layout, sizes, found.strides, base, found.offset);
    }
  }
  if (result && !result->strides.empty()) {
    strides = result->strides;
  } else if (result && (solution.shards || result->order)) {
    strides = own_strides = strides_of(*result, refs, sizes);
    own_sizes = Sizes(sizes.begin(), sizes.end());
    sizes = own_sizes; // a copy that lies otherwise takes the local tensor's place, and its sizes with it
    local = laid(std::move(local), strides);
  }
  auto out = wrap(std::move(local), layout, sizes, strides, base, 0, moved);
  if (moved) {
    mark_broken(op, *as_shard_tensor(out), *base);
  }
  return out;
}

Refs collect(const Op& op, Stack& stack, size_t base) {
  Refs refs;
  for (size_t i = 0; i < op.kinds.size(); ++i) {
    auto& value = stack[base + i];
    if (op.kinds[i] == ArgKind::Tensor) {
      if (value.isTensor() && value.toTensor().defined()) {
        refs.emplace_back(i, -1, value.toTensor());
      }
    } else if (op.kinds[i] == ArgKind::TensorList && !value.isNone()) {
      const auto list = value.toListRef();
      for (size_t k = 0; k < list.size(); ++k) {
        if (list[k].isTensor() && list[k].toTensor().defined()) {
          refs.emplace_back(i, k, list[k].toTensor());
        }
      }
    }
  }
  return refs;
}

namespace {

// Puts the local tensors where the wrappers are, and moves the wrappers to `kept`.
void put_local(Stack& stack, size_t base, Refs& refs, const Locals& locals, c10::SmallVectorImpl<IValue>& kept) {
  kept.reserve(refs.size());
  for (size_t i = 0; i < refs.size();) {
    auto& slot = stack[base + refs[i].arg];
    IValue local;
    if (refs[i].index < 0) {
      local = locals[i]; // before the move: a plain tensor's local is the slot's own
    }
    kept.push_back(std::move(slot));
    if (refs[i].index < 0) {
      slot = std::move(local);
      refs[i].tensor = &kept.back().toTensor();
      ++i;
      continue;
    }
    const auto first = i;
    change_list(slot, kept.back(), [&](auto& list) {
      for (; i < refs.size() && refs[i].arg == refs[first].arg; ++i) {
        list.set(static_cast<size_t>(refs[i].index), locals[i]);
      }
    });
  }
}

// A rank that the mesh does not hold takes no part: it has empty pieces, in results of the sizes that the others have.
void stand_aside(const Op& op, Stack& stack, size_t base, const Refs& refs, const Solution& solution) {
  const auto& mesh = solution.replicated->mesh();
  for (const auto& value : op.schema().returns()) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        value.type()->annotation_str().find("Tensor") != std::string::npos, op.name, ": rank ", mesh.rank(), " is not of ",
        mesh.str(), " and has no value to return; ask on that mesh's ranks");
  }
  auto made = on_meta(op, stack, base, refs);
  {
    c10::impl::ExcludeDispatchKeyGuard below(kBelow);
    op.handle.callBoxed(&made);
  }
  const ShardTensorImpl* view_of = op.is_view || op.reshapes_self ? refs[0].impl : nullptr;
  const auto device = refs[0].impl ? refs[0].impl->local().device() : refs[0].tensor->device();
  size_t nth = 0;
  const auto empty = [&](const at::Tensor& like) {
    const auto& layout = nth < solution.results.size() ? solution.results[nth].layout : solution.replicated;
    ++nth;
    auto local = at::empty({0}, like.options().device(device));
    return wrap(std::move(local), layout, like.sizes(), like.strides(), view_of, view_of ? like.storage_offset() : 0);
  };
  for (size_t i = 0; i < made.size(); ++i) {
    const auto same = op.returns_argument[i];
    if (same >= 0 && op.reshapes_self) {
      refs[0].impl->shallow_copy_from(empty(made[i].toTensor()).getIntrusivePtr());
    }
    if (same >= 0) {
      made[i] = stack[base + same];
      nth += !op.reshapes_self;
    } else if (made[i].isTensor()) {
      made[i] = made[i].toTensor().defined() ? IValue(empty(made[i].toTensor())) : made[i];
    } else if (made[i].isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : made[i].toTensorList()) {
        list.push_back(empty(t));
      }
      made[i] = std::move(list);
    }
  }
  stack.resize(base);
  std::move(made.begin(), made.end(), std::back_inserter(stack));
}

} // namespace

namespace {

// Where this rank's piece is empty, results may be made without it. The graph of another rank needs the operands, and what they
// came by; so this one's results take them along.
void keep_operands(const Op& op, Stack& stack, at::TensorList operands) {
  const auto returned = op.returns_argument.size();
  for (size_t i = 0; i < returned; ++i) {
    auto& value = stack[stack.size() - returned + i];
    if (op.returns_argument[i] < 0 && !op.is_view && value.isTensor()) {
      value = comm::traced::after(value.toTensor(), operands);
    }
  }
}

} // namespace

namespace {

void run_call(const Op& op, Stack* stack_ptr, const SymSizes* sizes) {
  auto& stack = *stack_ptr;
  const auto base = stack.size() - op.kinds.size();
  auto refs = collect(op, stack, base);
  check_plain(op, refs);
  const auto solution = op.outputs ? fitting_solution(op, stack, base, refs) : find_solution(op, stack, base, refs);
  if (C10_UNLIKELY(!solution->replicated->mesh().has_me())) {
    return stand_aside(op, stack, base, refs, *solution);
  }

  c10::impl::ExcludeDispatchKeyGuard below(kBelow);
  Locals locals;
  local_arguments(op, refs, *solution, locals);
  std::vector<at::Tensor> operands;
  if (C10_UNLIKELY(is_recording() && locals.any(rules::is_empty))) {
    operands = locals.all();
  }
  std::vector<Form> forms;
  if (needs_forms(op, *solution, refs)) {
    forms = forms_of(op, *refs[0].tensor, stack, base);
  }
  c10::SmallVector<IValue, 4> kept;
  put_local(stack, base, refs, locals, kept);
  for (const auto& a : solution->size_args) {
    if (C10_UNLIKELY(sizes)) {
      stack[base + a.arg] = c10::SymIntArrayRef(sym_local_sizes(*solution->results[a.result].layout, *sizes));
    } else {
      stack[base + a.arg] = c10::List<int64_t>(c10::IntArrayRef(local_size_argument(*solution, a, refs)));
    }
  }
  if (solution->kernel && (!solution->kernel_if || locals.any(solution->kernel_if))) {
    const auto at = after_moves(refs, *solution);
    Run run{op.handle, stack, at, *solution};
    errors::run_kernel(op, solution->kernel, run);
  } else {
    op.handle.callBoxed(stack_ptr);
  }
  if (op.mutated) {
    note_writes(op, refs);
  }
  if (op.outputs) {
    check_outputs(op, *solution, refs, locals);
  }
  if (!solution->write_back.empty()) {
    carry_back(op, refs, *solution, locals);
  }
  if (C10_UNLIKELY(!operands.empty())) {
    keep_operands(op, stack, operands);
  }

  const auto returned = op.returns_argument.size();
  size_t nth = 0;
  const auto finish = [&](at::Tensor local) {
    const auto* form = nth < forms.size() ? &forms[nth] : nullptr;
    return wrap_result(op, std::move(local), *solution, nth++, refs, form, solution->size_args.empty() ? nullptr : sizes);
  };
  for (size_t i = 0; i < returned; ++i) {
    auto& value = stack[stack.size() - returned + i];
    const auto same = op.returns_argument[i];
    if (value.isTensor()) {
      if (same >= 0 && op.reshapes_self) {
        refs[0].impl->shallow_copy_from(finish(std::move(value).toTensor()).getIntrusivePtr());
        refs[0].impl->note_write(); // to autograd it is one
        value = *refs[0].tensor;
      } else if (same >= 0) {
        const auto* ref = std::find_if(refs.begin(), refs.end(), [&](const Ref& r) { return r.arg == same; });
        value = *ref->tensor;
        ++nth;
      } else if (value.toTensor().defined()) {
        value = finish(std::move(value).toTensor());
      } else {
        ++nth;
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

} // namespace

void handle(const Op& op, Stack* stack, const SymSizes* sizes) {
  const auto run = [&] { run_call(op, stack, sizes); };
  check::on() ? check::around(op, stack, run) : run();
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
