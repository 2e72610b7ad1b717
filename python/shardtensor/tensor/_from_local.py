"""from_local's layouts and checks: the sizes of all ranks' pieces, and whether the ranks agree."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

import shardtensor._C as _C
from shardtensor.tensor._layout import _SHARD, ShardingShapes, check_cuts, cuts_from_shapes, make_layout
from shardtensor.tensor._mesh import as_mesh

Shapes = ShardingShapes | Literal["infer"] | None


def one_of(who: str, **given: Any) -> Any:
    """The value of two arguments that mean the same, of which at most one may be given."""
    values = [value for value in given.values() if value is not None]
    if len(values) > 1:
        raise TypeError(f"{who}: arguments {' and '.join(map(repr, given))} mean the same; pass one of them")
    return values[0] if values else None


def layout_of_equal_pieces(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement] | None, *, who: str
) -> _C.Layout:
    """The layout if every rank's piece has the size of this one: any sizes fit."""
    return make_layout(mesh, placements, local.ndim, who=who)


def layout_for_local(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    *,
    shape: Sequence[int] | None,
    sharding_shapes: Shapes,
    run_check: bool,
    who: str,
) -> tuple[_C.Layout, list[int]]:
    """The layout and the global sizes of the tensor whose piece on this rank is `local`."""
    view = as_mesh(mesh)
    rank = view.rank
    if run_check or sharding_shapes == "infer":
        _C.need_values(local, f"{who} with run_check or sharding_shapes='infer', where the ranks exchange sizes,")
        check_can_ask(view, who)
    if not isinstance(sharding_shapes, Mapping) and sharding_shapes not in (None, "chunk", "infer"):
        raise ValueError(
            f"{who}: argument 'sharding_shapes' is {sharding_shapes!r}; use 'chunk', 'infer' or a dict {{mesh_dim: one size or shape per "
            f"rank along it}} (rank {rank})"
        )
    if sharding_shapes == "chunk" and shape is None:
        raise ValueError(f"{who}: sharding_shapes='chunk' cuts 'shape', which is missing (rank {rank})")
    told = None
    if run_check or sharding_shapes == "infer":
        # Before this rank checks its own piece: if it raised alone, the others would wait.
        told = _ask_everyone(local, view, _said(placements, shape, _cuts_meant(sharding_shapes, mesh, placements, local.ndim)))
        _check_agreement(told, view, who)
    layout = make_layout(mesh, placements, local.ndim, who=who)
    if sharding_shapes == "infer":
        assert told is not None
        layout, sizes = _layout_from_shapes([t.shape for t in told], layout, mesh, placements, who)
        if shape is not None and list(shape) != sizes:
            raise ValueError(f"{who}: argument 'shape' is {tuple(shape)}, but the ranks' pieces make up {tuple(sizes)} (rank {rank})")
        return layout, sizes
    cuts: list[list[int] | None] = []
    if isinstance(sharding_shapes, Mapping):
        cuts = cuts_from_shapes(layout, sharding_shapes, local.ndim, who=who)
        layout = make_layout(mesh, placements, local.ndim, cuts, who=who)
    sizes = [_number(n) for n in shape] if shape is not None else _sizes_from(local, layout, cuts, who)
    if len(sizes) != local.ndim:
        raise ValueError(f"{who}: argument 'shape' has {len(sizes)} dims, the local tensor {local.ndim} (rank {rank})")
    check_cuts(layout, cuts, sizes, who=who)
    if not view.has_this_rank:
        return layout, sizes
    if told is None:
        _check_fit(local.shape, layout, sizes, view.coordinate, rank, who)
    else:
        for index, one in enumerate(told):
            _check_fit(one.shape, layout, sizes, coordinate_at(view, index), view.ranks[index], who)
    return layout, sizes


def _number(n: Any) -> int:
    """A size as an int, or a graph's symbol as it is."""
    return n if isinstance(n, torch.SymInt) else int(n)  # type: ignore[return-value]


def _sizes_from(local: torch.Tensor, layout: _C.Layout, cuts: Sequence[Sequence[int] | None], who: str) -> list[int]:
    """Global sizes: the sum of a dim's outermost cut if it is given, else as if all pieces had the size of this one."""
    sizes = list(local.shape)
    told: set[int] = set()
    for mesh_dim, (kind, dim, *_) in enumerate(layout.placements):
        if kind != _SHARD or dim in told:
            continue
        cut = cuts[mesh_dim] if cuts else None
        nested = [m for m, (k, d, *_) in enumerate(layout.placements) if k == _SHARD and d == dim and m > mesh_dim]
        if cut is not None:
            sizes[dim] = sum(cut)
            told.add(dim)
        elif cuts and any(cuts[m] is not None for m in nested):
            raise ValueError(
                f"{who}: argument 'sharding_shapes' leaves out mesh dim {mesh_dim}, whose pieces later mesh dims cut; "
                f"pass its shapes or 'shape', or use 'infer' (rank {layout.mesh.rank})"
            )
        else:
            sizes[dim] *= layout.mesh.shape[mesh_dim]
    return sizes


def _check_fit(
    local: Sequence[int], layout: _C.Layout, sizes: list[int], coordinate: Sequence[int], rank: int, who: str
) -> None:
    symbols = any(isinstance(n, torch.SymInt) for n in sizes)  # of a graph, in which this rank asks for its own piece alone
    want = layout.sym_local_sizes(sizes) if symbols else layout.local_sizes(sizes, list(coordinate))
    if list(local) != want:
        raise ValueError(
            f"{who}: argument 'local_tensor' has sizes {list(local)} on rank {rank}, but {layout} of a tensor of sizes "
            f"{sizes} leaves {want} there; pass sharding_shapes='infer' if the pieces are uneven"
        )


# ---- what the ranks exchange ----

_DTYPES = sorted({str(d) for d in vars(torch).values() if isinstance(d, torch.dtype)})
_MOST_DIMS = 64


class _Told(NamedTuple):
    """One rank's description of its piece and its arguments."""

    dtype: str
    arguments: int
    records: int  # whether autograd records it
    shape: list[int]


def _said(placements: Sequence[Placement] | None, shape: Sequence[int] | None, cuts: object) -> str:
    """The arguments as text. Arguments with the same meaning give the same text."""
    return repr((placements and tuple(placements), shape and tuple(shape), cuts))


def _cuts_meant(sharding_shapes: Shapes, mesh: DeviceMesh, placements: Sequence[Placement] | None, ndim: int) -> object:
    """A dict's cuts. Where they are wrong, the dict itself: all ranks compare their arguments first and raise later."""
    if not isinstance(sharding_shapes, Mapping):
        return sharding_shapes
    try:
        return cuts_from_shapes(make_layout(mesh, placements, ndim, who=""), sharding_shapes, ndim, who="")
    except (IndexError, TypeError, ValueError):
        return dict(sharding_shapes)


def _ask_everyone(local: torch.Tensor, mesh: _C.Mesh, arguments: str) -> list[_Told]:
    """All ranks' descriptions, row-major over the mesh."""
    digest = zlib.crc32(arguments.encode())
    records = local.requires_grad and torch.is_grad_enabled()
    values = [_DTYPES.index(str(local.dtype)), digest, records, local.ndim, *local.shape] + [0] * (_MOST_DIMS - local.ndim)
    rows = from_everyone(values, mesh, local.device)
    return [_Told(_DTYPES[row[0]], row[1], row[2], row[4 : 4 + row[3]]) for row in rows]


def check_can_ask(mesh: _C.Mesh, who: str) -> None:
    if not mesh.has_this_rank:
        raise ValueError(
            f"{who}: argument 'device_mesh' ({mesh}) does not hold rank {mesh.rank}, so this rank cannot learn the sizes; pass 'shape' or "
            "'sharding_shapes'"
        )


def from_everyone(values: list[int], mesh: _C.Mesh, device: torch.device) -> list[list[int]]:
    """Gathers `values`, of one length on all ranks: row-major over the mesh. Gathers along the last mesh dim first."""
    step = len(values)
    for mesh_dim in reversed(range(len(mesh.shape))):
        mine = torch.tensor(values, dtype=torch.int64, device=device)
        pieces = [torch.empty_like(mine) for _ in range(mesh.shape[mesh_dim])]
        values = [v for piece in _C.all_gather(pieces, mine, mesh, mesh_dim) for v in piece.tolist()]
    return [values[i : i + step] for i in range(0, len(values), step)]


def check_same_arguments(
    shard: torch.Tensor, mesh: _C.Mesh, placements: Sequence[Placement] | None, shape: Sequence[int] | None, who: str
) -> int:
    """For LocalShardsWrappers: the number of dims of all ranks' shards. A wrapper without elements may have any."""
    check_can_ask(mesh, who)
    told = _ask_everyone(shard, mesh, f"LocalShardsWrapper {_said(placements, shape, None)}")
    like = next((t for t in told if all(t.shape)), told[0])
    _check_agreement([t if all(t.shape) else like._replace(arguments=t.arguments) for t in told], mesh, who)
    return len(like.shape)


def _check_agreement(told: list[_Told], mesh: _C.Mesh, who: str) -> None:
    """All ranks have the same `told`, so all raise the same error."""
    first, ranks = told[0], mesh.ranks
    for index, other in enumerate(told):
        if other.dtype != first.dtype:
            raise ValueError(
                f"{who}: argument 'local_tensor' is {first.dtype} on rank {ranks[0]}, {other.dtype} on rank {ranks[index]}"
            )
        if len(other.shape) != len(first.shape):
            raise ValueError(
                f"{who}: argument 'local_tensor' has {len(first.shape)} dims on rank {ranks[0]}, "
                f"{len(other.shape)} on rank {ranks[index]}"
            )
        if other.records != first.records:
            asks, not_ = (ranks[0], ranks[index]) if first.records else (ranks[index], ranks[0])
            raise ValueError(
                f"{who}: argument 'local_tensor' requires grad on rank {asks} and not on rank {not_}, so only some ranks would "
                "run the backward's collectives"
            )
        if other.arguments != first.arguments:
            raise ValueError(
                f"{who}: arguments 'placements', 'shape' or 'sharding_shapes', or the kinds of 'local_tensor', differ between "
                f"ranks {ranks[0]} and {ranks[index]}"
            )


def coordinate_at(mesh: _C.Mesh, index: int) -> list[int]:
    coordinate: list[int] = []
    for size in reversed(mesh.shape):
        coordinate.insert(0, index % size)
        index //= size
    return coordinate


def _layout_from_shapes(
    shapes: list[list[int]], layout: _C.Layout, mesh: DeviceMesh, placements: Sequence[Placement] | None, who: str
) -> tuple[_C.Layout, list[int]]:
    """The layout and the global sizes from the shapes of all ranks (row-major over the mesh); raises if they do not tile."""
    mesh_shape = layout.mesh.shape
    n = len(mesh_shape)
    strides = [math.prod(mesh_shape[i + 1 :]) for i in range(n)]

    def shape_at(coordinate: list[int]) -> list[int]:
        return shapes[sum(c * s for c, s in zip(coordinate, strides, strict=True))]

    sharding = [(dim if kind == _SHARD else None) for kind, dim, *_ in layout.placements]
    cuts: list[list[int] | None] = [None] * n
    sizes = list(shapes[0])
    for dim in {d for d in sharding if d is not None}:
        axes = [m for m in range(n) if sharding[m] == dim]

        def extent(prefix: list[int], axes: list[int] = axes, dim: int = dim) -> int:
            coordinate = [0] * n
            for m, c in zip(axes, prefix, strict=False):
                coordinate[m] = c
            if len(prefix) == len(axes):
                return shape_at(coordinate)[dim]
            return sum(extent([*prefix, c]) for c in range(mesh_shape[axes[len(prefix)]]))

        prefixes: list[list[int]] = [[]]
        for m in axes:
            prefixes = [[*p, c] for p in prefixes for c in range(mesh_shape[m])]
            cuts[m] = [extent(p) for p in prefixes]
        sizes[dim] = extent([])
    layout = make_layout(mesh, placements, len(sizes), cuts, who=who)
    for index, shape in enumerate(shapes):
        want = layout.local_sizes(sizes, coordinate_at(layout.mesh, index))
        if shape != want:
            raise ValueError(
                f"{who}: argument 'local_tensor' has sizes {shape} on rank {layout.mesh.ranks[index]}, where the other ranks' "
                f"pieces leave {want}; the pieces do not tile one tensor under {layout} (rank {layout.mesh.rank})"
            )
    return layout, sizes
