"""What from_local and its checks need: how large everybody's piece is, and whether the ranks agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from shardtensor import _C
from shardtensor._layout import _SHARD, ShardingShapes, cuts_from_shapes, make_layout

Shapes = ShardingShapes | Literal["chunk", "infer"] | None


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
    layout = make_layout(mesh, placements, local.ndim, who=who)
    rank = layout.mesh.rank
    if not layout.mesh.has_me:
        raise ValueError(f"{who}: argument 'device_mesh' ({layout.mesh}) does not hold rank {rank}")
    if isinstance(sharding_shapes, str) and sharding_shapes not in ("chunk", "infer"):
        raise ValueError(f"{who}: argument 'sharding_shapes' is {sharding_shapes!r}; use 'chunk', 'infer' or a dict")
    if sharding_shapes == "chunk" and shape is None:
        raise ValueError(f"{who}: sharding_shapes='chunk' cuts 'shape', which is not given (rank {rank})")
    if run_check:
        _check_agreement(local, layout, sharding_shapes, shape, who)
    if sharding_shapes == "infer":
        layout, sizes = _infer(local, layout, mesh, placements, who)
    elif isinstance(sharding_shapes, str) or (sharding_shapes is None and shape is not None):
        assert shape is not None
        sizes = [int(n) for n in shape]
    elif sharding_shapes is None:
        sizes = list(local.shape)
        for mesh_dim, (kind, dim, *_) in enumerate(layout.placements):
            if kind == _SHARD:
                sizes[dim] *= layout.mesh.shape[mesh_dim]
    else:
        cuts = cuts_from_shapes(layout, sharding_shapes, local.ndim, who=who)
        layout = make_layout(mesh, placements, local.ndim, cuts, who=who)
        sizes = _sizes_from_cuts(local, layout, cuts, who) if shape is None else [int(n) for n in shape]
    _check_fit(local, layout, sizes, who)
    return layout, sizes


def _sizes_from_cuts(local: torch.Tensor, layout: _C.Layout, cuts: list[list[int] | None], who: str) -> list[int]:
    sizes = list(local.shape)
    seen: set[int] = set()
    for mesh_dim, (kind, dim, *_) in enumerate(layout.placements):
        if kind != _SHARD:
            continue
        cut = cuts[mesh_dim]
        if dim in seen:  # nested: the outer cut has told the size
            continue
        seen.add(dim)
        nested = any(k == _SHARD and d == dim for k, d, *_ in layout.placements[mesh_dim + 1 :])
        if cut is not None:
            sizes[dim] = sum(cut)
        elif nested:
            raise ValueError(
                f"{who}: argument 'sharding_shapes' leaves out mesh dim {mesh_dim}, on which others nest; "
                f"give its shapes, 'shape', or use 'infer' (rank {layout.mesh.rank})"
            )
        else:
            sizes[dim] *= layout.mesh.shape[mesh_dim]
    return sizes


def _check_fit(local: torch.Tensor, layout: _C.Layout, sizes: list[int], who: str) -> None:
    rank = layout.mesh.rank
    if len(sizes) != local.ndim:
        raise ValueError(f"{who}: argument 'shape' has {len(sizes)} dims, the local tensor {local.ndim} (rank {rank})")
    misfit = layout.misfit(sizes)
    if misfit:
        raise ValueError(f"{who}: argument 'sharding_shapes': {misfit} (rank {rank})")
    want = layout.local_sizes(sizes)
    if list(local.shape) != want:
        raise ValueError(
            f"{who}: argument 'local_tensor' has sizes {list(local.shape)} on rank {rank}, but {layout} of a tensor of sizes "
            f"{sizes} leaves {want} there; pass sharding_shapes='infer' if the pieces are uneven"
        )


def _exchange(values: list[int], mesh: _C.Mesh, mesh_dim: int, device: torch.device) -> list[list[int]]:
    """What every rank along the mesh dim has to say, as integers; all ranks send as many."""
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    pieces = [torch.empty_like(mine) for _ in range(mesh.shape[mesh_dim])]
    return [p.tolist() for p in _C.all_gather(pieces, mine, mesh, mesh_dim)]


def _infer(
    local: torch.Tensor, layout: _C.Layout, mesh: DeviceMesh, placements: Sequence[Placement] | None, who: str
) -> tuple[_C.Layout, list[int]]:
    # Every rank learns the sizes of all ranks: along the last mesh dim first, then of the rows so found.
    ndim_limit = 64
    values = [local.ndim, *local.shape] + [0] * (ndim_limit - local.ndim)
    for mesh_dim in reversed(range(len(layout.mesh.shape))):
        values = [v for row in _exchange(values, layout.mesh, mesh_dim, local.device) for v in row]
    step = ndim_limit + 1
    told = [values[i : i + step] for i in range(0, len(values), step)]
    shapes = [row[1 : 1 + row[0]] for row in told]
    for index, s in enumerate(shapes):
        if len(s) != local.ndim:
            other = layout.mesh.ranks[index]
            raise ValueError(
                f"{who}: argument 'local_tensor' has {local.ndim} dims on rank {layout.mesh.rank} and {len(s)} on rank {other}"
            )
    return _layout_from_shapes(shapes, layout, mesh, placements, who)


def _layout_from_shapes(
    shapes: list[list[int]], layout: _C.Layout, mesh: DeviceMesh, placements: Sequence[Placement] | None, who: str
) -> tuple[_C.Layout, list[int]]:
    """From the shapes of all ranks (row-major over the mesh) to cuts and global sizes; raises if they do not tile."""
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
        coordinate = [index // strides[m] % mesh_shape[m] for m in range(n)]
        want = layout.local_sizes(sizes, coordinate)
        if shape != want:
            raise ValueError(
                f"{who}: argument 'local_tensor' has sizes {shape} on rank {layout.mesh.ranks[index]}, where the other ranks' "
                f"pieces leave {want}; the pieces do not tile one tensor under {layout} (rank {layout.mesh.rank})"
            )
    return layout, sizes


_DTYPES = [d for d in vars(torch).values() if isinstance(d, torch.dtype)]


def _check_agreement(
    local: torch.Tensor, layout: _C.Layout, sharding_shapes: Shapes, shape: Sequence[int] | None, who: str
) -> None:
    """All ranks compare dtype, dims, device and, where pieces must be alike, sizes; all raise the same error."""
    limit = 64
    names = sorted(str(d) for d in set(_DTYPES))
    devices = ["cpu", "cuda"]
    device = devices.index(local.device.type) if local.device.type in devices else len(devices)
    values = [names.index(str(local.dtype)), device, local.ndim, *local.shape] + [0] * (limit - local.ndim)
    for mesh_dim in reversed(range(len(layout.mesh.shape))):
        values = [v for row in _exchange(values, layout.mesh, mesh_dim, local.device) for v in row]
    step = limit + 3
    told = [values[i : i + step] for i in range(0, len(values), step)]
    ranks = layout.mesh.ranks
    for what, at, show in (
        ("dtype", 0, lambda v: names[v]),
        ("device", 1, lambda v: devices[v] if v < len(devices) else "another device"),
        ("number of dims", 2, str),
    ):
        for index, row in enumerate(told):
            if row[at] != told[0][at]:
                raise ValueError(
                    f"{who}: argument 'local_tensor' differs in {what}: {show(told[0][at])} on rank {ranks[0]}, "
                    f"{show(row[at])} on rank {ranks[index]}"
                )
    shapes = [row[3 : 3 + row[2]] for row in told]
    if sharding_shapes is None and shape is None:
        for index, other in enumerate(shapes):
            if other != shapes[0]:
                raise ValueError(
                    f"{who}: argument 'local_tensor' has sizes {shapes[0]} on rank {ranks[0]} and {other} on rank {ranks[index]}; "
                    "pieces of different sizes need sharding_shapes"
                )
    # A misfit on one rank is everybody's error.
    if isinstance(sharding_shapes, dict) or shape is not None:
        problems = [0] * 1
        try:
            trial = layout
            if isinstance(sharding_shapes, dict):
                cuts = cuts_from_shapes(layout, sharding_shapes, local.ndim, who=who)
                trial = _C.Layout(layout.mesh, layout.placements, cuts)
                sizes = _sizes_from_cuts(local, trial, cuts, who) if shape is None else [int(n) for n in shape]
            else:
                assert shape is not None
                sizes = [int(n) for n in shape]
            _check_fit(local, trial, sizes, who)
        except (ValueError, IndexError):
            problems = [1]
        flags = problems
        for mesh_dim in reversed(range(len(layout.mesh.shape))):
            flags = [v for row in _exchange(flags, layout.mesh, mesh_dim, local.device) for v in row]
        bad = [ranks[i] for i, flag in enumerate(flags) if flag]
        if bad:
            shown = {ranks[i]: s for i, s in enumerate(shapes)}
            raise ValueError(f"{who}: argument 'local_tensor' does not fit on rank(s) {bad}; sizes by rank: {shown}")


