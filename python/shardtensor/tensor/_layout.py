"""Placements and cuts between torch's objects and the extension's Layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from typing import Literal, TypeVar

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
    _StridedShard,
)

from shardtensor import _C
from shardtensor.tensor._mesh import as_mesh

ShardingShapes = Mapping[int, Sequence[Sequence[int]]] | Literal["chunk"]

_REPLICATE, _SHARD, _PARTIAL = 0, 1, 2
# Only these kinds. Subclasses of Partial, such as torch's masked one, define their own reduction.
_PARTIALS = (Partial, _NormPartial)


def _encode(p: Placement, ndim: int | None, where: str) -> tuple[int, int, int, str, float]:
    if isinstance(p, (Shard, _StridedShard)):
        dim = int(p.dim)
        if ndim is not None and not -ndim <= dim < ndim:
            raise IndexError(f"{where}: {p} names a dim that a tensor of {ndim} dims does not have")
        if dim < 0:
            if ndim is None:
                raise ValueError(f"{where}: {p} is negative and the number of dims is not known")
            dim += ndim
        return _SHARD, dim, int(getattr(p, "split_factor", 1)), "sum", 2.0
    if isinstance(p, Replicate):
        return _REPLICATE, -1, 1, "sum", 2.0
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
        raise ValueError(f"{where}: {len(placements)} given, but the mesh has {dims} dims; give one placement per mesh dim")
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
    """One cut per mesh dim from {mesh_dim: one shape per coordinate}; "chunk": all as torch.chunk cuts.

    If several mesh dims cut one tensor dim, a shape is what its coordinate has before the later mesh dims cut it.
    """
    cuts: list[list[int] | None] = [None] * len(layout.placements)
    sizes = layout.mesh.shape
    where = f"{who}: argument 'sharding_shapes' (rank {layout.mesh.rank})"
    if not isinstance(sharding_shapes, Mapping):
        if sharding_shapes != "chunk":
            raise ValueError(f"{where}: {sharding_shapes!r} is given; use a dict {{mesh_dim: one shape per rank along it}} or 'chunk'")
        return cuts
    for mesh_dim, shapes in sharding_shapes.items():
        if not -len(sizes) <= mesh_dim < len(sizes):
            raise ValueError(f"{where}: mesh dim {mesh_dim} is named, of a mesh of {len(sizes)} dims")
        mesh_dim %= len(sizes)
        kind, dim, split_factor, *_ = layout.placements[mesh_dim]
        if kind != _SHARD or split_factor > 1:
            what = "is strided" if kind == _SHARD else "shards nothing"
            raise ValueError(f"{where}: mesh dim {mesh_dim} is given shapes, but {what}")
        if len(shapes) != sizes[mesh_dim]:
            raise ValueError(f"{where}: {len(shapes)} shapes for mesh dim {mesh_dim}, which has {sizes[mesh_dim]} ranks")
        for coordinate, shape in enumerate(shapes):
            if len(shape) != ndim:
                raise ValueError(
                    f"{where}: coordinate {coordinate} of mesh dim {mesh_dim} is given the shape {tuple(shape)}, "
                    f"but the tensor has {ndim} dims"
                )
        cuts[mesh_dim] = [int(shape[dim]) for shape in shapes]
    return cuts


def upto(layout: _C.Layout, mesh_dim: int) -> _C.Layout:
    """The layout as the mesh dims before `mesh_dim` make it."""
    uncut = _encode(Replicate(), None, "")
    placements = [p if m < mesh_dim else uncut for m, p in enumerate(layout.placements)]
    return _C.Layout(layout.mesh, placements, [c if m < mesh_dim else None for m, c in enumerate(layout.cuts)])


def check_cuts(layout: _C.Layout, cuts: Sequence[Sequence[int] | None], sizes: Sequence[int], *, who: str) -> None:
    """Raises unless the cuts, one row per mesh dim, add up to the sizes that they cut.

    Checks the cuts, not the layout: in a layout, sizes that torch.chunk gives for another total have become an even cut.
    """
    for mesh_dim, cut in enumerate(cuts):
        if cut is None:
            continue
        before = upto(layout, mesh_dim)
        dim = layout.placements[mesh_dim][1]
        cutting = [n if p[0] == _SHARD and p[1] == dim else 1 for n, p in zip(layout.mesh.shape, before.placements, strict=True)]
        for outer in itertools.product(*map(range, cutting)):
            there = before.local_sizes(sizes, outer)[dim]
            if sum(cut) != there:
                raise ValueError(
                    f"{who}: argument 'sharding_shapes' (rank {layout.mesh.rank}): the pieces along mesh dim {mesh_dim} add up to "
                    f"{sum(cut)}, but tensor dim {dim} has {there}" + (f" at {outer} of the outer mesh dims" if max(cutting) > 1 else "")
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
