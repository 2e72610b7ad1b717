"""Neighbours of points among points: the other set comes round in a ring, piece by piece."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor

import shardtensor._C as _C
from shardtensor.points._rows import as_sharded, lengths_as_cuts, made, outside_graphs, take, with_gradient_of, with_whole
from shardtensor.tensor._from_local import from_everyone
from shardtensor.tensor._layout import _SHARD
from shardtensor.tensor._tensor import ShardTensor

_BLOCK = 1 << 22  # distances that a rank holds at a time

Blocks = Iterator[tuple[int, torch.Tensor]]  # number of the first point, points


# ---- the ring ----


def _blocks(points: torch.Tensor) -> Blocks:
    """All points, piece by piece, this rank's first. The next piece travels while the caller uses this one."""
    if not isinstance(points, ShardTensor):
        yield 0, points.detach()
        return
    layout = points._layout
    mesh, points = layout.mesh, _C.wrap(_local(points), layout, points.shape, points.stride())
    turns = [range(n) if p[0] == _SHARD else range(1) for n, p in zip(mesh.shape, layout.placements, strict=True)]
    steps = list(itertools.product(*turns))
    piece = points
    for number, step in enumerate(steps):
        coming = _turned(points, steps[number + 1]) if number + 1 < len(steps) else None
        at = [(c - s) % n for c, s, n in zip(mesh.coordinate, step, mesh.shape, strict=True)]
        ((start, _),) = layout.intervals(0, points.shape[0], at)
        yield start, _C.local(piece)
        if coming is not None:
            piece = coming


def _turned(points: ShardTensor, step: tuple[int, ...]) -> ShardTensor:
    """The same tensor, each piece at the rank that is `step` further along the mesh: on a mesh whose ranks are turned."""
    mesh, layout = points._layout.mesh, points._layout
    turned = torch.tensor(mesh.ranks).view(mesh.shape).roll([-s for s in step], list(range(len(step)))).flatten().tolist()
    other = _C.Mesh(mesh.device_type, mesh.shape, turned, [], ["" for _ in step], mesh.rank, mesh.world)
    return _C.redistribute(points, _C.Layout(other, layout.placements, layout.cuts), None, None, True)


def _parts(queries: torch.Tensor, points: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Distances of some queries to all points of a block."""
    wide = queries.dtype if queries.dtype in (torch.float32, torch.float64) else torch.float32
    queries, points = queries.detach().to(wide), points.to(wide)
    step = max(1, _BLOCK // max(1, len(points)))
    for a in range(0, len(queries), step):
        part = queries[a : a + step]
        # With matrix products, two equal points would have a small distance that depends on the block.
        yield slice(a, a + len(part)), torch.cdist(part, points, compute_mode="donot_use_mm_for_euclid_dist")


def _prepared(points: torch.Tensor, queries: torch.Tensor, who: str) -> tuple[torch.Tensor, torch.Tensor]:
    for name, t in (("points", points), ("queries", queries)):
        if t.ndim != 2 or not t.is_floating_point():
            raise ValueError(f"{who}: argument '{name}' is {t.dtype} of sizes {list(t.shape)}; give [points, coordinates] of a floating-point dtype")
    if points.shape[1] != queries.shape[1] or points.dtype != queries.dtype:
        raise ValueError(
            f"{who}: arguments 'points' and 'queries' have {points.shape[1]} and {queries.shape[1]} coordinates, of {points.dtype} and {queries.dtype}"
        )
    if not any(isinstance(t, DTensor) for t in (points, queries)):
        return points, queries
    points, queries = as_sharded(who, points=points, queries=queries)
    return with_whole(points, 1, who), with_whole(queries, 1, who)


def _local(t: torch.Tensor) -> torch.Tensor:
    return t._local_tensor.detach() if isinstance(t, ShardTensor) else t.detach()


def _as_queries(local: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """A result with one row for each query, cut as the queries."""
    return made(local, queries._layout, [len(queries), *local.shape[1:]]) if isinstance(queries, ShardTensor) else local


# ---- the k nearest ----


@outside_graphs
def knn(points: torch.Tensor, queries: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k nearest of `points` [P, D] to each of `queries` [Q, D], nearest first: their global numbers and distances, both
    [Q, k] and cut as the queries. Of points at the same distance those with smaller numbers come first.

    Both sets may be cut in any way; besides its own pieces a rank holds at most two others of `points`, and a block of distances.
    The distances are differentiable with respect to both sets. Plain tensors give plain ones, with the same values.
    """
    points, queries = _prepared(points, queries, "points.knn")
    _check_count("points.knn", "k", k, len(points))
    best, index = _nearest(points, queries, k)
    return index, _differentiable(points, queries, index, best)


def _check_count(who: str, name: str, count: int, there: int) -> None:
    if not 0 <= count <= there:
        raise ValueError(f"{who}: argument '{name}' is {count}, but there are {there} points")


def _nearest(points: torch.Tensor, queries: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Distances and numbers."""
    mine = _local(queries)
    wide = mine.dtype if mine.dtype in (torch.float32, torch.float64) else torch.float32
    best = mine.new_full((len(mine), k), torch.inf, dtype=wide)
    index = torch.full((len(mine), k), len(points), device=mine.device)
    for start, block in _blocks(points):
        if not len(block) or not k:
            continue
        for rows, distances in _parts(mine, block):
            near, numbers = _few_nearest(distances, min(k, len(block)))
            best[rows], index[rows] = _first(torch.cat([best[rows], near], 1), torch.cat([index[rows], numbers + start], 1), k)
    return _as_queries(best.to(mine.dtype), queries), _as_queries(index, queries)


def _first(distances: torch.Tensor, numbers: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first k of each row, by distance and then by number."""
    numbers, order = numbers.sort(1)
    distances, by_distance = distances.gather(1, order).sort(dim=1, stable=True)
    return distances[:, :k], numbers.gather(1, by_distance[:, :k])


def _few_nearest(distances: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k smallest of each row, in any order; of equal ones those in front."""
    near, at = distances.topk(k, 1, largest=False)
    last = near.amax(1, keepdim=True)
    tied = ((distances == last).sum(1) > (near == last).sum(1)).nonzero().squeeze(1)  # topk may have taken any of them
    if len(tied):
        values, order = distances[tied].sort(dim=1, stable=True)
        near[tied], at[tied] = values[:, :k], order[:, :k]
    return near, at


def _differentiable(points: torch.Tensor, queries: torch.Tensor, index: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
    """`distances` from the queries to the points named by `index`, as functions of both."""
    if not torch.is_grad_enabled() or not (points.requires_grad or queries.requires_grad):
        return distances
    apart = queries.unsqueeze(1) - take(points, index)
    return with_gradient_of(torch.linalg.vector_norm(apart, dim=-1), distances)  # type: ignore[no-any-return]


# ---- all within a radius ----


@outside_graphs
def radius_search(
    points: torch.Tensor,
    queries: torch.Tensor,
    radius: float,
    max_points: int | None = None,
    return_dists: bool = False,
    return_points: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The points [P, D] at most `radius` away from each of the queries [Q, D], by global number.

    Without max_points: all of them, [2, pairs], a row of queries and a row of points, by query and then by point, cut along the pairs
    as the queries are. With max_points: the nearest so many, [Q, max_points], cut as the queries; entries that are not filled are 0.
    return_points and return_dists add the points and their distances to the result, in this order; both are differentiable.
    """
    who = "points.radius_search"
    points, queries = _prepared(points, queries, who)
    if max_points is None:
        index, distances = _pairs(points, queries, radius)
        named, near = index[1], index[0]
        results = [index]
        if return_points:
            results.append(take(points, named))
        if return_dists:
            if torch.is_grad_enabled() and (points.requires_grad or queries.requires_grad):
                apart = take(queries, near) - take(points, named)
                distances = with_gradient_of(torch.linalg.vector_norm(apart, dim=-1), distances)
            results.append(distances)
        return tuple(results) if len(results) > 1 else index
    if max_points < 0:
        raise ValueError(f"{who}: argument 'max_points' is {max_points}")
    k = min(max_points, len(points))
    best, index = _nearest(points, queries, k)
    inside = best <= radius
    index = index.masked_fill(~inside, 0)
    results = [_widened(index, max_points)]
    if return_points:
        results.append(_widened(take(points, index) * inside.unsqueeze(-1), max_points))
    if return_dists:
        results.append(_widened(_differentiable(points, queries, index, best).masked_fill(~inside, 0), max_points))
    return tuple(results) if len(results) > 1 else results[0]


def _widened(t: torch.Tensor, entries: int) -> torch.Tensor:
    missing = entries - t.shape[1]
    return torch.nn.functional.pad(t, [0, 0] * (t.ndim - 2) + [0, missing]) if missing else t


@outside_graphs
def ball_query(points: torch.Tensor, queries: torch.Tensor, radius: float, max_points: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `max_points` points by number, not the nearest ones, at most `radius` away from each query: their global numbers
    [Q, max_points], with 0 for entries that are not filled, and how many are [Q]. Both are cut as the queries."""
    who = "points.ball_query"
    points, queries = _prepared(points, queries, who)
    if max_points < 0:
        raise ValueError(f"{who}: argument 'max_points' is {max_points}")
    mine = _local(queries)
    of, numbers, _ = _found(points, mine, radius, max_points)
    counts = of.bincount(minlength=len(mine))
    place = torch.arange(len(of), device=of.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    few = place < max_points
    index = torch.zeros(len(mine), max_points, dtype=torch.int64, device=mine.device)
    index[of[few], place[few]] = numbers[few]
    return _as_queries(index, queries), _as_queries(counts.clamp(max=max_points), queries)


def _found(points: torch.Tensor, mine: torch.Tensor, radius: float, most: int | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs of this rank's queries and all points, sorted: queries by local number, points by global number, distances. most:
    this many of each block are enough.
    """
    found = [(torch.empty(0, dtype=torch.int64, device=mine.device),) * 2 + (mine.new_empty(0),)]
    for start, block in _blocks(points):
        for rows, distances in _parts(mine, block) if len(block) else ():
            inside = distances <= radius
            if most is not None:
                inside &= inside.cumsum(1) <= most
            of, number = inside.nonzero(as_tuple=True)
            found.append((of + rows.start, number + start, distances[of, number].to(mine.dtype)))
    of, numbers, distances = (torch.cat(parts) for parts in zip(*found, strict=True))
    order = numbers.argsort(stable=True)
    order = order[of[order].argsort(stable=True)]
    return of[order], numbers[order], distances[order]


def _pairs(points: torch.Tensor, queries: torch.Tensor, radius: float) -> tuple[torch.Tensor, torch.Tensor]:
    of, numbers, distances = _found(points, _local(queries), radius, None)
    if not isinstance(queries, ShardTensor):
        return torch.stack([of, numbers]), distances
    layout = queries._layout
    ((start, _),) = layout.intervals(0, len(queries))
    index = torch.stack([of + start, numbers])
    told = from_everyone([len(of)], layout.mesh, of.device)
    shards = [p if p[0] != _SHARD else (_SHARD, 1, *p[2:]) for p in layout.placements]
    along_pairs, along_rows = (lengths_as_cuts(layout, placements, [n for n, in told]) for placements in (shards, layout.placements))
    total = along_pairs[1]
    return made(index, along_pairs[0], [2, total]), made(distances, along_rows[0], [total])
