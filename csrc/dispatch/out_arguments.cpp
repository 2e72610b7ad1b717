#include "dispatch/out_arguments.h"

#include "dispatch/excluded_keys.h"
#include "dispatch/meta_probe.h"
#include "dispatch/solve.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <c10/util/strides.h>

#include <algorithm>

namespace shardtensor {

namespace {

using c10::IValue;
using torch::jit::Stack;

using OutSizes = c10::SmallVector<Sizes, 4>; // one per Ref; empty for arguments that are not outputs

Sizes sizes_of(const at::Tensor& t) {
  return Sizes(t.sizes().begin(), t.sizes().end());
}

// The sizes that outputs must have, from the op's meta kernel (for most out= forms that is Python). Nothing if the op has no
// meta kernel or depends on values.
std::optional<OutSizes> asked_sizes(const Op& op, const Stack& stack, size_t base, const Refs& refs) {
  c10::impl::ExcludeDispatchKeyGuard aside(kAside);
  auto call = on_meta(op, stack, base, refs);
  std::vector<at::Tensor> outputs;
  for (const auto& r : refs) {
    outputs.push_back(is_output(op, r) ? call[r.arg].toTensor() : at::Tensor());
  }
  try {
    op.handle.callBoxed(&call);
  } catch (const c10::Error&) {
    return std::nullopt; // if the call is wrong, it will raise by itself
  }
  OutSizes out;
  for (const auto& t : outputs) {
    out.push_back(t.defined() ? sizes_of(t) : Sizes());
  }
  return out;
}

std::optional<OutSizes> broadcast_sizes(const Op& op, const Refs& refs) {
  at::DimVector sizes;
  for (const auto& r : refs) {
    if (!is_output(op, r)) {
      const auto more = r.tensor->sizes();
      if (!at::are_expandable(sizes, more)) {
        return std::nullopt; // as above
      }
      sizes = at::infer_size_dimvector(sizes, more);
    }
  }
  return OutSizes(refs.size(), Sizes(sizes.begin(), sizes.end()));
}

// The layout of an argument with these sizes; replicated if there is none.
LayoutPtr layout_for(const Op& op, c10::IntArrayRef sizes, const Refs& refs, const LayoutPtr& own) {
  for (const auto& r : refs) {
    if (r.impl && !is_output(op, r) && r.tensor->sizes() == sizes && !r.impl->layout().has_partial()) {
      return r.impl->layout_ptr();
    }
  }
  return Layout::replicated(own->mesh_ptr());
}

void wrong_sizes(const Op& op, const Ref& r, c10::IntArrayRef has, c10::IntArrayRef needs) {
  TORCH_CHECK(
      false, op.name, ": argument '", op.schema().arguments()[r.arg].name(), "' has sizes ", has, " (",
      r.impl ? c10::str(r.impl->layout().str(), ", rank ", r.impl->layout().mesh().rank()) : "plain", "), the result ", needs,
      "; out= tensors with elements are not resized: pass one of the result's sizes or an empty one");
}

void fit_outputs(const Op& op, const Refs& refs, const OutSizes& needed) {
  for (size_t i = 0; i < refs.size(); ++i) {
    const auto& r = refs[i];
    if (!is_output(op, r) || needed[i] == r.tensor->sizes()) {
      continue;
    }
    const c10::IntArrayRef sizes = needed[i];
    if (r.tensor->numel() > 0) {
      wrong_sizes(op, r, r.tensor->sizes(), sizes);
    }
    if (!r.impl) {
      r.tensor->resize_(sizes);
      continue;
    }
    const auto layout = layout_for(op, sizes, refs, r.impl->layout_ptr());
    auto local = at::empty(layout->local_sizes(sizes), r.impl->local().options());
    r.impl->shallow_copy_from(wrap(std::move(local), layout, sizes, c10::contiguous_strides(sizes)).getIntrusivePtr());
  }
}

bool resizes(const Op& op, const Refs& refs, const OutSizes& needed) {
  for (size_t i = 0; i < refs.size(); ++i) {
    if (is_output(op, refs[i]) && needed[i] != refs[i].tensor->sizes() && refs[i].tensor->numel() == 0) {
      return true;
    }
  }
  return false;
}

} // namespace

rules::SolutionPtr fitting_solution(const Op& op, const Stack& stack, size_t base, const Refs& refs) {
  if (C10_UNLIKELY(std::any_of(refs.begin(), refs.end(), [](const Ref& r) { return has_symbols(*r.tensor); }))) {
    return find_solution(op, stack, base, refs); // no output is resized, and even pieces fit only if the whole does
  }
  std::optional<OutSizes> needed;
  if (op.entry && op.entry->options.broadcasts) {
    if (std::all_of(refs.begin(), refs.end(), [&](const Ref& r) { return r.tensor->sizes() == refs[0].tensor->sizes(); })) {
      return find_solution(op, stack, base, refs);
    }
    needed = broadcast_sizes(op, refs);
    if (needed && resizes(op, refs, *needed)) {
      needed = asked_sizes(op, stack, base, refs); // nothing if torch rejects the call: then resize nothing
    }
  } else if (auto known = known_for_sizes(op, stack, base, refs)) {
    return known; // found for outputs of these sizes, which fit
  } else {
    needed = asked_sizes(op, stack, base, refs);
  }
  if (needed) {
    fit_outputs(op, refs, *needed);
  }
  return find_solution(op, stack, base, refs);
}

void check_outputs(const Op& op, const rules::Solution& solution, const Refs& refs, const Locals& locals) {
  for (size_t i = 0; i < refs.size(); ++i) {
    const auto& r = refs[i];
    if (is_output(op, r) && (r.impl || solution.operands[i])) {
      const auto& layout = solution.operands[i] ? *solution.operands[i] : r.impl->layout();
      const bool fits = C10_UNLIKELY(is_symbolic(*r.tensor))
                            ? locals[i].sym_sizes() == c10::SymIntArrayRef(sym_local_sizes(layout, r.tensor->sym_sizes()))
                            : locals[i].sizes() == c10::IntArrayRef(layout.local_sizes(r.tensor->sizes()));
      if (!fits) {
        wrong_sizes(op, r, r.tensor->sizes(), guarded(locals[i].sym_sizes()));
      }
    }
  }
}

} // namespace shardtensor
