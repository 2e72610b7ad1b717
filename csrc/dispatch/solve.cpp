#include "dispatch/solve.h"

#include "dispatch/errors.h"
#include "dispatch/handler.h"
#include "dispatch/modes.h"
#include "dispatch/outputs.h"
#include "dispatch/traced.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <cstring>

namespace shardtensor {

using c10::IValue;
using rules::Call;
using rules::Solution;
using rules::SolutionPtr;
using torch::jit::Stack;

namespace {

std::atomic<FallbackLog> g_fallback_log{nullptr};

void describe(const Op& op, const Refs& refs, const Layout& replicated, Call& call) {
  for (const auto& r : refs) {
    auto& t = call.add(r.arg, r.index, *r.tensor, sizes_of(r), r.impl ? r.impl->layout() : replicated);
    t.mutated = op.mutated >> r.arg & 1;
    t.output = op.outputs >> r.arg & 1;
    t.bytes = nominal_bytes(r.tensor->sym_sizes(), r.tensor->element_size());
  }
}

// Whether few of torch's kernels take the tensor's dtype.
bool is_rare(const Ref& r) {
  const auto dtype = r.tensor->scalar_type();
  return c10::isFloat8Type(dtype) || c10::isBarebonesUnsignedType(dtype) || dtype == at::kComplexHalf;
}

// Only the op's kernel knows whether it takes such a dtype, and on an empty piece it would not raise. So all ranks run it on a
// few elements.
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
      n = std::min<int64_t>(n, 3); // with one element some kernels do not check the dtype; points have up to 3 coordinates
    }
    args[r.arg] = at::zeros(sizes, r.tensor->options());
  }
  c10::impl::ExcludeDispatchKeyGuard aside(kAside);
  try {
    op.handle.callBoxed(args);
  } catch (const c10::Error& error) {
    // Other errors may come from the few sizes.
    for (const char* of_dtypes : {"not implemented for '", "can't be cast", "Promotion for"}) {
      const auto* why = error.what_without_backtrace();
      TORCH_CHECK_NOT_IMPLEMENTED(!std::strstr(why, of_dtypes), op.name, ": ", why, " (", errors::layouts_of(call), ")");
    }
  }
}

// The arguments that may change the order of a result's dims: not tensors (every key holds their orders), floating-point
// numbers or generators.
uint64_t ordering_arguments(const Op& op) {
  uint64_t out = 0;
  for (size_t i = 0; i < op.kinds.size(); ++i) {
    auto type = op.schema().arguments()[i].real_type();
    if (const auto optional = type->cast<c10::OptionalType>()) {
      type = optional->getElementType();
    }
    const auto kind = type->kind();
    const bool orders =
        kind != c10::TypeKind::NumberType && kind != c10::TypeKind::FloatType && kind != c10::TypeKind::GeneratorType;
    out |= op.kinds[i] == ArgKind::Other && orders ? rules::Reads::arg(i) : 0;
  }
  return out;
}

// torch decides the order of the results' dims: this asks its TensorIterator and its meta kernels, with the whole tensors'
// sizes and strides. Results of an op without a meta kernel are contiguous. Returns the facts that it has read.
uint64_t ask_orders(const Op& op, const Stack& stack, size_t base, const Refs& refs, Solution& solution) {
  const bool symbolic = any_symbolic(refs);
  if (!(solution.shards || solution.moves) || op.is_view || op.reshapes_self || op.is(rules::Way::Each) ||
      (symbolic && !op.entry->options.asks_order)) {
    return 0;
  }
  const auto format = op.schema().argumentIndexWithName("memory_format");
  if (!op.entry->options.asks_order && !(format && !stack[base + *format].isNone()) &&
      std::all_of(refs.begin(), refs.end(), [](const Ref& r) { return r.tensor->is_contiguous(); })) {
    return format ? rules::Reads::arg(*format) : 0;
  }
  const auto reads = ordering_arguments(op);
  auto call = on_meta(op, stack, base, refs, symbolic);
  try {
    c10::impl::ExcludeDispatchKeyGuard aside(kAside);
    op.handle.callBoxed(&call);
  } catch (const std::exception&) {
    return reads;
  }
  size_t nth = 0;
  each_tensor(call, [&](const at::Tensor& t) {
    if (nth < solution.results.size() && t.defined() && !solution.results[nth].order) {
      solution.results[nth].order = order_of(t.strides());
    }
    ++nth;
  });
  return reads;
}

// Whether pieces are gathered for a rule that uses every operand whole. (Adding up summands does not count.)
bool gathers(const Call& call, const rules::Rule& rule, const Solution& solution) {
  bool cut = false;
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    cut |= solution.operands[i] && call.tensors[i].layout->is_sharded();
  }
  const auto is_whole = [](const rules::Operand& o) {
    return !o.free && std::all_of(o.dims.begin(), o.dims.end(), [](const rules::Dim& d) { return d.factor == rules::kNone; });
  };
  return cut && std::all_of(rule.operands.begin(), rule.operands.end(), is_whole);
}

// Raises in strict mode; otherwise logs the gather.
void tell_of_gather(const Op& op, const Call& call) {
  if (strict_mode()) {
    errors::gathers(op, call);
  }
  if (auto* log = g_fallback_log.load(std::memory_order_relaxed)) {
    log(op.name, errors::why_gathered(op), errors::layouts_of(call));
  }
}

} // namespace

SolutionPtr solve(const Op& op, const Stack& stack, size_t base, const Refs& refs) {
  const auto replicated = Layout::replicated(mesh_of(op, refs));
  Call call(op.schema(), c10::ArrayRef<c10::IValue>(stack.data() + base, op.kinds.size()), replicated->mesh());
  describe(op, refs, *replicated, call);
  if (op.is(rules::Way::Refused)) {
    errors::refused(op, op.entry->options.why, call);
  }
  if (op.entry && op.entry->rule) {
    errors::check_taken(op, call);
    ask_kernel(op, stack, base, call, refs);
    const auto rule = op.entry->rule(call);
    auto reads = call.reads(); // before resolve(): if that reads sizes, the solution is marked `sized`
    auto solution = rules::resolve(call, rule);
    if (solution->moves && gathers(call, rule, *solution)) {
      tell_of_gather(op, call);
    }
    reads |= ask_orders(op, stack, base, refs, *solution);
    solution->reads = reads;
    op.has_read(reads);
    return solution;
  }
  if (op.is_random) {
    errors::refused(op, "it draws random numbers and has no rule, so each rank would draw different numbers", call);
  }
  tell_of_gather(op, call);
  return rules::resolve(call, rules::replicate(call));
}

SolutionPtr known_for_sizes(const Op& op, const Stack& stack, size_t base, const Refs& refs) {
  const auto* found = Cache::of(op.id).find(key_of(op, stack, base, refs));
  return found ? *found : nullptr;
}

SolutionPtr find_solution(const Op& op, const Stack& stack, size_t base, const Refs& refs) {
  if (C10_UNLIKELY(any_traced(refs)) && has_symbols(op, stack, base, refs)) {
    auto solution = solve(op, stack, base, refs); // each graph needs the guards of the symbols that the rule reads as numbers
    settle_sizes(op, refs, *solution);
    return solution;
  }
  return Cache::get(
      op.id, [&] { return key_of(op, stack, base, refs); }, [&](Key& key) { add_sizes(refs, key); },
      [&] { return solve(op, stack, base, refs); });
}

void set_fallback_log(FallbackLog log) {
  g_fallback_log = log;
}

} // namespace shardtensor
