"""Placements and cuts between torch's objects and the extension's Layout."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from typing import Literal, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
    _StridedShard,
)

import shardtensor._C as _C
from shardtensor.tensor._mesh import as_mesh

# For each mesh dim, one entry per rank along it: the size of its piece along the tensor dim that is cut, or the piece's shape.
ShardingShapes = Mapping[int, Sequence[int | Sequence[int]]] | Literal["chunk"]

_REPLICATE, _SHARD, _PARTIAL = 0, 1, 2
_UNCUT = (_REPLICATE, -1, 1, "sum", 2.0)
# Only these kinds. Subclasses of Partial, such as torch's masked one, define their own reduction.
_PARTIALS = (Partial, _NormPartial)


def _encode(p: Placement, ndim: int | None, where: str) -> tuple[int, int, int, str, float]:
    if isinstance(p, (Shard, _StridedShard)):
        dim = int(p.dim)
        if ndim is not None and not -ndim <= dim < ndim:
            raise IndexError(f"Sharding dim {dim} greater than tensor ndim {ndim}. {where}: {p} names a dim that a tensor of {ndim} dims does not have")
        if dim < 0:
            if ndim is None:
                raise ValueError(f"{where}: {p} is negative and the number of dims is not known")
            dim += ndim
        return _SHARD, dim, int(getattr(p, "split_factor", 1)), "sum", 2.0
    if isinstance(p, Replicate):
        return _UNCUT
    if isinstance(p, _NormPartial):
        order = float(p.norm_type)
        if order == float("inf"):
            return _PARTIAL, -1, 1, "max", 2.0
        if order == float("-inf"):
            return _PARTIAL, -1, 1, "min", 2.0
        return _PARTIAL, -1, 1, "norm", order
    if type(p) in _PARTIALS:
        return _PARTIAL, -1, 1, p.reduce_op, 2.0  # type: ignore[attr-defined]
    raise TypeError(f"{where}: {p!r} is not known; use Shard(dim), Replicate() or Partial()")


@cache
def _decode(kind: int, dim: int, split_factor: int, reduce: str, order: float) -> Placement:
    if kind == _SHARD:
        return Shard(dim) if split_factor == 1 else _StridedShard(dim, split_factor=split_factor)
    if kind == _REPLICATE:
        return Replicate()
    return _NormPartial(order) if reduce == "norm" else Partial(reduce)


def placements_of(layout: _C.Layout) -> tuple[Placement, ...]:
    return tuple(_decode(*p) for p in layout.placements)


# Layouts by the arguments of the call: a lookup costs less than encoding the placements again.
_known: dict[Hashable, _C.Layout] = {}
_MOST_KNOWN = 4096
_Where = TypeVar("_Where", _C.Mesh, _C.Layout)
_Placements = TypeVar("_Placements", bound=Sequence[Placement] | None)
_Ndim = TypeVar("_Ndim", bound=int | None)


def _remembered(
    make: Callable[[_Where, _Placements, _Ndim, str], _C.Layout], where: _Where, placements: _Placements, ndim: _Ndim, who: str
) -> _C.Layout:
    key = (where, tuple(placements) if isinstance(placements, list) else placements, ndim)
    try:
        layout = _known.get(key)
    except TypeError:  # one of the placements is not a placement: make() raises
        return make(where, placements, ndim, who)
    if layout is None:
        layout = make(where, placements, ndim, who)
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = layout
    return layout


def make_layout(
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    ndim: int | None,
    cuts: Sequence[Sequence[int] | None] = (),
    *,
    who: str,
) -> _C.Layout:
    """The layout of a tensor of `ndim` dims; placements default to Replicate, negative dims are normalised."""
    mesh = as_mesh(device_mesh)
    if cuts:
        return _make(mesh, placements, ndim, who, cuts)
    return _remembered(_make, mesh, placements, ndim, who)


def _make(
    mesh: _C.Mesh, placements: Sequence[Placement] | None, ndim: int | None, who: str, cuts: Sequence[Sequence[int] | None] = ()
) -> _C.Layout:
    where = f"{who}: argument 'placements' (rank {mesh.rank})"
    dims = len(mesh.shape)
    if placements is None:
        placements = [Replicate()] * dims
    if isinstance(placements, Placement):
        placements = [placements]
    if len(placements) != dims:
        raise ValueError(
            "`placements` must have the same length as `device_mesh.ndim`! "
            f"Found placements length: {len(placements)}, and device_mesh.ndim: {dims}. {where}: give one placement per mesh dim"
        )
    return _C.Layout(mesh, [_encode(p, ndim, where) for p in placements], list(cuts))


def layout_elsewhere(mesh: _C.Mesh, placements: Sequence[Placement], ndim: int, *, who: str) -> _C.Layout:
    """The layout after a move to another mesh, with even cuts."""

    layout = _make(mesh, placements, ndim, who)
    if layout.has_partial:
        raise _no_summands(placements, mesh, who)
    return layout


def _no_summands(placements: Sequence[Placement], mesh: _C.Mesh, who: str) -> RuntimeError:
    return RuntimeError(
        f"{who}: argument 'placements' {tuple(placements)}: summands come only from ops, so Partial is not allowed here (rank {mesh.rank})"
    )


def moved_layout(layout: _C.Layout, placements: Sequence[Placement], ndim: int, *, who: str) -> _C.Layout:
    """The layout after a redistribution: mesh dims that still cut the same dim keep their cuts, the others cut evenly."""
    return _remembered(_make_moved, layout, placements, ndim, who)


def _make_moved(layout: _C.Layout, placements: Sequence[Placement], ndim: int, who: str) -> _C.Layout:
    even = _make(layout.mesh, placements, ndim, who)
    for before, after in zip(layout.placements, even.placements, strict=True):
        if after[0] == _PARTIAL and after != before:
            raise _no_summands(placements, layout.mesh, who)
    return _make(layout.mesh, placements, ndim, who, fitting_cuts(layout, even.placements))


def target_layout(
    ours: _C.Layout,
    shape: Sequence[int],
    placements: Sequence[Placement],
    device_mesh: DeviceMesh | None,
    sharding_shapes: ShardingShapes | None,
    *,
    who: str,
) -> _C.Layout:
    """The layout that redistribute()'s arguments ask for."""
    ndim = len(shape)
    if device_mesh is None or as_mesh(device_mesh) == ours.mesh:
        layout = moved_layout(ours, placements, ndim, who=who)
    else:
        layout = layout_elsewhere(as_mesh(device_mesh), placements, ndim, who=who)
    if sharding_shapes is not None:
        cuts = cuts_from_shapes(layout, sharding_shapes, ndim, who=who)
        layout = _C.Layout(layout.mesh, layout.placements, cuts)
        check_cuts(layout, cuts, shape, who=who)
    return layout


def cuts_from_shapes(
    layout: _C.Layout, sharding_shapes: ShardingShapes, ndim: int, *, who: str
) -> list[list[int] | None]:
    """One cut per mesh dim from {mesh_dim: one size or shape per coordinate}; "chunk": all as torch.chunk cuts.

    If several mesh dims cut one tensor dim, an entry is what its coordinate has before the later mesh dims cut it, and a later mesh
    dim may have one list of entries for each coordinate of the earlier ones, one after the other.
    """
    cuts: list[list[int] | None] = [None] * len(layout.placements)
    sizes = layout.mesh.shape
    where = f"{who}: argument 'sharding_shapes' (rank {layout.mesh.rank})"
    if not isinstance(sharding_shapes, Mapping):
        if sharding_shapes != "chunk":
            raise ValueError(
                f"{where}: {sharding_shapes!r} is given; use a dict {{mesh_dim: one size or shape per rank along it}} or 'chunk'"
            )
        return cuts
    for mesh_dim, entries in sharding_shapes.items():
        if mesh_dim not in range(-len(sizes), len(sizes)):
            raise ValueError(f"{where}: mesh dim {mesh_dim!r} is named, of a mesh of {len(sizes)} dims")
        mesh_dim %= len(sizes)
        kind, dim, split_factor, *_ = layout.placements[mesh_dim]
        if kind != _SHARD or split_factor > 1:
            what = "is strided" if kind == _SHARD else "shards nothing"
            raise ValueError(f"{where}: mesh dim {mesh_dim} is given sizes, but {what}")
        if not isinstance(entries, Sequence):
            raise TypeError(f"{where}: mesh dim {mesh_dim} is given {entries!r}; give a list of one size or shape per rank along it")
        ranks = sizes[mesh_dim]
        if len(entries) != ranks and len(entries) != ranks * (rows := len(_outer(layout, mesh_dim))):
            lists = f", or {rows} such lists in one, since earlier mesh dims cut the same tensor dim" if rows > 1 else ""
            raise ValueError(f"{where}: {len(entries)} entries for mesh dim {mesh_dim}; give one for each of its {ranks} ranks{lists}")
        there = f"{where}: mesh dim {mesh_dim}"
        cuts[mesh_dim] = [_length(entry, dim, ndim, i, there) for i, entry in enumerate(entries)]
    return cuts


def _length(entry: int | Sequence[int], dim: int, ndim: int, index: int, where: str) -> int:
    """The size along the tensor dim `dim`."""
    if not isinstance(entry, int) and isinstance(entry, (tuple, Sequence)):  # a tuple is recognised faster than a Sequence
        if len(entry) != ndim:
            raise ValueError(f"{where}, entry {index} is the shape {tuple(entry)}, but the tensor has {ndim} dims")
        entry = entry[dim]
    try:
        length = operator.index(entry)
    except TypeError:
        raise TypeError(f"{where}, entry {index} is {entry!r}; give the size along tensor dim {dim}, or a whole shape") from None
    if length < 0:
        raise ValueError(f"{where}, entry {index} is a negative size, {length}")
    return length


def _outer(layout: _C.Layout, mesh_dim: int) -> list[tuple[int, ...]]:
    """The coordinates of the earlier mesh dims that cut the same tensor dim; those of all other mesh dims are 0."""
    placements = layout.placements
    cutting = [m < mesh_dim and p[:2] == placements[mesh_dim][:2] for m, p in enumerate(placements)]
    return list(itertools.product(*(range(n if c else 1) for n, c in zip(layout.mesh.shape, cutting, strict=True))))


def shapes_along(layout: _C.Layout, mesh_dim: int, sizes: Sequence[int], at: Sequence[int]) -> list[torch.Size]:
    """The shapes at each coordinate of a mesh dim that shards, for the coordinates `at` of the other mesh dims. As in the argument
    sharding_shapes, later mesh dims have not cut the same tensor dim yet."""
    later = [m > mesh_dim and p[:2] == layout.placements[mesh_dim][:2] for m, p in enumerate(layout.placements)]
    placements = [_UNCUT if drop else p for drop, p in zip(later, layout.placements, strict=True)]
    cuts = [None if drop else cut for drop, cut in zip(later, layout.cuts, strict=True)]
    before = _C.Layout(layout.mesh, placements, cuts)
    return [torch.Size(before.local_sizes(sizes, [*at[:mesh_dim], c, *at[mesh_dim + 1 :]])) for c in range(layout.mesh.shape[mesh_dim])]


def sharding_shapes_of(layout: _C.Layout, sizes: Sequence[int], *, who: str) -> dict[int, list[torch.Size]]:
    """The argument sharding_shapes that gives these cuts; as an argument it means the same on all ranks."""
    mine = layout.mesh.coordinate if layout.mesh.has_this_rank else [0] * len(layout.mesh.shape)
    out = {}
    for mesh_dim, (kind, dim, split_factor, *_) in enumerate(layout.placements):
        if split_factor > 1 and layout.cuts[mesh_dim] is not None:
            raise NotImplementedError(
                f"{who}: {layout} has an uneven cut with a stride, which shapes cannot describe; local_sizes(rank) has the sizes of a "
                f"rank's piece (rank {layout.mesh.rank})"
            )
        if kind == _SHARD and split_factor == 1:
            same = [p[:2] == (kind, dim) for p in layout.placements]
            places = [[o if s else c for o, s, c in zip(outer, same, mine, strict=True)] for outer in _outer(layout, mesh_dim)]
            out[mesh_dim] = [shape for at in places for shape in shapes_along(layout, mesh_dim, sizes, at)]
    return out


def upto(layout: _C.Layout, mesh_dim: int) -> _C.Layout:
    """The layout as the mesh dims before `mesh_dim` make it."""
    placements = [p if m < mesh_dim else _UNCUT for m, p in enumerate(layout.placements)]
    return _C.Layout(layout.mesh, placements, [c if m < mesh_dim else None for m, c in enumerate(layout.cuts)])


def check_cuts(layout: _C.Layout, cuts: Sequence[Sequence[int] | None], sizes: Sequence[int], *, who: str) -> None:
    """Raises unless the cuts, per mesh dim one row or one for each coordinate of the outer mesh dims, add up to the sizes they cut.

    Checks the cuts, not the layout: in a layout, sizes that torch.chunk gives for another total have become an even cut.
    """
    for mesh_dim, cut in enumerate(cuts):
        if cut is None:
            continue
        before = upto(layout, mesh_dim)
        dim, ranks = layout.placements[mesh_dim][1], layout.mesh.shape[mesh_dim]
        places = _outer(layout, mesh_dim)
        for i, outer in enumerate(places):
            there = before.local_sizes([0] * dim + [sizes[dim]], outer)[dim]  # other dims may be symbols of a graph
            row = cut if len(cut) == ranks else cut[i * ranks : (i + 1) * ranks]
            if sum(row) != there:
                raise ValueError(
                    f"{who}: argument 'sharding_shapes' (rank {layout.mesh.rank}): the pieces along mesh dim {mesh_dim} add up to "
                    f"{sum(row)}, but tensor dim {dim} has {there}" + (f" at {outer} of the outer mesh dims" if len(places) > 1 else "")
                )


def fitting_cuts(layout: _C.Layout, placements: Sequence[tuple[int, int, int, str, float]]) -> list[list[int] | None]:
    """The layout's cuts for the mesh dims that still cut the same dim at the same depth; for others None, which is even."""
    kept: list[list[int] | None] = []
    moved: set[int] = set()  # tensor dims whose nesting has changed
    for cut, before, after in zip(layout.cuts, layout.placements, placements, strict=True):
        same = before == after and after[1] not in moved
        kept.append(cut if same else None)
        if not same:
            moved |= {before[1], after[1]}
    return kept
