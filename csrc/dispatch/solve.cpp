#include "dispatch/solve.h"

#include "dispatch/errors.h"
#include "dispatch/inputs.h"
#include "dispatch/meta_probe.h"
#include "dispatch/modes.h"
#include "redistribute/watch.h"
#include "rules/exact_dtypes.h"
#include "rules/resolve/resolve.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace shardtensor {

using rules::Call;
using rules::Solution;
using rules::SolutionPtr;
using torch::jit::Stack;

namespace {

void describe(const Op& op, const Refs& refs, const Layout& replicated, Call& call) {
  for (const auto& r : refs) {
    auto& t = call.add(r.arg, r.index, *r.tensor, sizes_of(r), r.impl ? r.impl->layout() : replicated);
    t.mutated = op.mutated >> r.arg & 1;
    t.output = op.outputs >> r.arg & 1;
    t.bytes = nominal_bytes(r.tensor->sym_sizes(), r.tensor->element_size());
  }
}

// Whether a call gathers pieces: because it must (strict mode raises), or because no other layout costs less.
enum class GatherReason { No, Needed, Chosen };

// Whether every operand is used whole.
bool needs_whole(const rules::Rule& rule) {
  const auto is_whole = [](const rules::Operand& o) {
    return !o.free && std::all_of(o.dims.begin(), o.dims.end(), [](const rules::Dim& d) { return d.factor == rules::kNone; });
  };
  return std::all_of(rule.operands.begin(), rule.operands.end(), is_whole);
}

// Whether an operand becomes whole along a mesh dim that cuts it.
bool makes_whole(const Call& call, const Solution& solution) {
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    const auto& have = *call.tensors[i].layout;
    const auto& need = solution.operands[i];
    if (need && have.any_mesh_dim([&](int64_t m) { return have.placement(m).is_shard() && need->placement(m).is_replicate(); })) {
      return true;
    }
  }
  return false;
}

void check_gather(const Op& op, const Call& call, GatherReason how) {
  if (how == GatherReason::Needed && strict_mode()) {
    errors::gathers(op, call);
  }
  on_gather(op.name, errors::why_gathered(op), errors::layouts_of(call));
}

struct SolveResult {
  c10::intrusive_ptr<Solution> solution;
  GatherReason gathers;
};

// By the op's rule: a function of the call alone, and of its global facts. Nothing in here runs Python.
SolveResult solve(const Op& op, const Call& call) {
  const bool has_rule = op.entry && op.entry->rule;
  auto rule = has_rule ? op.entry->rule(call) : rules::replicate(call);
  rules::without_infinities(call, rule);
  const auto reads = call.reads(); // before resolve(): if that reads sizes, the solution is marked `sized`
  auto solution = rules::resolve(call, rule);
  solution->reads = reads;
  const auto gathers = !makes_whole(call, *solution) ? GatherReason::No
                       : needs_whole(rule)           ? GatherReason::Needed
                                                     : GatherReason::Chosen;
  return {std::move(solution), gathers};
}

// Whether a size of an operand or an integer among the arguments is a symbol.
bool has_symbols(const Op& op, const Stack& stack, size_t base, const Refs& refs) {
  const auto first = stack.begin() + static_cast<std::ptrdiff_t>(base);
  return any_symbolic(refs) || std::any_of(first, first + static_cast<std::ptrdiff_t>(op.kinds.size()), [](const c10::IValue& v) {
           return v.isSymInt() || v.isSymIntList() || v.isSymFloat() || v.isSymBool();
         });
}

// Whether a rank's piece may be empty. Symbols are never 0, and neither are even pieces of one.
bool may_be_empty(const rules::KernelRun::OperandInfo& operand) {
  bool out = false;
  const auto pieces = sym_local_sizes(*operand.layout, operand.symbols);
  for (int64_t d = 0; d < operand.dim(); ++d) {
    out |= !pieces[d].is_symbolic() && (operand.layout->shards(d) || operand.symbols[d] == 0);
  }
  return out;
}

// Turns the operands' sizes into numbers if the solution's kernel needs numbers.
void settle_sizes(const Op& op, const Refs& refs, const Solution& solution) {
  if (!solution.kernel || op.entry->options.symbols) {
    return;
  }
  // Even if the kernel runs only on other ranks: guards must depend on global facts alone.
  const auto operands = after_moves(refs, solution);
  if (solution.kernel_if != rules::is_empty || std::any_of(operands.begin(), operands.end(), may_be_empty)) {
    for (const auto& r : refs) {
      guarded(r.tensor->sym_sizes());
    }
  }
}

} // namespace

SolutionPtr new_solution(const Op& op, const Stack& stack, size_t base, const Refs& refs) {
  const auto replicated = Layout::replicated(mesh_of(op, refs));
  Call call(op.schema(), c10::ArrayRef<c10::IValue>(stack.data() + base, op.kinds.size()), replicated->mesh());
  describe(op, refs, *replicated, call);
  if (op.is(rules::Way::Refused)) {
    errors::refused(op, op.entry->options.why, call);
  }
  const bool has_rule = op.entry && op.entry->rule;
  if (!has_rule && op.is_random) {
    errors::refused(op, "it draws random numbers and has no rule, so each rank would draw different numbers", call);
  }
  if (has_rule) {
    errors::check_taken(op, call);
    probe_dtype(op, stack, base, call, refs);
  }
  auto [solution, gathers] = solve(op, call);
  if (gathers != GatherReason::No) {
    check_gather(op, call, gathers);
  }
  if (has_rule) {
    probe_orders(op, stack, base, refs, *solution);
    op.has_read(solution->reads);
  }
  return solution;
}

SolutionPtr known_for_sizes(const Op& op, const Stack& stack, size_t base, const Refs& refs) {
  const auto* found = Cache::of(op.id).find(key_of(op, stack, base, refs));
  return found ? *found : nullptr;
}

SolutionPtr find_solution(const Op& op, const Stack& stack, size_t base, const Refs& refs) {
  if (C10_UNLIKELY(any_traced(refs)) && has_symbols(op, stack, base, refs)) {
    // Not cached: each graph needs the guards of the symbols that the rule reads as numbers.
    auto solution = new_solution(op, stack, base, refs);
    settle_sizes(op, refs, *solution);
    return solution;
  }
  return Cache::get(
      op.id, [&] { return key_of(op, stack, base, refs); }, [&](CacheKey& key) { add_sizes(refs, key); },
      [&] { return new_solution(op, stack, base, refs); });
}

} // namespace shardtensor
