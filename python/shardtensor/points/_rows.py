"""Rows by their global numbers: read from whichever rank holds them, and reduced to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, get_args

import torch
from torch.distributed.tensor import DTensor

import shardtensor._C as _C
from shardtensor.tensor._from_local import coordinate_at, from_everyone
from shardtensor.tensor._layout import _PARTIAL, _REPLICATE, _SHARD, _UNCUT, placements_of
from shardtensor.tensor._modes import get_promotion_mode
from shardtensor.tensor._pieces import has_shards
from shardtensor.tensor._swap import swap
from shardtensor.tensor._tensor import ShardTensor

Function = TypeVar("Function", bound=Callable[..., Any])
Reduction = Literal["sum", "mean", "amax", "amin"]
_SUMMANDS = (_PARTIAL, -1, 1, "sum", 2.0)
_ROWS = (_SHARD, 0, 1, "sum", 2.0)


def outside_graphs(function: Function) -> Function:
    """A compiled function calls it between its graphs, because the number of messages depends on values."""
    return torch.compiler.disable(function)  # type: ignore[no-any-return, no-untyped-call]


# ---- layouts ----


def as_sharded(who: str, **tensors: torch.Tensor) -> list[ShardTensor]:
    """ShardTensors of one mesh. A plain tensor counts as replicated if the promotion mode says so."""
    first = next(ShardTensor.from_dtensor(t) for t in tensors.values() if isinstance(t, DTensor))
    view, out = first._layout.mesh, []
    for name, t in tensors.items():
        if not isinstance(t, DTensor):
            if get_promotion_mode() == "error":
                raise RuntimeError(
                    f"{who}: argument '{name}' is a plain tensor among ShardTensors; distribute it, or call inside implicit_replication() if "
                    f"all ranks have the same (rank {view.rank})"
                )
            t = ShardTensor.from_local(t, first.device_mesh, None)
        t = ShardTensor.from_dtensor(t)
        if t._layout.mesh != view:
            raise ValueError(f"{who}: argument '{name}' is on {t._layout.mesh}, another on {view}; redistribute one of them (rank {view.rank})")
        if has_shards(t) or not view.has_this_rank:
            raise NotImplementedError(f"{who}: argument '{name}' has no single piece on rank {view.rank} ({t._layout})")
        out.append(t)
    return out


def leading_layout(t: ShardTensor, dims: int, who: str) -> _C.Layout:
    """How the first dims of a tensor are cut."""
    layout = t._layout
    placements = [p if p[0] == _SHARD and p[1] < dims else _UNCUT for p in layout.placements]
    if any(p[2] > 1 for p in placements):
        raise NotImplementedError(f"{who}: {layout} cuts in strides; redistribute it to Shard first (rank {layout.mesh.rank})")
    return _C.Layout(layout.mesh, placements, [cut if a == b else None for cut, a, b in zip(layout.cuts, layout.placements, placements, strict=True)])


def with_whole(t: ShardTensor, dims: int, who: str) -> ShardTensor:
    """The tensor, cut at most along its first `dims` dims: along mesh dims that cut other dims or hold summands it becomes whole."""
    layout = leading_layout(t, dims, who)
    return t if layout == t._layout else _C.redistribute(t, layout)


def made(local: torch.Tensor, layout: _C.Layout, sizes: Sequence[int]) -> ShardTensor:
    """A ShardTensor of these global sizes; summands are added up."""
    sizes = list(sizes)
    out = _C.from_local(local.contiguous(), layout, sizes, _C.strides_like(sizes, torch.empty([2] * len(sizes), device="meta")))
    if not layout.has_partial:
        return out
    return _C.redistribute(out, _C.Layout(layout.mesh, [_UNCUT if p[0] == _PARTIAL else p for p in layout.placements], layout.cuts))


def starts_of(layout: _C.Layout, size: int) -> list[tuple[int, int, int]]:
    """The rows of each rank that this one reads from: of all that hold different rows, those with this rank's coordinates along mesh
    dims that do not cut. (index in the mesh, first row, number of rows), by index and so by row."""
    mesh = layout.mesh
    out = []
    for index in range(len(mesh.ranks)):
        at = coordinate_at(mesh, index)
        if all(a == b for a, b, p in zip(at, mesh.coordinate, layout.placements, strict=True) if p[0] != _SHARD):
            ((start, length),) = layout.intervals(0, size, at)
            out.append((index, start, length))
    return out


def lengths_as_cuts(layout: _C.Layout, placements: list[tuple[int, int, int, str, float]], lengths: list[int]) -> tuple[_C.Layout, int]:
    """The layout in which the rank at index i of the mesh has lengths[i] along the dim that `placements` cut, and their sum."""
    shape = layout.mesh.shape
    along = torch.tensor(lengths).view(shape)
    for m, p in enumerate(placements):
        if p[0] != _SHARD:
            along = along.narrow(m, 0, 1)  # the same on all ranks along it
    cuts: list[list[int] | None] = []
    for m, p in enumerate(placements):
        inner = list(range(m + 1, len(shape)))
        cuts.append((along.sum(inner) if inner else along).flatten().tolist() if p[0] == _SHARD else None)
    return _C.Layout(layout.mesh, placements, cuts), int(along.sum())


# ---- routes ----


class Routes:
    """Where the rows are that `index` names, found once for many calls of `take` and `scatter`, such as those of all layers of a graph
    network: they take a `Routes` in place of the index.

    index: global row numbers, of any sizes and cut in any way. rows: a tensor whose rows they number; only its number of rows and how
    these are cut matter. All ranks of the mesh call it.
    """

    @outside_graphs
    def __init__(self, index: torch.Tensor, rows: torch.Tensor) -> None:
        who = "points.Routes"
        if not any(isinstance(t, DTensor) for t in (index, rows)):
            raise TypeError(f"{who}: neither 'index' nor 'rows' is a ShardTensor")
        index, rows = as_sharded(who, index=index, rows=rows)
        if index.dtype not in (torch.int64, torch.int32) or not index.ndim:
            raise TypeError(f"{who}: argument 'index' is {index.dtype} of {index.ndim} dims; use int64 or int32 and a dim or more")
        if not rows.ndim:
            raise ValueError(f"{who}: argument 'rows' has no dims")
        self.rows, self.layout = rows.shape[0], leading_layout(rows, 1, who)
        self.shape = index.shape
        index = with_whole(index.detach(), index.ndim, who)  # type: ignore[arg-type]
        self._asked = index._layout
        # Mesh dims that cut the rows must cut the index too: otherwise each rank would ask for all rows, and add all of them.
        finer = [_ROWS if a[0] == _SHARD and b[0] == _REPLICATE else b for a, b in zip(self.layout.placements, self._asked.placements, strict=True)]
        if finer != self._asked.placements:
            index = index.redistribute(placements=placements_of(_C.Layout(self.layout.mesh, finer)))
        self.index = index._layout
        self._find(index._local_tensor, who)

    def _find(self, local: torch.Tensor, who: str) -> None:
        mesh = self.layout.mesh
        me = mesh.ranks.index(mesh.rank)
        unique, self._place = torch.unique(local.reshape(-1).to(torch.int64), return_inverse=True)
        holders = starts_of(self.layout, self.rows)
        ends = torch.tensor([start + length for _, start, length in holders], device=unique.device)
        bad = bool(unique.numel()) and not 0 <= int(unique[0]) <= int(unique[-1]) < self.rows
        asked = torch.searchsorted(ends, unique, right=True).clamp_(max=len(holders) - 1).bincount(minlength=len(holders)).tolist()
        self._asks = [0] * len(mesh.ranks)
        for (index, _, _), n in zip(holders, asked, strict=True):
            self._asks[index] = n
        told = from_everyone([int(bad), *self._asks], mesh, unique.device)
        for rank, (wrong, *_) in zip(mesh.ranks, told, strict=True):
            if wrong:
                raise IndexError(f"{who}: argument 'index' has a number on rank {rank} that is not in 0 to {self.rows - 1} (rank {mesh.rank})")
        self._gives = [row[1 + me] for row in told]
        self._mine = next(start for index, start, _ in holders if index == me)
        self._given = swap(unique, self._asks, self._gives, mesh) - self._mine
        self._unique = len(unique)

    def __repr__(self) -> str:
        return f"Routes(index {list(self.shape)} {self._asked}, rows {self.rows} {self.layout})"

    # ---- rows to where the index names them ----

    def _take(self, x: ShardTensor, who: str) -> ShardTensor:
        out = self._taken(self._as_rows(x, who))
        return out if self.index == self._asked else _C.redistribute(out, self._asked)

    def _taken(self, x: ShardTensor) -> ShardTensor:
        """In the index's finer cut."""
        pairs = zip(self.layout.placements, self.index.placements, strict=True)
        grads = [a if a[0] == _SHARD else _SUMMANDS if b[0] == _SHARD else _UNCUT for a, b in pairs]
        local = _C.to_local(x, _C.Layout(self.layout.mesh, grads, self.layout.cuts))
        rows = swap(local.index_select(0, self._given), self._gives, self._asks, self.layout.mesh)
        features = x.shape[1:]
        out = rows.index_select(0, self._place).reshape(*self.index.local_sizes(list(self.shape)), *features)
        return made(out, self.index, [*self.shape, *features])

    def _check_mesh(self, t: ShardTensor, who: str) -> None:
        if t._layout.mesh != self.layout.mesh:
            raise ValueError(f"{who}: the tensor is on {t._layout.mesh}, the routes are for {self.layout.mesh}; redistribute it (rank {self.layout.mesh.rank})")

    def _as_rows(self, x: ShardTensor, who: str) -> ShardTensor:
        self._check_mesh(x, who)
        if x.shape[:1] != (self.rows,):
            raise ValueError(f"{who}: the tensor has sizes {list(x.shape)}, the routes are for {self.rows} rows (rank {self.layout.mesh.rank})")
        return x if x._layout == self.layout else _C.redistribute(x, self.layout)

    # ---- reductions of what the index names to where the rows are ----

    def _scatter(self, src: ShardTensor, reduce: Reduction, who: str) -> ShardTensor:
        self._check_mesh(src, who)
        n = len(self.shape)
        if src.shape[:n] != self.shape:
            raise ValueError(f"{who}: argument 'src' has sizes {list(src.shape)}, the index {list(self.shape)} (rank {self.layout.mesh.rank})")
        if src._layout != self.index:
            src = _C.redistribute(src, self.index)
        if reduce == "sum":
            return self._sum(src)
        counts = self._counts(src, len(src.shape) - n)
        if reduce == "mean":
            exact = not src.is_floating_point() and not src.is_complex()
            return self._sum(src).div(counts.clamp(min=1), rounding_mode="floor" if exact else None)  # type: ignore[return-value]
        best = self._best(src.detach(), reduce).masked_fill(counts == 0, 0)  # type: ignore[arg-type]
        if not (src.requires_grad and torch.is_grad_enabled()):
            return best  # type: ignore[return-value]
        # As in torch, entries that share the best value of a row share its gradient.
        with torch.no_grad():
            is_best = (src == self._taken(best)).to(src.dtype)  # type: ignore[arg-type]
            share = is_best / self._taken(self._sum(is_best)).clamp(min=1)  # type: ignore[arg-type]
        return with_gradient_of(self._sum(src * share), best)  # type: ignore[arg-type, no-any-return]

    def _sum(self, src: ShardTensor) -> ShardTensor:
        features = src.shape[len(self.shape) :]
        local = src.to_local().reshape(-1, *features) if features.numel() else src.to_local().new_empty(len(self._place), *features)
        added = local.new_zeros(self._unique, *features).index_add(0, self._place, local)
        arrived = swap(added, self._asks, self._gives, self.layout.mesh)
        out = local.new_zeros(self._held(), *features).index_add(0, self._given, arrived)
        return made(out, self._result_layout(_SUMMANDS), [self.rows, *features])

    def _best(self, src: ShardTensor, reduce: Literal["amax", "amin"]) -> ShardTensor:
        features = src.shape[len(self.shape) :]
        local = src._local_tensor.reshape(-1, *features) if features.numel() else src._local_tensor.new_empty(len(self._place), *features)
        least = _least(local.dtype) if reduce == "amax" else _most(local.dtype)
        best = _reduced(local.new_full((self._unique, *features), least), self._place, local, reduce)
        arrived = swap(best, self._asks, self._gives, self.layout.mesh)
        out = _reduced(local.new_full((self._held(), *features), least), self._given, arrived, reduce)
        return made(out, self._result_layout((_PARTIAL, -1, 1, reduce.removeprefix("a"), 2.0)), [self.rows, *features])

    def _counts(self, src: ShardTensor, features: int) -> ShardTensor:
        """How many entries of the index name each row, with a dim of size 1 for each feature dim."""
        local = torch.ones(self._place.shape, dtype=torch.int64, device=self._place.device).view(self.index.local_sizes(list(self.shape)))
        counts = self._sum(made(local, self.index, self.shape))
        return counts.view(self.rows, *(1 for _ in range(features)))  # type: ignore[return-value]

    def _held(self) -> int:
        ((_, length),) = self.layout.intervals(0, self.rows)
        return length

    def _result_layout(self, summands: Any) -> _C.Layout:
        pairs = zip(self.layout.placements, self.index.placements, strict=True)
        return _C.Layout(self.layout.mesh, [a if a[0] == _SHARD else summands if b[0] == _SHARD else _UNCUT for a, b in pairs], self.layout.cuts)


def _reduced(start: torch.Tensor, names: torch.Tensor, entries: torch.Tensor, reduce: Reduction, include_self: bool = True) -> torch.Tensor:
    index = names.view(-1, *(1 for _ in range(entries.ndim - 1))).expand_as(entries)
    return start.scatter_reduce(0, index, entries, reduce, include_self=include_self)


def _least(dtype: torch.dtype) -> float:
    return -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _most(dtype: torch.dtype) -> float:
    return torch.inf if dtype.is_floating_point else torch.iinfo(dtype).max


class _WithGradientOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, differentiable: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad, None


def with_gradient_of(differentiable: torch.Tensor, values: torch.Tensor) -> Any:
    """`values`, with the gradient of `differentiable`, which may differ from it by rounding."""
    return _WithGradientOf.apply(differentiable, values)  # type: ignore[no-untyped-call]


# ---- what users call ----


@outside_graphs
def take(x: torch.Tensor, index: torch.Tensor | Routes) -> torch.Tensor:
    """The rows of `x` that `index` names by global number, as `x[index]`: of sizes [*index.shape, *x.shape[1:]], cut as the index.

    Each rank asks the ranks that hold rows for those that it lacks, each once; nothing else is sent. Differentiable, twice too. All
    ranks of the mesh call it. Plain tensors give plain ones.
    """
    who = "points.take"
    if isinstance(index, Routes):
        (x,) = as_sharded(who, x=x)
        return index._take(x, who)
    if not any(isinstance(t, DTensor) for t in (x, index)):
        return x.index_select(0, index.reshape(-1)).reshape(*index.shape, *x.shape[1:])
    x, index = as_sharded(who, x=x, index=index)
    return Routes(index, x)._take(x, who)


@outside_graphs
def scatter(
    src: torch.Tensor, index: torch.Tensor | Routes, size: int | None = None, reduce: Reduction = "sum", *, like: torch.Tensor | None = None
) -> torch.Tensor:
    """Reduces the entries of `src` to the rows that `index` names by global number; rows that it does not name are 0. The result has
    sizes [size, *src.shape[index.ndim:]].

    size: the number of rows; the result is then cut evenly along the mesh dims that cut the index. like: a tensor that has as many
    rows, whose cuts the result gets. reduce: "sum", "mean", "amax" or "amin"; as in torch, equal best values share the gradient.

    Each rank first reduces its own entries, and sends one row for each row that it names to the rank that holds it. Differentiable.
    All ranks of the mesh call it. Plain tensors give plain ones.
    """
    who = "points.scatter"
    if reduce not in get_args(Reduction):
        raise ValueError(f"{who}: argument 'reduce' is {reduce!r}; use one of {', '.join(get_args(Reduction))}")
    if isinstance(index, Routes):
        if size not in (None, index.rows) or like is not None:
            raise TypeError(f"{who}: leave out 'size' and 'like': the routes are for {index.rows} rows")
        (src,) = as_sharded(who, src=src)
        return index._scatter(src, reduce, who)
    if (size is None) == (like is None):
        raise TypeError(f"{who}: give one of the arguments 'size' and 'like'")
    rows = len(like) if like is not None else int(size or 0)
    if not any(isinstance(t, DTensor) for t in (src, index)):
        return _scatter_plain(src, index, rows, reduce)
    if like is not None:
        src, index, like = as_sharded(who, src=src, index=index, like=like)
    else:
        src, index = as_sharded(who, src=src, index=index)
    if src.shape[: index.ndim] == index.shape:  # numbers are smaller than entries: they move
        index = _C.redistribute(index.detach(), leading_layout(src, index.ndim, who))
    if like is None:
        placements = [_ROWS if p[0] == _SHARD else _UNCUT for p in index._layout.placements]
        layout = _C.Layout(index._layout.mesh, placements)
        local = torch.empty(layout.local_sizes([rows]), device="meta")
        like = _C.wrap(local, layout, [rows], [1])
    return Routes(index, like)._scatter(src, reduce, who)


def _scatter_plain(src: torch.Tensor, index: torch.Tensor, size: int, reduce: Reduction) -> torch.Tensor:
    features = src.shape[index.ndim :]
    flat, names = src.reshape(index.numel(), *features), index.reshape(-1).to(torch.int64)
    out = src.new_zeros(size, *features)
    if reduce == "sum":
        return out.index_add(0, names, flat)
    if reduce == "mean":
        return _reduced(out, names, flat, reduce, False)
    # Not from zeros: torch's gradient counts them among the equal best values, even without include_self.
    best = _reduced(torch.full_like(out, _least(src.dtype) if reduce == "amax" else _most(src.dtype)), names, flat, reduce)
    named = torch.zeros(size, dtype=torch.bool, device=src.device).index_fill_(0, names, True)
    return best.masked_fill(~named.view(-1, *(1 for _ in features)), 0)


@outside_graphs
def index_add(x: torch.Tensor, index: torch.Tensor | Routes, src: torch.Tensor, *, alpha: float = 1) -> torch.Tensor:
    """`x.index_add(0, index, src)`, with rows by global number and `x`, `index` and `src` cut in any way: see `scatter`."""
    added = scatter(src, index, reduce="sum", **({} if isinstance(index, Routes) else {"like": x}))  # type: ignore[arg-type]
    return x + added * alpha if alpha != 1 else x + added


@outside_graphs
def segment_reduce(data: torch.Tensor, reduce: Reduction = "sum", *, lengths: torch.Tensor) -> torch.Tensor:
    """Reduces runs of rows: the first lengths[0] rows to the first row of the result, the next lengths[1] to the second, and so on. The
    result is cut as `lengths`; a run without rows gives 0. `data` and `lengths` may be cut in any way: see `scatter`."""
    who = "points.segment_reduce"
    if lengths.ndim != 1 or lengths.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{who}: argument 'lengths' is {lengths.dtype} of {lengths.ndim} dims; use int64 or int32 and one dim")
    if not any(isinstance(t, DTensor) for t in (data, lengths)):
        index = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        return scatter(data, index, len(lengths), reduce)
    data, lengths = as_sharded(who, data=data, lengths=lengths)
    layout = leading_layout(lengths, 1, who)
    lengths = _C.redistribute(lengths, layout)
    ((start, held),) = layout.intervals(0, len(lengths))
    local = lengths._local_tensor
    bad = bool((local < 0).any())
    index = torch.arange(start, start + held, device=local.device).repeat_interleave(local.clamp(min=0))
    told = from_everyone([len(index), bad], layout.mesh, local.device)
    if any(wrong for _, wrong in told):
        raise ValueError(f"{who}: argument 'lengths' has a negative entry (rank {layout.mesh.rank})")
    where, rows = lengths_as_cuts(layout, layout.placements, [n for n, _ in told])
    if rows != len(data):
        raise ValueError(f"{who}: argument 'lengths' adds up to {rows}, but the data have {len(data)} rows (rank {layout.mesh.rank})")
    return scatter(data, made(index, where, [rows]), reduce=reduce, like=lengths)
