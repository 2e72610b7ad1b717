#include "dispatch/call.h"

#include "comm/error_context.h"
#include "comm/traced.h"
#include "dispatch/check.h"
#include "dispatch/eager_scalar_reduce.h"
#include "dispatch/errors.h"
#include "dispatch/excluded_keys.h"
#include "dispatch/meta_probe.h"
#include "dispatch/out_arguments.h"
#include "dispatch/plain_tensors.h"
#include "dispatch/view_writeback.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <sstream>

namespace shardtensor {

using c10::IValue;
using rules::KernelRun;
using rules::Solution;
using rules::SolutionPtr;
using torch::jit::Stack;

namespace {

// Replaces the wrappers by the local tensors, and moves the wrappers to `kept`.
void put_local(Stack& stack, size_t base, Refs& refs, const Locals& locals, c10::SmallVectorImpl<IValue>& kept) {
  kept.reserve(refs.size());
  for (size_t i = 0; i < refs.size();) {
    auto& slot = stack[base + refs[i].arg];
    IValue local;
    if (refs[i].index < 0) {
      local = locals[i]; // before the move: a plain tensor's local is the slot itself
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

// A rank outside the mesh does not run the op: its results have empty pieces (0 for a number) and the same global sizes as on
// other ranks.
void run_outside_mesh(const Op& op, Stack& stack, size_t base, const Refs& refs, const Solution& solution) {
  const auto& mesh = solution.replicated->mesh();
  const auto& returns = op.schema().returns();
  if (returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::BoolType) {
    stack.resize(base);
    stack.emplace_back(true); // equal() of empty pieces
    return;
  }
  if (returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::NumberType && torch::autograd::get_current_node()) {
    stack.resize(base);
    stack.emplace_back(at::Scalar(0)); // one of torch's formulas reads this number; the gradient is empty on this rank
    return;
  }
  for (const auto& value : returns) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        kind_of(*value.type()) != ArgKind::Other, op.name, ": rank ", mesh.rank(), " is not in ", mesh.str(),
        ", so it has no value to return; call this only on that mesh's ranks");
  }
  auto made = results_outside_mesh(op, stack, base, refs, mesh);
  const ShardTensorImpl* view_of = op.is_view || op.reshapes_self ? refs[0].impl : nullptr;
  const auto device = refs[0].impl ? refs[0].impl->local().device() : refs[0].tensor->device();
  size_t nth = 0;
  const auto empty = [&](const at::Tensor& like) {
    const auto& layout = nth < solution.results.size() ? solution.results[nth].layout : solution.replicated;
    ++nth;
    auto local = at::zeros(layout->local_sizes(like.sizes()), like.options().device(device));
    local._set_conj(like.is_conj());
    local._set_neg(like.is_neg());
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

// Replaces each tensor among the op's results by the result of `change`, unless it is an argument.
template <typename Change>
void change_results(const Op& op, Stack& stack, const Change& change) {
  const auto returned = op.returns_argument.size();
  for (size_t i = 0; i < returned; ++i) {
    auto& value = stack[stack.size() - returned + i];
    if (op.returns_argument[i] >= 0) {
      continue;
    }
    if (value.isTensor() && value.toTensor().defined()) {
      value = change(value.toTensor());
    } else if (value.isTensorList()) {
      auto list = value.toTensorList();
      for (size_t k = 0; k < list.size(); ++k) {
        list[k] = change(list[k]);
      }
    }
  }
}

// `kept` takes the wrappers, which `refs` point to.
void run_on_pieces(
    const Op& op, Stack& stack, size_t base, Refs& refs, const SolutionPtr& solution, c10::SmallVectorImpl<IValue>& kept) {
  Locals locals;
  local_arguments(op, refs, *solution, locals);
  std::vector<at::Tensor> operands;
  if (C10_UNLIKELY(is_recording() && locals.any(rules::is_empty))) {
    operands = locals.all();
  }
  std::vector<ViewForm> forms;
  if (needs_forms(op, *solution, refs)) {
    forms = forms_of(op, *refs[0].tensor, stack, base);
  }
  put_local(stack, base, refs, locals, kept);
  if (solution->sizes_arg != rules::kNone) {
    auto& sizes = stack[base + solution->sizes_arg];
    if (C10_UNLIKELY(any_traced(refs))) {
      sizes = c10::SymIntArrayRef(local_sizes_argument<Symbols>(*solution, refs));
    } else {
      sizes = c10::List<int64_t>(c10::IntArrayRef(local_sizes_argument<Numbers>(*solution, refs)));
    }
  }
  run_on_locals(op, stack, refs, *solution, locals);
  if (op.outputs) {
    check_outputs(op, *solution, refs, locals);
  }
  if (!solution->write_back.empty()) {
    carry_back(op, refs, *solution, locals);
  }
  if (op.mutated) {
    note_writes(op, refs);
  }
  if (C10_UNLIKELY(!operands.empty() && !op.is_view)) {
    // If this rank's piece is empty, results may not depend on it. Other ranks' graphs need the operands and the collectives
    // behind them, so this rank's results must depend on the operands too.
    change_results(op, stack, [&](const at::Tensor& t) { return comm::traced::after(t, operands); });
  }

  const auto returned = op.returns_argument.size();
  size_t nth = 0;
  const auto finish = [&](at::Tensor given) {
    auto local = locals.result(std::move(given));
    const auto* form = nth < forms.size() ? &forms[nth] : nullptr;
    auto out = wrap_result(op, std::move(local), *solution, nth++, refs, form);
    if (op.is_view) {
      remember_base(op, solution, refs[0], locals[0], out);
    }
    return out;
  };
  for (size_t i = 0; i < returned; ++i) {
    auto& value = stack[stack.size() - returned + i];
    const auto same = op.returns_argument[i];
    if (value.isTensor()) {
      if (same >= 0 && op.reshapes_self) {
        refs[0].impl->shallow_copy_from(finish(std::move(value).toTensor()).getIntrusivePtr());
        refs[0].impl->note_write(); // autograd counts it as a write
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

// If this rank has nothing to fetch, a result may be an operand's piece, or a view of it. On other ranks the result is a copy, so
// it is copied here too: a write to the result must not write the operand.
void copy_what_is_shared(const Op& op, Stack& stack, const Refs& refs) {
  change_results(op, stack, [&](const at::Tensor& t) {
    const bool shared =
        std::any_of(refs.begin(), refs.end(), [&](const Ref& r) { return r.impl && t.is_alias_of(r.impl->local(true)); });
    return shared ? t.clone() : t;
  });
}

} // namespace

void run_on_locals(const Op& op, Stack& stack, const Refs& refs, const Solution& solution, const Locals& locals) {
  if (solution.kernel && (!solution.kernel_if || locals.any(solution.kernel_if))) {
    const auto at = after_moves(refs, solution);
    rules::KernelRun run{op.handle, stack, at, solution};
    errors::while_doing(op, [&] { solution.kernel(run); });
  } else {
    op.handle.callBoxed(&stack);
  }
  if (!solution.halos.empty()) {
    copy_what_is_shared(op, stack, refs);
  }
}

void call_failed(const Op& op, const Refs& refs, const rules::Solution& solution, c10::Error* error) {
  if (any_traced(refs)) {
    return;
  }
  const auto& mesh = solution.replicated->mesh();
  std::ostringstream out;
  out << "in " << op.name;
  for (size_t i = 0; i < refs.size() && i < 8; ++i) {
    out << (i ? ", " : " on ") << refs[i].tensor->sizes() << " " << (refs[i].impl ? refs[i].impl->layout().str() : "plain");
  }
  out << (refs.size() > 8 ? ", ..." : "") << ", rank " << mesh.rank();
  if (error) {
    error->add_context(out.str());
  }
  uint64_t due = 0; // a sum of no dims would have been reduced at once
  for (const auto& result : solution.results) {
    for (int64_t m = 0; m < mesh.ndim(); ++m) {
      due |= static_cast<uint64_t>(result.sizes.empty() && reduces_ahead() && result.layout->placement(m).is_partial()) << m;
    }
  }
  comm::tell_failure(op.name, mesh, due);
}

void run_call(const Op& op, Stack& stack, Refs& refs, const SolutionPtr& solution) {
  const auto base = stack.size() - op.kinds.size();
  if (C10_UNLIKELY(!solution->replicated->mesh().has_this_rank())) {
    return run_outside_mesh(op, stack, base, refs, *solution);
  }
  c10::impl::ExcludeDispatchKeyGuard below(kBelow);
  c10::SmallVector<IValue, 4> kept;
  guarded_call(op, refs, *solution, [&] { run_on_pieces(op, stack, base, refs, solution, kept); });
}

void handle(const Op& op, Stack* stack) {
  const auto run = [&](Stack* args) {
    const auto base = args->size() - op.kinds.size();
    auto refs = collect(op, *args, base);
    check_plain(op, refs);
    run_call(op, *args, refs, op.outputs ? fitting_solution(op, *args, base, refs) : find_solution(op, *args, base, refs));
  };
  check::on() ? check::around(op, stack, run) : run(stack);
}

} // namespace shardtensor
