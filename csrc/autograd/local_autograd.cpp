// Ops that run on local tensors together with their autograd: torch's gradient formula, or the op itself, writes into plain
// tensors or reads values, which ShardTensors do not allow. The ops write no argument and return no view.
#include "autograd/functions.h"
#include "autograd/make_formula.h"
#include "dispatch/call.h"
#include "dispatch/meta_probe.h"
#include "dispatch/outputs.h"
#include "dispatch/plain_tensors.h"

#include <torch/csrc/autograd/custom_function.h>

namespace shardtensor {

namespace {

using rules::Solution;

// True if the op draws random numbers. Each rank would draw different ones, so the op has to be decomposed.
bool drops_out(const Op& op, const torch::jit::Stack& stack, size_t base) {
  const auto p = op.schema().argumentIndexWithName("dropout"), train = op.schema().argumentIndexWithName("train");
  return p && train && stack[base + *p].toDouble() > 0 && stack[base + *train].toBool();
}

// If a mesh dim cuts the call but not this operand, every rank makes a summand of the operand's gradient.
LayoutPtr layout_of_gradient(const LayoutPtr& layout, const Solution& solution) {
  uint64_t cut = 0;
  for (const auto mesh_dims : solution.factor_mesh_dims) {
    cut |= mesh_dims;
  }
  const auto is_such = [&](int64_t m) { return (cut >> m & 1) && layout->placement(m).is_replicate(); };
  return layout->with_where(is_such, Placement::partial(ReduceOp::Sum));
}

// Some of torch's formulas give no gradient for empty tensors, but the other ranks have one.
struct EnsureGradient : torch::autograd::Function<EnsureGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& t) {
    return t.view_as(t);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list grads) {
    return grads; // zeros for missing gradients
  }
};

// This rank's piece of an operand in the layout that the solution requires, connected to the operand in the graph.
at::Tensor piece_of(const Op& op, const Ref& ref, const LayoutPtr& need, const Solution& solution) {
  const auto& t = *ref.tensor;
  const auto given = ref.impl ? t : from_local(t, solution.replicated, t.sizes(), t.strides());
  const auto have = as_shard_tensor(given)->layout_ptr();
  const auto want = need ? in_numbers(need, t.sym_sizes()) : have;
  auto piece = to_local(redistribute_for(cause_of(op, ref), given, want), layout_of_gradient(want, solution));
  return rules::is_empty(piece) && !rules::is_empty(t) ? EnsureGradient::apply(piece) : piece;
}

at::Tensor wrapped(const at::Tensor& piece, const Solution& solution, size_t nth, const Refs& refs) {
  if (nth >= solution.results.size()) {
    return from_local(piece, solution.replicated, piece.sizes(), piece.strides());
  }
  const auto& result = solution.results[nth];
  const auto sizes = global_sizes(result, refs, piece);
  const auto strides = strides_of(result, refs, sizes);
  return from_local(in_dim_order(piece, strides), in_numbers(result.layout, symbols(sizes)), sizes, strides);
}

// A rank outside the mesh has empty pieces of the results (0 of a number), but records the same graph as all ranks.
void run_outside_mesh(const Op& op, torch::jit::Stack& stack, size_t base, const Refs& refs, const Solution& solution) {
  const auto results = results_outside_mesh(op, stack, base, refs, solution.replicated->mesh());
  at::Tensor nothing;
  for (const auto& r : refs) {
    if (!nothing.defined() || r.tensor->requires_grad()) {
      const auto one = whole(*r.tensor).flatten().narrow(0, 0, 0);
      nothing = nothing.defined() ? nothing.add(one) : one;
    }
  }
  stack.resize(base);
  for (size_t n = 0; n < results.size(); ++n) {
    const auto& t = results[n].toTensor();
    const auto& layout = n < solution.results.size() ? solution.results[n].layout : solution.replicated;
    const auto piece = [&] {
      return t.dim() == 0 ? nothing.to(t.scalar_type()).sum(t.scalar_type()) : nothing.to(t.scalar_type());
    };
    stack.emplace_back(t.defined() ? from_local(piece(), layout, t.sizes(), t.strides()) : t);
  }
}

void handle_local(const Op& op, c10::DispatchKeySet, torch::jit::Stack* stack_ptr) {
  auto& stack = *stack_ptr;
  const auto base = stack.size() - op.kinds.size();
  if (drops_out(op, stack, base)) {
    return op.handle.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, stack);
  }
  const torch::jit::Stack arguments(stack.begin() + static_cast<std::ptrdiff_t>(base), stack.end());
  const auto refs = collect(op, stack, base);
  check_plain(op, refs);
  const auto solution = find_solution(op, stack, base, refs);
  if (!solution->replicated->mesh().has_this_rank()) {
    return run_outside_mesh(op, stack, base, refs, *solution);
  }
  check_must_match(op, refs, *solution);
  Locals pieces;
  pieces.reserve(refs.size());
  for (size_t i = 0; i < refs.size(); ++i) {
    pieces.hold(piece_of(op, refs[i], solution->operands[i], *solution));
  }
  torch::jit::Stack call(arguments);
  for (size_t i = 0; i < refs.size(); ++i) {
    auto& slot = call[refs[i].arg];
    if (refs[i].index < 0) {
      slot = pieces[i];
    } else {
      change_list(slot, slot, [&](auto& list) { list.set(refs[i].index, pieces[i]); });
    }
  }
  run_on_locals(op, call, refs, *solution, pieces);
  size_t nth = 0;
  for (auto& value : call) {
    if (value.isTensor() && value.toTensor().defined()) {
      value = wrapped(value.toTensor(), *solution, nth, refs);
    }
    ++nth;
  }
  stack.erase(stack.begin() + static_cast<std::ptrdiff_t>(base), stack.end());
  stack.insert(stack.end(), call.begin(), call.end());
}

} // namespace

const Formula formulas::local_autograd = formula<&handle_local>;

} // namespace shardtensor
