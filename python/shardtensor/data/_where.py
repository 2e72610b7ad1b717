"""Which rank sees which rows: the placements of batches on a mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from shardtensor.tensor._mesh import as_mesh


def check_placements(mesh: DeviceMesh, placements: Sequence[Placement] | None, who: str) -> tuple[Placement, ...]:
    """One Shard or Replicate per mesh dim; the first Shard's dim is the one of the rows. None: [Shard(0)] on a mesh of one dim."""
    view = as_mesh(mesh)
    if not view.has_this_rank:
        raise ValueError(f"{who}: argument 'mesh' ({view}) does not hold rank {view.rank}, so this rank has no part of the batches")
    if placements is None:
        if mesh.ndim != 1:
            raise ValueError(
                f"{who}: argument 'placements' is None, but {view} has {mesh.ndim} dims; say which of them split the batches, "
                f"such as placements=[Shard(0), Replicate()] (rank {view.rank})"
            )
        return (Shard(0),)
    given = (placements,) if isinstance(placements, Placement) else tuple(placements)
    if len(given) != mesh.ndim:
        raise ValueError(f"{who}: argument 'placements' {given}: {view} has {mesh.ndim} dims; give one placement per mesh dim (rank {view.rank})")
    for p in given:
        if type(p) not in (Shard, Replicate) or (isinstance(p, Shard) and p.dim < 0):
            raise ValueError(f"{who}: argument 'placements' {given}: use Shard of a dim from 0 on, or Replicate (rank {view.rank})")
    return given


def dim_of_rows(placements: Sequence[Placement]) -> int | None:
    return next((p.dim for p in placements if isinstance(p, Shard)), None)


def part_of_rows(mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[int, int]:
    """In how many parts the rows are split, and which of them this rank has."""
    view, dim = as_mesh(mesh), dim_of_rows(placements)
    cuts = [m for m, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim]
    part = 0
    for m in cuts:
        part = part * view.shape[m] + view.coordinate[m]
    return math.prod(view.shape[m] for m in cuts), part
