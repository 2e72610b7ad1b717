#include "dispatch/inputs.h"

#include "comm/tensor_kind.h"
#include "dispatch/errors.h"
#include "dispatch/write_check.h"
#include "rules/in_place_operand.h"
#include "tensor/move.h"
#include "tensor/overlap.h"
#include "tensor/versions.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>

#include <any>
#include <array>

namespace shardtensor {

using rules::KernelRun;
using rules::Solution;

namespace {

bool replicates(const Op& op) {
  return !op.entry || !op.entry->rule || op.entry->gathers();
}

// Whether the op's kernel must get moved operands in the whole's order of dims. A part of a replicated operand is a view with
// gaps, which some of torch's kernels (the backward of layer_norm) would read as contiguous memory. Elementwise kernels take
// any strides.
bool needs_order(const Op& op) {
  return op.is_view || replicates(op) || !op.entry->options.broadcasts;
}

// Whether a piece that stays has gaps where the whole has none: a user's own local tensor may (from_local of a slice).
bool has_gaps(const Op& op, const Ref& r, const at::Tensor& piece) {
  return !piece.is_contiguous() && r.impl && !op.is_view && needs_order(op) && !is_symbolic(piece) && !is_symbolic(*r.tensor) &&
         r.tensor->is_contiguous();
}

// The operand's piece with its halo, or the piece alone if the kernel fetches the halo.
at::Tensor with_halo(const Op& op, const Ref& r, const MoveRequest& operand, const Solution::Halo& halo) {
  const auto piece = moved_piece(operand);
  if (C10_UNLIKELY(halo.recut != nullptr)) {
    tell_watcher(*operand.cause, *operand.to, *halo.recut, r.tensor->sym_sizes(), r.tensor->element_size());
  }
  if (halo.awaits(piece)) {
    return piece;
  }
  const auto strides =
      is_symbolic(*r.tensor) ? dense_strides(halo.fetch.sizes(), {}) : strides_like(halo.fetch.sizes(), *r.tensor);
  return errors::while_doing(op, [&] { return halo.joined(piece, strides); });
}

} // namespace

MoveCause cause_of(const Op& op, const Ref& ref, const char* why) {
  if (!why) {
    why = !op.entry || !op.entry->rule ? "it has no sharding rule, so its inputs are gathered"
          : op.entry->gathers()        ? "it needs whole inputs"
                                       : "its rule requires this layout";
  }
  return {op.name, op.schema().arguments()[ref.arg].name(), why};
}

namespace {

// Whether two sizes agree, of which at least one is a symbol; this adds a guard. A function of its own: its temporary symbols
// would cost the usual case.
C10_NOINLINE bool agree_in_graph(
    const at::Tensor& x, const Solution::MatchedDim& a, const at::Tensor& y, const Solution::MatchedDim& b) {
  return (x.sym_size(a.dim) * b.inner).sym_eq(y.sym_size(b.dim) * a.inner).expect_true(__FILE__, __LINE__);
}

} // namespace

void check_must_match(const Op& op, const Refs& refs, const Solution& solution) {
  for (const auto& [a, b] : solution.must_match) {
    const auto &x = *refs[a.operand].tensor, &y = *refs[b.operand].tensor;
    const bool same = C10_UNLIKELY(is_symbolic(x) || is_symbolic(y))
                          ? agree_in_graph(x, a, y, b)
                          : x.sizes()[a.dim] * b.inner.as_int_unchecked() == y.sizes()[b.dim] * a.inner.as_int_unchecked();
    if (C10_UNLIKELY(!same)) {
      errors::sizes_differ(op, {refs[a.operand].arg, x, a.dim}, {refs[b.operand].arg, y, b.dim}, solution.replicated->mesh());
    }
  }
}

namespace {

// Whether the op must get the piece with numbers instead of symbols. If only the strides are symbols, only a kernel of ours
// needs numbers.
bool needs_numbers(const Op& op, const at::Tensor& tensor, const Solution& solution) {
  const auto strides = tensor.sym_strides();
  const bool settled = std::all_of(strides.begin(), strides.end(), [](const auto& n) { return n.maybe_as_int().has_value(); });
  return !has_symbols(tensor) && (settled || (solution.kernel && !op.entry->options.symbols));
}

// Whether the kernel would read its own writes. torch first copies an operand that is not contiguous, or is a lazy conjugate or
// negative, and refuses another dtype.
bool reads_own_writes(const Ref& written, const Ref& read, const at::Tensor& piece) {
  const auto lazy = [](const at::Tensor& t) { return t.is_conj() || t.is_neg(); };
  if (!read.impl || is_traced(piece) || !read.tensor->is_contiguous() || lazy(*read.tensor) || lazy(*written.tensor) ||
      read.tensor->scalar_type() != written.tensor->scalar_type()) {
    return false;
  }
  const std::array<TensorAccess, 2> uses{
      TensorAccess{written.tensor, written.impl, true, 0}, TensorAccess{read.tensor, read.impl, false, 1}};
  return first_overlap(uses).has_value();
}

// The operand that is read, as a view of the whole tensor that the kernel writes. If the written tensor has other strides, or
// is smaller than what is read, both get new memory. `read_whole` moves the operand that is read.
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
  check_must_match(op, refs, solution);
  if (solution.moves || C10_UNLIKELY(any_traced(refs))) {
    locals.reserve(refs.size());
  }
  const rules::InPlaceOperand* in_order = nullptr;
  for (size_t i = 0; i < refs.size(); ++i) {
    const auto& r = refs[i];
    const bool written = op.mutated >> r.arg & 1;
    if (written) {
      check_writable(op, r.arg, *r.tensor, r.impl);
      in_order = std::any_cast<rules::InPlaceOperand>(&solution.kernel_data);
      if (C10_LIKELY(!in_order)) {
        check_no_overlap(op, refs, i);
      }
    }
    const auto& need = solution.operands[i];
    const auto& given = r.impl ? r.impl->local(op.is_view && !need && !solution.kernel) : *r.tensor;
    at::Tensor numbers;
    if (C10_UNLIKELY(is_symbolic(given)) && !written &&
        needs_numbers(op, *r.tensor, solution)) { // torch does not track writes through a view
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
    const auto& have = r.impl ? r.impl->layout_ptr() : solution.replicated;
    const bool summand = !op.is_view && have->has_partial() && r.impl && r.impl->keeps_sums();
    MoveRequest request{*r.tensor, need, cause_of(op, r), summand ? MovePurpose::Reading : MovePurpose::Viewing};
    if (!r.impl || written || numbers.defined()) {
      request.from = PieceInLayout{local, have};
    }
    if (C10_UNLIKELY(!solution.halos.empty())) {
      if (const auto* halo = solution.halo(i)) {
        request.use = MovePurpose::Viewing; // a kernel may return it
        locals.hold(with_halo(op, r, request, *halo));
        continue;
      }
    }
    if (C10_UNLIKELY(in_order != nullptr) && in_order->operand == static_cast<int64_t>(i) &&
        reads_own_writes(refs[0], r, given)) {
      TORCH_INTERNAL_ASSERT(solution.operands[0], op.name, ": the operand that is read moves, but not the one that is written");
      locals.hold(view_of_written(refs[0], r, locals[0], [&] { return moved_piece(request); }));
      continue;
    }
    if (written) { // contiguous: some of torch's out= kernels assume that
      request.use = MovePurpose::Owning;
      locals.hold(moved_piece(request).contiguous());
      continue;
    }
    auto moved = moved_piece(request);
    if (needs_order(op) && !is_symbolic(moved)) {
      moved = in_dim_order(std::move(moved), r.tensor->strides()); // so that the results' strides are as in torch, too
    }
    locals.hold(std::move(moved), summand);
  }
}

void note_writes(const Op& op, const Refs& refs) {
  for (const auto& r : refs) {
    if ((op.mutated >> r.arg & 1) && r.impl) {
      r.index < 0 ? note_write_and_piece(*r.impl) : note_write_in_list(*r.impl);
    }
  }
}

c10::SmallVector<KernelRun::OperandInfo, 4> after_moves(const Refs& refs, const Solution& solution) {
  c10::SmallVector<KernelRun::OperandInfo, 4> out;
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
    const auto& to = self ? self->layout_ptr() : solution.replicated;
    at::Tensor local = self ? self->local() : *refs[i].tensor;
    local.copy_(moved_piece(
        {*refs[i].tensor, to, cause_of(op, refs[i], kWrittenBack), MovePurpose::Reading,
         PieceInLayout{locals[i], solution.operands[i]}}));
  }
}

} // namespace shardtensor
