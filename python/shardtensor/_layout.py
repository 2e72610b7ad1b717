"""Placements and cuts between torch's objects and the extension's Layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

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
from shardtensor._mesh import as_mesh

ShardingShapes = Mapping[int, Sequence[Sequence[int]]]

_REPLICATE, _SHARD, _PARTIAL = 0, 1, 2


def _encode(p: Placement, ndim: int | None, who: str) -> tuple[int, int, int, str, float]:
    if isinstance(p, (Shard, _StridedShard)):
        dim = int(p.dim)
        if ndim is not None and not -ndim <= dim < ndim:
            raise IndexError(f"{who}: {p} names a dim that a tensor of {ndim} dims does not have")
        if dim < 0:
            if ndim is None:
                raise ValueError(f"{who}: {p} is negative and the number of dims is not known")
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
    if isinstance(p, Partial):
        return _PARTIAL, -1, 1, p.reduce_op, 2.0
    raise TypeError(f"{who}: argument 'placements' holds {p!r}; use Shard(dim), Replicate() or Partial()")


@lru_cache(maxsize=None)
def _decode(kind: int, dim: int, split_factor: int, reduce: str, order: float) -> Placement:
    if kind == _SHARD:
        return Shard(dim) if split_factor == 1 else _StridedShard(dim, split_factor=split_factor)
    if kind == _REPLICATE:
        return Replicate()
    return _NormPartial(order) if reduce == "norm" else Partial(reduce)


def placements_of(layout: _C.Layout) -> tuple[Placement, ...]:
    return tuple(_decode(*p) for p in layout.placements)


def make_layout(
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    ndim: int | None,
    cuts: Sequence[Sequence[int] | None] = (),
    *,
    who: str,
) -> _C.Layout:
    """The layout of a tensor of `ndim` dims; placements default to Replicate, negative dims are normalised."""
    if placements is None:
        placements = [Replicate()] * device_mesh.ndim
    if isinstance(placements, Placement):
        placements = [placements]
    if len(placements) != device_mesh.ndim:
        raise ValueError(
            f"{who}: argument 'placements' has {len(placements)} entries, but the mesh has {device_mesh.ndim} dims; "
            f"give one placement per mesh dim (rank {device_mesh.get_rank()})"
        )
    encoded = [_encode(p, ndim, who) for p in placements]
    return _C.Layout(as_mesh(device_mesh), encoded, list(cuts))


def cuts_from_shapes(
    layout: _C.Layout, sharding_shapes: ShardingShapes, ndim: int, *, who: str
) -> list[list[int] | None]:
    """One cut per mesh dim from {mesh_dim: one shape per coordinate}."""
    cuts: list[list[int] | None] = [None] * len(layout.placements)
    sizes = layout.mesh.shape
    for mesh_dim, shapes in sharding_shapes.items():
        if not -len(sizes) <= mesh_dim < len(sizes):
            raise ValueError(f"{who}: argument 'sharding_shapes' names mesh dim {mesh_dim} of a mesh of {len(sizes)} dims")
        mesh_dim %= len(sizes)
        kind, dim, *_ = layout.placements[mesh_dim]
        if kind != _SHARD:
            continue
        if len(shapes) != sizes[mesh_dim]:
            raise ValueError(
                f"{who}: argument 'sharding_shapes' has {len(shapes)} shapes for mesh dim {mesh_dim}, "
                f"which has {sizes[mesh_dim]} ranks (rank {layout.mesh.rank})"
            )
        for rank, shape in enumerate(shapes):
            if len(shape) != ndim:
                raise ValueError(
                    f"{who}: argument 'sharding_shapes' gives rank {rank} of mesh dim {mesh_dim} the shape {tuple(shape)}, "
                    f"but the tensor has {ndim} dims (rank {layout.mesh.rank})"
                )
        cuts[mesh_dim] = [int(shape[dim]) for shape in shapes]
    return cuts
