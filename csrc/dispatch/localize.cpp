#include "dispatch/localize.h"

#include "comm/values.h"
#include "dispatch/errors.h"
#include "dispatch/writable.h"
#include "redistribute/identity.h"
#include "redistribute/redistribute.h"
#include "redistribute/watch.h"
#include "rules/in_order.h"
#include "tensor/overlap.h"
#include "tensor/versions.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <c10/util/strides.h>
#include <torch/csrc/autograd/function.h>

#include <any>
#include <array>

namespace shardtensor {

using rules::Run;
using rules::Solution;

at::Tensor move_for(
    const Op& op, const Ref& ref, const char* why, const at::Tensor& local, const Layout& from, const Layout& to) {
  return errors::while_doing(op, [&] {
    tell_watcher(op.name, op.schema().arguments()[ref.arg].name(), why, from, to, *ref.tensor);
    return is_symbolic(*ref.tensor) ? redistribute(local, from, to, ref.tensor->sym_sizes())
                                    : redistribute(local, from, to, ref.tensor->sizes());
  });
}

Placed start_of(const ShardTensorImpl& t, const LayoutPtr& to) {
  if (C10_UNLIKELY(t.layout().has_partial()) && !to->has_partial() && !t.traced()) {
    if (auto reduced = t.reduced_ahead(); reduced.defined()) {
      return {std::move(reduced), Layout::replicated(t.layout().mesh_ptr())};
    }
    if (auto sum = sum_of(t)) {
      return std::move(*sum);
    }
  }
  return {t.local(), t.layout_ptr()};
}

at::Tensor moved_once(const ShardTensorImpl& t, const LayoutPtr& to, For use, Move move) {
  if (!t.traced()) {
    const auto start = start_of(t, to);
    auto out = start.layout == to ? start.local : move(start.local, *start.layout);
    const bool sums = t.layout().has_partial() && !to->has_partial();
    if (sums && use == For::Reading && start.layout == t.layout_ptr()) {
      keep_sum(t, out, to);
    }
    return sums && use == For::Owning && out.is_alias_of(start.local) ? out.clone() : out;
  }
  const auto from_piece = [&] { return move(t.local(), t.layout()); };
  if (t.layout().is_replicated() || !is_recording() || torch::autograd::get_current_node()) {
    return from_piece();
  }
  auto out = t.moved_to(*to);
  if (!out.defined()) {
    out = from_piece();
  }
  // Keep a copy: the caller may write to `out`. If the copy is never used, the graph drops it.
  t.keep_moved(to, out.clone());
  return out;
}

namespace {

bool replicates(const Op& op) {
  return !op.entry || !op.entry->rule || op.entry->gathers();
}

// Whether the op's kernel gets moved operands in the whole's order. A part of a replicated operand is a view with gaps. Some of
// torch's kernels (the backward of layer_norm) read it as contiguous memory. Elementwise kernels take any strides.
bool needs_order(const Op& op) {
  return op.is_view || replicates(op) || !op.entry->options.broadcasts;
}

// Whether a piece that stays has gaps where the whole has none: a user's own local tensor may (from_local of a slice).
bool has_gaps(const Op& op, const Ref& r, const at::Tensor& piece) {
  return !piece.is_contiguous() && r.impl && !op.is_view && needs_order(op) && !is_symbolic(piece) && !is_symbolic(*r.tensor) &&
         r.tensor->is_contiguous();
}

// What this rank reads of an operand: its piece with a halo, or the piece alone if the kernel fetches that.
at::Tensor with_halo(
    const Op& op, const Ref& r, const at::Tensor& local, const Layout& have, const Layout& from, const Solution::Halo& halo) {
  const auto move = [&](const at::Tensor& t, const Layout& start) { return move_for(op, r, why_moved(op), t, start, from); };
  const auto piece = &have == &from ? local
                     : r.impl       ? moved_once(*r.impl, LayoutPtr::reclaim_copy(&from), For::Owning, move)
                                    : move(local, have);
  if (C10_UNLIKELY(halo.recut != nullptr)) {
    tell_watcher(op.name, op.schema().arguments()[r.arg].name(), why_moved(op), from, *halo.recut, *r.tensor);
  }
  if (halo.awaited && !is_traced(piece)) {
    return piece;
  }
  return errors::while_doing(op, [&] {
    const auto strides = r.tensor->unsafeGetTensorImpl()->has_symbolic_sizes_strides()
                             ? Sizes(c10::contiguous_strides(halo.fetch.sizes()))
                             : strides_like(halo.fetch.sizes(), *r.tensor);
    return halo.fetch(piece, strides, identity(halo.padding, local.scalar_type()));
  });
}

} // namespace

const char* why_moved(const Op& op) {
  if (!op.entry || !op.entry->rule) {
    return "it has no sharding rule, so its inputs are gathered";
  }
  return op.entry->gathers() ? "it needs whole inputs" : "its rule requires this layout";
}

namespace {

// Of two dims, at least one of them a symbol; adds a guard to the graph.
void check_alike_symbols(const Op& op, const at::Tensor& x, Solution::Indexed a, const at::Tensor& y, Solution::Indexed b) {
  TORCH_SYM_CHECK(
      (x.sym_size(a.dim) * b.inner).sym_eq(y.sym_size(b.dim) * a.inner), op.name, ": the size of dim ", b.dim,
      " of one argument (", y.sym_size(b.dim), ") must match the size of dim ", a.dim, " of another (", x.sym_size(a.dim), ")");
}

} // namespace

void check_alike(const Op& op, const Refs& refs, const Solution& solution) {
  for (const auto& [a, b] : solution.alike) {
    const auto &x = *refs[a.operand].tensor, &y = *refs[b.operand].tensor;
    if (C10_UNLIKELY(is_symbolic(x) || is_symbolic(y))) {
      check_alike_symbols(op, x, a, y, b);
      continue;
    }
    if (C10_UNLIKELY(x.sizes()[a.dim] * b.inner.as_int_unchecked() != y.sizes()[b.dim] * a.inner.as_int_unchecked())) {
      errors::sizes_differ(op, {refs[a.operand].arg, x, a.dim}, {refs[b.operand].arg, y, b.dim}, solution.replicated->mesh());
    }
  }
}

namespace {

// Whether a piece is handed on with numbers. If the tensor's strides are symbols while its sizes are numbers, only a kernel needs
// that.
bool needs_numbers(const Op& op, const at::Tensor& tensor, const Solution& solution) {
  const auto strides = tensor.sym_strides();
  const bool settled = std::all_of(strides.begin(), strides.end(), [](const auto& n) { return n.maybe_as_int().has_value(); });
  return !has_symbols(tensor) && (settled || (solution.kernel && !op.entry->options.symbols));
}

// Whether the kernel finds its own writes in what it reads. torch copies what is not contiguous, or a lazy conjugate or negative,
// before it starts; and it refuses another dtype.
bool reads_own_writes(const Ref& written, const Ref& read, const at::Tensor& piece) {
  const auto lazy = [](const at::Tensor& t) { return t.is_conj() || t.is_neg(); };
  if (!read.impl || is_traced(piece) || !read.tensor->is_contiguous() || lazy(*read.tensor) || lazy(*written.tensor) ||
      read.tensor->scalar_type() != written.tensor->scalar_type()) {
    return false;
  }
  const std::array<Use, 2> uses{Use{written.tensor, written.impl, true, 0}, Use{read.tensor, read.impl, false, 1}};
  return first_overlap(uses).has_value();
}

// What is read, as a view of the whole that the kernel writes. If that has other strides, or if more than that is read, it gets
// memory for both. `read_whole` moves what is read.
at::Tensor view_of_written(
    const Ref& written, const Ref& read, const at::Tensor& moved, c10::function_ref<at::Tensor()> read_whole) {
  const auto &w = *written.tensor, &r = *read.tensor; // r is contiguous
  auto first = r.storage_offset() - w.storage_offset();
  if (!w.is_contiguous() || first < 0 || first + r.numel() > w.numel()) {
    const auto span = [](const at::Tensor& t) { return at::detail::computeStorageNbytes(t.sizes(), t.strides(), 1); };
    const auto before = std::max<int64_t>(-first, 0);
    first += before;
    const auto end = std::max(before + static_cast<int64_t>(span(w)), first + r.numel());
    const auto both = at::empty({end}, moved.options());
    both.narrow(0, first, r.numel()).copy_(read_whole().reshape({-1}));
    both.as_strided(w.sizes(), w.strides(), before).copy_(moved);
    moved.set_(both.storage(), before, w.sizes(), w.strides());
    first -= before;
  }
  return moved.as_strided(r.sizes(), r.strides(), moved.storage_offset() + first);
}

} // namespace

void local_arguments(const Op& op, const Refs& refs, const Solution& solution, Locals& locals) {
  check_alike(op, refs, solution);
  if (solution.moves || C10_UNLIKELY(any_traced(refs))) {
    locals.reserve(refs.size());
  }
  const rules::ReadsAsItWrites* in_order = nullptr;
  for (size_t i = 0; i < refs.size(); ++i) {
    const auto& r = refs[i];
    const bool written = op.mutated >> r.arg & 1;
    if (written) {
      check_writable(op, r.arg, *r.tensor, r.impl);
      in_order = std::any_cast<rules::ReadsAsItWrites>(&solution.notes);
      if (C10_LIKELY(!in_order)) {
        check_apart(op, refs, i);
      }
    }
    const auto& need = solution.operands[i];
    const auto& given = r.impl ? r.impl->local(op.is_view && !need && !solution.kernel) : *r.tensor;
    at::Tensor numbers;
    if (C10_UNLIKELY(is_symbolic(given)) && !written &&
        needs_numbers(op, *r.tensor, solution)) { // torch follows no write through a view
      numbers = in_numbers(given);
    }
    const auto& local = numbers.defined() ? numbers : given;
    if (!need) {
      if (C10_UNLIKELY(numbers.defined())) {
        locals.hold(std::move(numbers));
      } else if (C10_UNLIKELY(!written && has_gaps(op, r, given))) {
        locals.reserve(refs.size());
        locals.hold(given.contiguous());
      } else {
        locals.borrow(given);
      }
      continue;
    }
    if (op.outputs >> r.arg & 1) { // its old values are not read
      locals.hold(
          C10_UNLIKELY(is_symbolic(*r.tensor)) ? at::empty_symint(sym_local_sizes(*need, r.tensor->sym_sizes()), local.options())
                                               : at::empty(need->local_sizes(r.tensor->sizes()), local.options()));
      continue;
    }
    const auto& have = r.impl ? r.impl->layout() : *solution.replicated;
    if (C10_UNLIKELY(!solution.halos.empty())) {
      if (const auto* halo = solution.halo(i)) {
        locals.hold(with_halo(op, r, local, have, *need, *halo));
        continue;
      }
    }
    const auto move = [&](const at::Tensor& t, const Layout& from) { return move_for(op, r, why_moved(op), t, from, *need); };
    if (C10_UNLIKELY(in_order != nullptr) && in_order->operand == static_cast<int64_t>(i) &&
        reads_own_writes(refs[0], r, given)) {
      TORCH_INTERNAL_ASSERT(solution.operands[0], op.name, ": what is read moves, but not what is written, which has it");
      locals.hold(view_of_written(refs[0], r, locals[0], [&] { return move(local, have); }));
      continue;
    }
    const bool summand = !op.is_view && have.has_partial() && r.impl && r.impl->keeps_sums();
    auto moved = r.impl && !written && !numbers.defined() ? moved_once(*r.impl, need, summand ? For::Reading : For::Owning, move)
                                                          : move(local, have);
    if (!written && needs_order(op) && !is_symbolic(moved)) {
      moved = laid(std::move(moved), r.tensor->strides()); // so that the results' strides are as in torch, too
    }
    // Written copies are contiguous: some of torch's out= kernels assume that.
    locals.hold(!written ? std::move(moved) : moved.is_alias_of(local) ? moved.clone() : moved.contiguous(), summand && !written);
  }
}

void note_writes(const Op& op, const Refs& refs) {
  for (const auto& r : refs) {
    if ((op.mutated >> r.arg & 1) && r.impl) {
      r.index < 0 ? note_write_and_piece(*r.impl) : note_write_in_list(*r.impl);
    }
  }
}

c10::SmallVector<Run::At, 4> after_moves(const Refs& refs, const Solution& solution) {
  c10::SmallVector<Run::At, 4> out;
  for (size_t i = 0; i < refs.size(); ++i) {
    const auto* impl = refs[i].impl;
    const auto* need = solution.operands[i].get();
    out.push_back({need ? need : impl ? &impl->layout() : solution.replicated.get(), refs[i].tensor->sym_sizes()});
  }
  return out;
}

void carry_back(const Op& op, const Refs& refs, const Solution& solution, const Locals& locals) {
  for (size_t i = 0; i < refs.size(); ++i) {
    if (!solution.write_back.has(i)) {
      continue;
    }
    const auto* self = refs[i].impl;
    const auto& to = self ? self->layout() : *solution.replicated;
    at::Tensor local = self ? self->local() : *refs[i].tensor;
    local.copy_(move_for(op, refs[i], kWrittenBack, locals[i], *solution.operands[i], to));
  }
}

} // namespace shardtensor
