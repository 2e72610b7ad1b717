#include "dispatch/solve.h"

#include "dispatch/ask.h"
#include "dispatch/errors.h"
#include "dispatch/handler.h"
#include "dispatch/modes.h"
#include "dispatch/traced.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>

namespace shardtensor {

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

struct Solved {
  c10::intrusive_ptr<Solution> solution;
  bool gathers;
};

// By the op's rule: a function of the call alone, and of its global facts. Nothing in here runs Python.
Solved solve(const Op& op, const Call& call) {
  if (!op.entry || !op.entry->rule) {
    return {rules::resolve(call, rules::replicate(call)), true};
  }
  const auto rule = op.entry->rule(call);
  const auto reads = call.reads(); // before resolve(): if that reads sizes, the solution is marked `sized`
  auto solution = rules::resolve(call, rule);
  solution->reads = reads;
  const bool gathers_ = solution->moves && gathers(call, rule, *solution);
  return {std::move(solution), gathers_};
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
    ask_kernel(op, stack, base, call, refs);
  }
  auto [solution, gathers] = solve(op, call);
  if (gathers) {
    tell_of_gather(op, call);
  }
  if (has_rule) {
    ask_orders(op, stack, base, refs, *solution);
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
      op.id, [&] { return key_of(op, stack, base, refs); }, [&](Key& key) { add_sizes(refs, key); },
      [&] { return new_solution(op, stack, base, refs); });
}

void set_fallback_log(FallbackLog log) {
  g_fallback_log = log;
}

} // namespace shardtensor
