"""Farthest points: each one farthest from those that were chosen before."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

import shardtensor._C as _C
from shardtensor.points._rows import as_sharded, made, outside_graphs, with_whole
from shardtensor.tensor._layout import _SHARD, _UNCUT


@outside_graphs
@torch.no_grad()
def farthest_points(points: torch.Tensor, count: int, start: int = 0) -> torch.Tensor:
    """The numbers of `count` of the points [P, D]: `start`, and then always the point that is farthest from all chosen so far; of
    equally far ones the first. Replicated, in the order of the choice.

    The ranks exchange one candidate each for each choice.
    """
    who = "points.farthest_points"
    if points.ndim != 2 or not points.is_floating_point():
        raise ValueError(f"{who}: argument 'points' is {points.dtype} of sizes {list(points.shape)}; give [points, coordinates] of a floating-point dtype")
    if not 0 <= count <= len(points) or not (0 <= start < len(points) or not count):
        raise ValueError(f"{who}: arguments 'count' {count} and 'start' {start}, but there are {len(points)} points")
    if not isinstance(points, DTensor):
        return _chosen(points, 0, count, start, None)
    (points,) = as_sharded(who, points=points)
    points = with_whole(points.detach(), 1, who)  # type: ignore[arg-type]
    layout = points._layout
    ((first, _),) = layout.intervals(0, len(points))
    index = _chosen(points._local_tensor, first, count, start, layout)
    return made(index, _C.Layout(layout.mesh, [_UNCUT] * len(layout.placements)), [count])


def _chosen(points: torch.Tensor, first: int, count: int, start: int, layout: _C.Layout | None) -> torch.Tensor:
    """`points`: this rank's, numbered from `first` on."""
    coordinates = points.to(torch.float64)
    far = torch.full((len(points),), torch.inf, dtype=torch.float64, device=points.device)
    # One candidate: how far, minus its number, coordinates. Whole numbers up to 2^53 are exact.
    nobody = far.new_tensor([-1.0, 0.0] + [0.0] * points.shape[1])
    out: list[torch.Tensor] = []
    at = start - first
    for _ in range(count):
        if not out:
            mine = torch.cat([far.new_tensor([1.0, -start]), coordinates[at]]) if 0 <= at < len(points) else nobody
        elif len(points):
            best = far.argmax()
            mine = torch.cat([torch.stack([far[best], -(best + first).to(far.dtype)]), coordinates[best]])
        else:
            mine = nobody
        chosen = mine if layout is None else _best_of_all(mine, layout)
        out.append(-chosen[1])
        apart = torch.zeros_like(far)
        for d in range(points.shape[1]):  # in this order on all ranks, so that equal distances are equal
            apart += (coordinates[:, d] - chosen[2 + d]).square()
        far = torch.minimum(far, apart)
    return torch.stack(out).to(torch.int64) if out else torch.empty(0, dtype=torch.int64, device=points.device)


def _best_of_all(mine: torch.Tensor, layout: _C.Layout) -> torch.Tensor:
    """The farthest of all ranks' candidates; of equally far ones that with the smallest number."""
    for mesh_dim in reversed(range(len(layout.placements))):
        if layout.placements[mesh_dim][0] == _SHARD:
            n = layout.mesh.shape[mesh_dim]
            all_ = torch.stack(_C.all_gather([torch.empty_like(mine) for _ in range(n)], mine, layout.mesh, mesh_dim))
            farthest = all_[:, 0] == all_[:, 0].max()
            mine = all_[torch.where(farthest, all_[:, 1], -torch.inf).argmax()]
    return mine
