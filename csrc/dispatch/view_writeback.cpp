#include "dispatch/view_writeback.h"

#include "comm/tensor_kind.h"
#include "dispatch/excluded_keys.h"
#include "dispatch/inputs.h"
#include "layout/symbolic.h"
#include "tensor/move.h"
#include "tensor/versions.h"

#include <ATen/ATen.h>

namespace shardtensor {

using rules::SolutionPtr;

namespace {

// A piece, and the layout and sizes of its tensor.
struct Piece : PieceInLayout {
  SymSizes sizes;
};

Piece piece_of(const at::Tensor& t, const ShardTensorImpl& impl) {
  return {{impl.local(true), impl.layout_ptr()}, t.sym_sizes().vec()};
}

// The layout in which a view is whole along the mesh dims that cut its base. If there one rank has the values and the others
// have zeros, all ranks get the sum.
LayoutPtr whole_where_cut(const Layout& view, const Layout& base) {
  const auto is_such = [&](int64_t m) { return base.placement(m).is_shard() && view.placement(m).is_partial(); };
  return view.with_where(is_such, Placement::replicate());
}

} // namespace

void remember_base(
    const Op& op, const SolutionPtr& solution, const Ref& base_ref, const at::Tensor& operand, const at::Tensor& view) {
  const auto& impl = shard_tensor(view, op.name.c_str());
  const auto& base = *base_ref.impl;
  const auto& copied = impl.detached_view();
  if (!impl.watches() || copied == base.detached_view()) {
    return;
  }
  // Must be decided alike on all ranks, and an empty piece cannot show whether it shares memory. A piece with its halo has no
  // layout from which it could be moved back.
  const auto& local = impl.local(true);
  const bool views_moved = solution->operands[0] && !solution->halo(0) && (rules::is_empty(local) || local.is_alias_of(operand));
  const bool base_is_lost =
      base.detached_view() && !base.detached_view()->put_back; // then the write would not reach the base's own base
  if ((!solution->put_back && !views_moved) || base_is_lost) {
    return;
  }
  const auto home = piece_of(*base_ref.tensor, base);
  const Piece source{{operand, solution->operands[0] ? solution->operands[0] : home.layout}, home.sizes};
  const auto cause = cause_of(op, base_ref, kWrittenBack);
  copied->put_back = [cause, solution, home, source, copy = piece_of(view, impl), behind = base.detached_view()] {
    c10::impl::ExcludeDispatchKeyGuard below(kBelow);
    if (solution->put_back) {
      const auto values = moved_piece(copy, *whole_where_cut(*copy.layout, *source.layout), copy.sizes, cause);
      solution->put_back(*solution, {source.layout.get(), source.sizes}, source.local, values);
    }
    if (source.layout != home.layout) {
      at::Tensor(home.local).copy_(moved_piece(source, *home.layout, source.sizes, cause));
    }
    if (!is_traced(home.local)) {
      bump_piece(home.local);
    }
    if (behind) {
      if (behind->put_back) {
        behind->put_back();
      }
      behind->seen = behind->base_writes->count + 1; // this write will be counted next
    }
  };
}

} // namespace shardtensor
