#include "redistribute/traced.h"

#include "comm/comm.h"
#include "comm/traced.h"
#include "layout/symbolic.h"
#include "redistribute/neutral_value.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

namespace shardtensor {

namespace {

using c10::SymInt;
using Lengths = std::vector<SymInt>;
namespace graph = comm::traced;

// The length of each coordinate's piece of the dim that mesh dim `m` cuts; nothing if a piece has several runs.
std::optional<Lengths> lengths_along(const Layout& layout, int64_t m, c10::SymIntArrayRef sizes) {
  const auto& p = layout.placement(m);
  if (p.split_factor > 1) {
    return std::nullopt;
  }
  auto at = layout.mesh().coordinate();
  const auto extent = sym_extent_before(layout, m, p.dim, sizes[p.dim], at);
  const SymSplit split(layout, m, extent);
  const auto number = split ? 0 : extent.guard_int(__FILE__, __LINE__);
  Lengths out;
  for (at[m] = 0; at[m] < layout.mesh().size(m); ++at[m]) {
    out.push_back(split ? split(at[m]).length : SymInt(layout.split_size(m, number, at)));
  }
  return out;
}

bool alike(const Lengths& lengths) {
  return std::all_of(lengths.begin(), lengths.end(), [&](const SymInt& n) {
    return n.is_same(lengths[0]) || (!n.is_symbolic() && !lengths[0].is_symbolic() && n == lengths[0]);
  });
}

const SymInt& longest(const Lengths& lengths) {
  const auto* out = &lengths[0];
  for (const auto& n : lengths) {
    out = !n.is_same(*out) && n > *out ? &n : out;
  }
  return *out;
}

at::Tensor padded(const at::Tensor& t, int64_t dim, const SymInt& length) {
  std::vector<SymInt> pad(2 * (t.dim() - dim), 0);
  pad.back() = length - t.sym_size(dim);
  return at::constant_pad_nd_symint(t, pad);
}

// For lengths that differ: whether padding all pieces to the longest costs little. Then the backend's own gather or
// reduce-scatter can be used; otherwise pieces are sent unpadded, in an all-to-all.
bool worth_padding(const Lengths& lengths) {
  const auto total = std::accumulate(lengths.begin(), lengths.end(), SymInt(0), plus);
  return longest(lengths) * static_cast<int64_t>(lengths.size() * 4) <= total * 5;
}

// The product of `sizes` without `dim`.
SymInt rest_of(c10::SymIntArrayRef sizes, int64_t dim) {
  SymInt rest = 1;
  for (size_t d = 0; d < sizes.size(); ++d) {
    rest = static_cast<int64_t>(d) == dim ? rest : rest * sizes[d];
  }
  return rest;
}

Lengths times(const Lengths& lengths, const SymInt& n) {
  Lengths out;
  for (const auto& length : lengths) {
    out.push_back(length * n);
  }
  return out;
}

// Joins pieces that arrived one after the other along `dim`.
at::Tensor joined(const at::Tensor& flat, const Lengths& numels, SymSizes sizes, int64_t dim, const Lengths& lengths) {
  auto pieces = flat.split_with_sizes_symint(numels, 0);
  for (size_t c = 0; c < pieces.size(); ++c) {
    sizes[dim] = lengths[c];
    pieces[c] = pieces[c].view_symint(sizes);
  }
  return at::cat(pieces, dim);
}

at::Tensor flat(std::vector<at::Tensor> parts) {
  for (auto& part : parts) {
    part = part.reshape_symint({-1});
  }
  return at::cat(parts, 0);
}

at::Tensor gather(const at::Tensor& local, int64_t dim, const Lengths& lengths, const Mesh& mesh, int64_t m) {
  const auto n = mesh.size(m);
  const bool even = alike(lengths);
  if (!even && !worth_padding(lengths)) {
    const auto received = times(lengths, rest_of(local.sym_sizes(), dim));
    const Lengths sent(n, received[mesh.coordinate()[m]]);
    const auto all = graph::all_to_all(flat(std::vector<at::Tensor>(n, local)), received, sent, mesh, m);
    return joined(all, received, local.sym_sizes().vec(), dim, lengths);
  }
  const auto mine = even ? local : padded(local, dim, longest(lengths));
  const auto all = graph::all_gather(mine, mesh, m);
  if (even && dim == 0) {
    return all;
  }
  auto pieces = all.split_with_sizes_symint(Lengths(n, mine.sym_size(0)), 0);
  for (size_t c = 0; c < pieces.size() && !even; ++c) {
    pieces[c] = pieces[c].narrow_symint(dim, 0, lengths[c]);
  }
  return at::cat(pieces, dim);
}

at::Tensor reduce_scatter(
    const at::Tensor& summand, int64_t dim, const Lengths& lengths, const Mesh& mesh, int64_t m, ReduceOp op) {
  const bool even = alike(lengths);
  if (even && dim == 0) {
    return graph::reduce_scatter(summand, mesh, m, op);
  }
  const auto& mine = lengths[mesh.coordinate()[m]];
  auto pieces = summand.split_with_sizes_symint(lengths, dim);
  if (!even && !worth_padding(lengths)) {
    const auto n = mesh.size(m);
    const auto sent = times(lengths, rest_of(summand.sym_sizes(), dim));
    const Lengths received(n, sent[mesh.coordinate()[m]]);
    auto sizes = summand.sym_sizes().vec();
    sizes[dim] = mine;
    sizes.insert(sizes.begin(), n);
    const auto summands = graph::all_to_all(flat(std::move(pieces)), received, sent, mesh, m).view_symint(sizes);
    return op == ReduceOp::Avg ? summands.mean(0) : summands.sum(0);
  }
  for (size_t c = 0; c < pieces.size() && !even; ++c) {
    pieces[c] = padded(pieces[c], dim, longest(lengths));
  }
  const auto out = graph::reduce_scatter(at::cat(pieces, 0), mesh, m, op);
  return even ? out : out.narrow_symint(dim, 0, mine);
}

// From a cut of dim `src` to one of dim `dst`.
at::Tensor exchange(
    const at::Tensor& local, int64_t src, const Lengths& held, int64_t dst, const Lengths& wanted, const Mesh& mesh, int64_t m) {
  const auto me = mesh.coordinate()[m];
  auto sizes = local.sym_sizes().vec();
  sizes[src] = 1;
  const auto rest = rest_of(sizes, dst);
  const auto sent = times(wanted, rest * held[me]), received = times(held, rest * wanted[me]);
  const auto all = graph::all_to_all(flat(local.split_with_sizes_symint(wanted, dst)), received, sent, mesh, m);
  sizes[dst] = wanted[me];
  return joined(all, received, sizes, src, held);
}

// The pieces of a cut, end to end.
struct PieceEnds {
  explicit PieceEnds(const Lengths& given) : lengths(given), order(given.size() + 1) {
    for (const auto& length : lengths) {
      ends.push_back(plus(ends.back(), length));
    }
  }
  // The next boundary is the nth of both rows; boundaries of empty pieces behind it are at the same place.
  void take(int64_t nth) {
    order[taken] = nth;
    while (taken < lengths.size() && lengths[taken] == 0) {
      order[++taken] = nth;
    }
    ++taken;
  }

  const Lengths& lengths;
  Lengths ends{0};
  std::vector<int64_t> order;
  size_t taken = 0;
};

// Compares the boundaries of all pieces, so that the guards are alike on all ranks.
void put_in_order(PieceEnds& a, PieceEnds& b) {
  for (int64_t nth = 0; a.taken < a.ends.size() && b.taken < b.ends.size(); ++nth) {
    const auto &x = a.ends[a.taken], &y = b.ends[b.taken];
    const bool both = x.is_same(y) || x == y, first = both || x < y;
    if (first) {
      a.take(nth);
    }
    if (both || !first) {
      b.take(nth);
    }
  }
}

// From one cut of `dim` to another.
at::Tensor recut(const at::Tensor& local, int64_t dim, const Lengths& held, const Lengths& wanted, const Mesh& mesh, int64_t m) {
  const auto me = mesh.coordinate()[m], n = mesh.size(m);
  PieceEnds now(held), next(wanted);
  put_in_order(now, next);
  const auto common = [&](int64_t holder, int64_t wants) -> SymInterval {
    const auto later = now.order[holder] < next.order[wants], earlier = now.order[holder + 1] < next.order[wants + 1];
    if (std::max(now.order[holder], next.order[wants]) >= std::min(now.order[holder + 1], next.order[wants + 1])) {
      return {now.ends[holder], 0};
    }
    const auto &start = later ? next.ends[wants] : now.ends[holder], &end = earlier ? now.ends[holder + 1] : next.ends[wants + 1];
    return {start, plus(end, -start)};
  };
  Lengths leaving, coming;
  std::vector<at::Tensor> parts;
  for (int64_t c = 0; c < n; ++c) {
    const auto part = common(me, c);
    parts.push_back(local.narrow_symint(dim, plus(part.start, -now.ends[me]), part.length));
    leaving.push_back(part.length);
    coming.push_back(common(c, me).length);
  }
  auto sizes = local.sym_sizes().vec();
  const auto rest = rest_of(sizes, dim);
  const auto received = times(coming, rest);
  return joined(graph::all_to_all(flat(std::move(parts)), received, times(leaving, rest), mesh, m), received, sizes, dim, coming);
}

// The mesh dim whose cut of a tensor dim changes, if the step changes only this and no other mesh dim cuts that tensor dim.
int64_t recuts(const Layout& now, const Layout& next) {
  int64_t found = -1;
  for (int64_t m = 0; m < now.ndim(); ++m) {
    if (now.placement(m) == next.placement(m) && same_cut(now.cut(m), next.cut(m))) {
      continue;
    }
    if (found >= 0 || !now.placement(m).is_shard() || now.placement(m) != next.placement(m)) {
      return -1;
    }
    found = m;
  }
  for (int64_t m = 0; m < now.ndim() && found >= 0; ++m) {
    if (m != found && now.placement(m).is_shard(now.placement(found).dim)) {
      return -1;
    }
  }
  return found;
}

// The indices in front of coordinate `me`'s piece.
SymInt start_of(const Lengths& lengths, int64_t me) {
  return std::accumulate(lengths.begin(), lengths.begin() + me, SymInt(0), plus);
}

at::Tensor slice(const at::Tensor& whole, int64_t dim, const Lengths& lengths, int64_t me) {
  return whole.narrow_symint(dim, start_of(lengths, me), lengths[me]);
}

// The piece at its place in the whole, with `nothing` elsewhere.
at::Tensor spread(const at::Tensor& piece, int64_t dim, const Lengths& lengths, int64_t me, const at::Scalar& nothing) {
  std::vector<SymInt> pad(2 * (piece.dim() - dim), 0);
  pad[pad.size() - 2] = start_of(lengths, me);
  pad.back() = std::accumulate(lengths.begin() + me + 1, lengths.end(), SymInt(0), plus);
  return at::constant_pad_nd_symint(piece, pad, nothing);
}

} // namespace

std::optional<at::Tensor> traced_step(
    const at::Tensor& local, const Step& step, const Layout& now, const Layout& next, c10::SymIntArrayRef sizes) {
  const bool moves_pieces = step.kind == StepKind::AllToAll || step.kind == StepKind::Transfer;
  const auto same_dim = moves_pieces ? recuts(now, next) : -1;
  const auto m = same_dim >= 0 ? same_dim : step.mesh_dim;
  const auto& mesh = now.mesh();
  if (m < 0 || comm::is_alone(mesh, m)) {
    return std::nullopt;
  }
  const auto &p = now.placement(m), &q = next.placement(m);
  if (same_dim >= 0) {
    const auto held = lengths_along(now, m, sizes), wanted = lengths_along(next, m, sizes);
    return held && wanted ? std::optional(recut(local, p.dim, *held, *wanted, mesh, m)) : std::nullopt;
  }
  switch (step.kind) {
    case StepKind::AllReduce:
      if (p.reduce == ReduceOp::Norm) {
        const auto sum = graph::all_reduce(norm_power(local, p.norm_order), mesh, m, p.reduce);
        return norm_root(sum, p.norm_order, local.scalar_type());
      }
      return graph::all_reduce(local, mesh, m, p.reduce);
    case StepKind::ReduceScatter:
      if (graph::can_reduce_scatter(p.reduce, local.scalar_type())) {
        if (const auto lengths = lengths_along(next, m, sizes)) {
          return reduce_scatter(local, q.dim, *lengths, mesh, m, p.reduce);
        }
      }
      return std::nullopt;
    case StepKind::AllGather:
      if (const auto lengths = lengths_along(now, m, sizes)) {
        return gather(local, p.dim, *lengths, mesh, m);
      }
      return std::nullopt;
    case StepKind::AllToAll:
      if (p.dim != q.dim) {
        const auto held = lengths_along(now, m, sizes), wanted = lengths_along(next, m, sizes);
        if (held && wanted) {
          return exchange(local, p.dim, *held, q.dim, *wanted, mesh, m);
        }
      }
      return std::nullopt;
    case StepKind::Slice:
      if (const auto lengths = lengths_along(next, m, sizes)) {
        return slice(local, q.dim, *lengths, mesh.coordinate()[m]);
      }
      return std::nullopt;
    case StepKind::Pad:
      if (const auto lengths = lengths_along(now, m, sizes)) {
        const auto nothing = neutral_summand(q.reduce, local.scalar_type(), q.norm_order);
        return spread(local, p.dim, *lengths, mesh.coordinate()[m], nothing);
      }
      return std::nullopt;
    default:
      return std::nullopt;
  }
}

bool may_transfer_in_graph(const Mesh& mesh) {
  return comm::size_of_world(mesh) == mesh.size();
}

} // namespace shardtensor
