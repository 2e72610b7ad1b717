// Views: which dim of the result is which dim of the operand, and the view's strides and offset in the operand's memory.
// A slice of a sharded dim is a slice of every piece, and a reshape of other dims keeps it cut: both stay views, on every rank.
#pragma once

#include "rules/kernel_utils.h"

namespace shardtensor::rules {

// Dim d of the view has the stride of dim dims[d] of its base.
Geometry strides_of(c10::ArrayRef<int64_t> dims);
// 0 to n - 1
Sizes dims_in_order(int64_t n);

// The diagonal of dims a and b; torch's op takes no symbol.
at::Tensor diagonal_at(const at::Tensor& x, const c10::SymInt& offset, int64_t a, int64_t b);

// The view itself, or a copy of it: the *_copy forms share the kernels of the views.
at::Tensor own(const KernelRun& run, at::Tensor view);

// The rule of a view whose operand and result have these dims. `sizes`: the result's, if its dims do not give them.
Rule as_view(Rule rule, Dims in, Dims out, Geometry geometry, SymSizes sizes = {});
Rule permuted(const Call& call, c10::ArrayRef<int64_t> order);
Rule same(const Call& call);

template <at::Tensor (*f)(const at::Tensor&)>
void unary_kernel(KernelRun& run) {
  run.returns({f(run.arg(0).toTensor())});
}

// The arguments of a reshaping op: the sizes of a view, the sizes of a possible copy, or also the whole's strides (which a
// piece does not have).
enum class ReshapeArguments { Sizes, SizesOfCopy, Strides };
Rule reshaped(const Call& call, const SymSizes& to, ReshapeArguments told);

// ---- one index of a dim ----
// If the dim is cut, the row lies whole at its owner: it is cut along one of its dims, the host, and the owner has all of it.

// The index, counted from 0; raises if it is out of range.
c10::SymInt checked_index(const c10::SymInt& index, int64_t dim, c10::SymIntArrayRef sizes);
// Compares the row with the bounds of all ranks' pieces: the kernel compares it with this rank's, and guards must be alike.
void guard_place(const TensorArg& x, int64_t dim, const c10::SymInt& index);
// The first of these dims (a mask) that has elements and that no mesh dim cuts; if all are cut, the first; or -1.
int64_t host_among(const TensorArg& x, uint64_t dims);
// A view with one index of `dim`, and none of `host`.
at::Tensor none_along(const at::Tensor& x, int64_t dim, int64_t host);

// ---- a source written into a copy of self: slice_scatter and similar ops ----

// The copy's strides. torch copies self's memory: gaps stay gaps, and if elements share memory, a write to one is a write to
// all. But if a stride is 0, the copy is dense.
struct CopyForm {
  SymSizes strides;
  bool dense = false;   // like results that torch makes itself
  bool shared = false;  // elements may share memory
  bool repeats = false; // self has a stride of 0
};
CopyForm form_of_copy(const TensorArg& x);
void set_copy_form(Rule& rule, CopyForm form); // the rule's result
bool has_strides(const at::Tensor& x, const SymSizes& strides);

// The indices of `window` that lie in `piece`, as a slice of the piece.
at::Tensor slice_of_piece(const at::Tensor& x, int64_t dim, const Dim::SymWindow& window, const SymInterval& piece);

} // namespace shardtensor::rules
