// Circular padding along cut dims and the gradient of repeat() there, by shardtensor::shifted and repeats_added
// (rules/ops/flip_roll_repeat.cpp), so that nothing is gathered. Flips and rolls in graphs. Uses autograd/functions,
// dispatch/plain_tensors, tensor/.
#include "autograd/functions.h"
#include "autograd/with_gradient.h"
#include "dispatch/plain_tensors.h"
#include "redistribute/watch.h"
#include "tensor/shard_tensor.h"

#include <ATen/ATen.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_pad_circular_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/flip_ops.h>
#include <ATen/ops/repeat_ops.h>

#include <algorithm>

namespace shardtensor {

namespace {

using at::Tensor;
using torch::autograd::variable_list;

// Result o along dim is the sum of t[o + shift] over the shifts.
Tensor shifted(const Tensor& t, int64_t dim, const std::vector<int64_t>& shifts, const c10::SymInt& size, bool multiple = false) {
  static const auto op = own_op<Tensor(at::TensorList, int64_t, at::IntArrayRef, c10::SymInt, bool)>("shardtensor::shifted");
  return op.call(std::vector<Tensor>(shifts.size(), t), dim, shifts, size, multiple);
}

// The gradient is the same with the shifts reversed.
Tensor shift_sum(const Tensor& t, int64_t dim, const std::vector<int64_t>& shifts, const c10::SymInt& size) {
  auto back = shifts;
  std::transform(back.begin(), back.end(), back.begin(), std::negate<>());
  return with_gradient(
      {t}, {}, [&] { return shifted(t, dim, shifts, size); },
      [dim, back, size_before = t.sym_size(dim)](const Tensor& grad, const variable_list&) -> variable_list {
        return {shift_sum(grad, dim, back, size_before)};
      });
}

// False in forward mode, for which there are only torch's formulas.
bool is_cut(const Tensor& t, int64_t dim) {
  const auto* impl = as_shard_tensor(t);
  return impl && impl->layout().shards(dim) && !t._fw_grad(0).defined();
}

Tensor pad_circular(const Tensor& self, c10::SymIntArrayRef padding) {
  const auto n = static_cast<int64_t>(padding.size()) / 2;
  bool cut = false, fits = static_cast<int64_t>(padding.size()) == 2 * n && n <= self.dim();
  for (int64_t i = 0; i < n && fits; ++i) {
    const auto dim = self.dim() - 1 - i;
    const auto &before = padding[2 * i], &after = padding[2 * i + 1];
    cut = cut || (is_cut(self, dim) && (before != 0 || after != 0));
    fits = before >= 0 && after >= 0 && before <= self.sym_size(dim) && after <= self.sym_size(dim);
  }
  if (!cut || !fits) {
    return at::compositeimplicitautograd::_pad_circular_symint(self, padding); // raises where torch does
  }
  auto out = self;
  for (int64_t i = 0; i < n; ++i) {
    const auto dim = self.dim() - 1 - i;
    const auto before = padding[2 * i].guard_int(__FILE__, __LINE__), after = padding[2 * i + 1].guard_int(__FILE__, __LINE__);
    const auto size = out.sym_size(dim).guard_int(__FILE__, __LINE__);
    std::vector<int64_t> shifts{-before};
    if (before) {
      shifts.push_back(size - before);
    }
    if (after) {
      shifts.push_back(-before - size);
    }
    out = shifts.size() == 1 ? out : shift_sum(out, dim, shifts, size + before + after);
  }
  return out;
}

Tensor repeated(const Tensor& t, int64_t dim, int64_t times) {
  std::vector<int64_t> each(t.dim(), 1);
  each[dim] = times;
  return t.repeat(each);
}

// A rank reads all the gradients of its piece. If it holds more than one copy of the whole, it first adds up the gradients of its
// copies.
Tensor folded(const Tensor& t, int64_t dim, int64_t times) {
  static const auto repeats_added = own_op<Tensor(const Tensor&, int64_t, int64_t)>("shardtensor::repeats_added");
  const auto size = t.size(dim) / times;
  if (times > as_shard_tensor(t)->layout().pieces_of(dim)) {
    return repeats_added.call(t, dim, size);
  }
  std::vector<int64_t> shifts;
  for (int64_t i = 0; i < times; ++i) {
    shifts.push_back(size * i);
  }
  return shifted(t, dim, shifts, size, /*multiple=*/true);
}

// Result o along dim is t[o mod size], or (`added`) the sum of all t[o + size / times * i]. Each is the other's gradient.
Tensor repeat_or_fold(const Tensor& t, int64_t dim, int64_t times, bool added) {
  return with_gradient(
      {t}, {}, [&] { return (added ? folded : repeated)(t, dim, times); },
      [dim, times, added](const Tensor& grad, const variable_list&) -> variable_list {
        return {repeat_or_fold(grad, dim, times, !added)};
      });
}

Tensor repeat(c10::DispatchKeySet keys, const Tensor& self, c10::SymIntArrayRef repeats) {
  const auto lead = static_cast<int64_t>(repeats.size()) - self.dim();
  auto rest = repeats.vec();
  std::vector<std::pair<int64_t, int64_t>> cut; // dims of the result, and how often
  const bool ours = lead >= 0 && is_tracked(self) && !is_symbolic(self) && self.numel();
  for (int64_t d = 0; d < self.dim() && ours; ++d) {
    if (is_cut(self, d) && repeats[lead + d] > 1) {
      cut.emplace_back(lead + d, repeats[lead + d].guard_int(__FILE__, __LINE__));
      rest[lead + d] = 1;
    }
  }
  if (cut.empty()) {
    return at::_ops::repeat::redispatch(torchs_autograd(keys), self, repeats);
  }
  const bool more = lead > 0 || std::any_of(rest.begin(), rest.end(), [](const c10::SymInt& n) { return n != 1; });
  auto out = more ? at::_ops::repeat::redispatch(torchs_autograd(keys), self, rest) : self;
  for (const auto& [dim, times] : cut) {
    out = repeat_or_fold(out, dim, times, false);
  }
  return out;
}

// The number of pieces along dim, if all are equal and none is shorter than `by`. Else 0. Sizes may be symbols.
int64_t equal_pieces(const Tensor& t, int64_t by, int64_t dim) {
  const auto& layout = as_shard_tensor(t)->layout();
  const auto pieces = layout.pieces_of(dim);
  const auto size = t.sym_size(dim);
  const bool strided = std::any_of(layout.placements().begin(), layout.placements().end(), [&](const Placement& p) {
    return p.is_shard(dim) && p.split_factor != 1;
  });
  return !strided && layout.is_even() && size % pieces == 0 && size / pieces >= std::abs(by) ? pieces : 0;
}

// A roll in a graph whose sizes are symbols. If pieces are equal, the last rows of each piece (or the first, if `by` is
// negative) go to the next piece: only these rows are gathered, and one graph serves all lengths.
Tensor rolled_by_pieces(const Tensor& t, int64_t by, int64_t dim, int64_t pieces) {
  const auto length = t.sym_size(dim) / pieces;
  const auto rows = t.unflatten_symint(dim, {c10::SymInt(pieces), length});
  const auto part = [&](const c10::SymInt& start, const c10::SymInt& n) { return rows.narrow_symint(dim + 1, start, n); };
  const auto [leaving, staying] =
      by > 0 ? std::make_pair(part(length - by, by), part(0, length - by)) : std::make_pair(part(0, -by), part(-by, length + by));
  const auto coming = at::roll(redistribute(leaving, as_shard_tensor(leaving)->layout().whole_along(dim)), by > 0 ? 1 : -1, dim);
  return at::cat(by > 0 ? std::vector<Tensor>{coming, staying} : std::vector<Tensor>{staying, coming}, dim + 1)
      .flatten(dim, dim + 1);
}

void roll(const Op& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto by_formula = [&](torch::jit::Stack& call) { op.handle.callBoxedForDispatchKey(c10::DispatchKey::Autograd, call); };
  const auto self = torch::jit::peek(*stack, 0, 3).toTensor();
  const auto shifts = torch::jit::peek(*stack, 1, 3).toSymIntVector();
  const auto dims = torch::jit::peek(*stack, 2, 3).toIntVector();
  const auto n = self.dim();
  const auto* impl = as_shard_tensor(self);
  const auto cut = [&](int64_t d) { return d >= -n && d < n && is_cut(self, at::maybe_wrap_dim(d, n)); };
  if (!impl || !impl->traced() || dims.size() != shifts.size() || self.sym_numel() == 0 ||
      std::none_of(dims.begin(), dims.end(), cut)) {
    return by_formula(*stack);
  }
  torch::jit::drop(*stack, 3);
  auto out = self;
  for (size_t i = 0; i < dims.size(); ++i) {
    const auto dim = at::maybe_wrap_dim(dims[i], n);
    const auto by = shifts[i].guard_int(__FILE__, __LINE__);
    if (const auto pieces = by && is_symbolic(out) ? equal_pieces(out, by, dim) : 0) {
      out = rolled_by_pieces(out, by, dim, pieces);
    } else {
      torch::jit::Stack call{out, c10::List<int64_t>({by}), c10::List<int64_t>({dim})};
      by_formula(call);
      out = call[0].toTensor();
    }
  }
  stack->emplace_back(std::move(out));
}

// In a graph whose sizes are symbols, equal pieces are gathered, and cut again once they are flipped: one graph serves all
// lengths. (The indices that a rank would read of other pieces are numbers.)
Tensor flip(c10::DispatchKeySet keys, const Tensor& self, c10::IntArrayRef dims) {
  const auto by_formula = [&](const Tensor& t) { return at::_ops::flip::redispatch(torchs_autograd(keys), t, dims); };
  const auto* impl = as_shard_tensor(self);
  if (!impl || !impl->traced() || !is_symbolic(self) || self.sym_numel() == 0) {
    return by_formula(self);
  }
  uint64_t cut = 0;
  for (const auto given : dims) {
    const auto d = given < 0 ? given + self.dim() : given;
    if (d >= 0 && d < self.dim() && is_cut(self, d)) {
      if (!equal_pieces(self, 0, d)) {
        return by_formula(self);
      }
      cut |= uint64_t{1} << d;
    }
  }
  if (!cut) {
    return by_formula(self);
  }
  const auto layout = impl->layout_ptr();
  return redistribute(by_formula(redistribute(self, layout->uncut(cut))), layout);
}

} // namespace

const Formula formulas::flip = formula<&shardtensor::flip>;
const Formula formulas::pad_circular = formula<&shardtensor::pad_circular>;
const Formula formulas::repeat = formula<&shardtensor::repeat>;
const Formula formulas::roll = formula<&shardtensor::roll>;

} // namespace shardtensor
