"""Cuts moved so that all ranks have the same work, by the fewest bytes; and when that pays."""

from __future__ import annotations

import time
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import ceil, floor
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

import shardtensor._C as _C
from shardtensor.tensor._from_local import from_everyone
from shardtensor.tensor._layout import _SHARD
from shardtensor.tensor._mesh import device_of
from shardtensor.tensor._tensor import ShardTensor

# ---- where to cut ----


def balanced_cut(costs: Sequence[float], before: Sequence[int], tolerance: float = 0.0, multiple_of: int = 1) -> list[int]:
    """The lengths of the ranks' runs of rows, in order. The most expensive run costs as little as possible (times 1 + tolerance), and of
    all such cuts this one moves the fewest rows.

    costs: of each row. before: the lengths now. multiple_of: runs begin at multiples of it.
    """
    n, rows = len(before), len(costs)
    places = [*range(0, rows, multiple_of), rows]  # where a run may begin or end; from here on, counted by their numbers
    sums = [0.0, *accumulate(map(float, costs))]
    total = [sums[p] for p in places]
    held = [_number_of(row, places) for row in accumulate(before, initial=0)]
    most = _least_bottleneck(total, n) * (1 + tolerance)
    # Every rank must end between these, so that the ranks before it can hold all earlier rows, and those after it all later
    # rows.
    latest, earliest = [0], [len(places) - 1]
    for _ in range(n):
        latest.append(_end_after(total, latest[-1], most))
        earliest.insert(0, _start_before(total, earliest[0], most))
    return [places[b] - places[a] for a, b in pairwise(_fewest_moved(total, held, earliest, latest, most))]


def _number_of(row: int, places: list[int]) -> float:
    """The number of the row's place; a fraction if the row is between two places."""
    at = bisect_right(places, row) - 1
    return at + (row - places[at]) / (places[at + 1] - places[at]) if at + 1 < len(places) and row > places[at] else float(at)


_SAME = 1 + 1e-9  # sums of costs that differ by less are equal


def _end_after(total: list[float], start: int, most: float) -> int:
    """The last end of a run from `start` on that costs at most `most`."""
    return max(start, bisect_right(total, total[start] + most * _SAME) - 1)


def _start_before(total: list[float], end: int, most: float) -> int:
    return min(end, bisect_left(total, total[end] - most * _SAME))


def _least_bottleneck(total: list[float], n: int) -> float:
    """The least possible cost of the most expensive of n runs: finds a bound by bisection, then the cost of its runs."""
    low, high = total[-1] / n, total[-1]
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _ends(total, middle, n)[-1] == len(total) - 1 else (middle, high)
    return max(total[b] - total[a] for a, b in pairwise(_ends(total, high, n)))


def _ends(total: list[float], most: float, n: int) -> list[int]:
    """The ends of n runs that are as long as `most` allows."""
    ends = [0]
    for _ in range(n):
        ends.append(_end_after(total, ends[-1], most))
    return ends


def _fewest_moved(total: list[float], held: list[float], earliest: list[int], latest: list[int], most: float) -> list[int]:
    """The ends that move the fewest rows: the cheapest path from end to end. If a rank may end at many rows, only some are tried:
    rows where a rank begins or ends now, and ends that follow from such a row if the runs after or before it are as long as
    allowed. (Rows of different costs could be exchanged for fewer others there.)"""
    n = len(held) - 1
    candidates: list[set[int]] = []
    for r in range(n + 1):
        near = [f(h) for h in held[max(0, r - _NEAR) : r + _NEAR + 1] for f in (floor, ceil)]
        few = range(earliest[r], latest[r] + 1) if latest[r] - earliest[r] <= _FEW else ()
        candidates.append({earliest[r], latest[r], *near, *few})
    for r in range(n):
        candidates[r + 1] |= set(sorted((_end_after(total, at, most) for at in candidates[r]), key=lambda at: abs(at - held[r + 1]))[:_MOST])
    for r in range(n, 0, -1):
        candidates[r - 1] |= set(sorted((_start_before(total, at, most) for at in candidates[r]), key=lambda at: abs(at - held[r - 1]))[:_MOST])
    paths: list[dict[int, tuple[float, int]]] = [{0: (0, 0)}]  # for each rank and end: rows moved so far, the end before
    for r in range(1, n + 1):
        now: dict[int, tuple[float, int]] = {}
        for end in candidates[r]:
            if not earliest[r] <= end <= latest[r]:
                continue
            first = _start_before(total, end, most)
            starts = ((start, rows) for start, (rows, _) in paths[-1].items() if first <= start <= end)
            choices = [(rows + end - start - max(0, min(end, held[r]) - max(start, held[r - 1])), abs(start - held[r - 1]), start) for start, rows in starts]
            if choices:
                rows, _, start = min(choices)
                now[end] = rows, start
        paths.append(now)
    ends = [len(total) - 1]
    for r in range(n, 0, -1):
        ends.append(paths[r][ends[-1]][1])
    return ends[::-1]


_FEW = 32
_NEAR = 8  # also tries the ends of this many ranks before and after
_MOST = 40  # tries at most this many ends that follow from them


# ---- one tensor ----


def rebalance(
    x: ShardTensor,
    *,
    costs: torch.Tensor | Sequence[float] | None = None,
    times: float | Sequence[float] | None = None,
    mesh_dim: int | None = None,
    tolerance: float = 0.02,
    multiple_of: int = 1,
) -> ShardTensor:
    """See the method of ShardTensor."""
    who = "ShardTensor.rebalance"
    mesh_dim = _mesh_dim_of(x, mesh_dim, who)
    if (costs is None) == (times is None):
        raise TypeError(f"{who}: give one of the arguments 'costs' (of each row) and 'times' (of each rank)")
    if tolerance < 0 or multiple_of < 1:
        raise ValueError(f"{who}: arguments 'tolerance' {tolerance} and 'multiple_of' {multiple_of}: not below 0, and not below 1")
    before = _lengths(x, mesh_dim)
    values = _row_costs(x, costs, mesh_dim, who) if times is None else _row_costs_of_times(x, times, mesh_dim, before, who)
    cut = balanced_cut(values, before, tolerance, multiple_of)
    if cut == before:
        return x
    return x.redistribute(placements=x.placements, sharding_shapes={**x.sharding_shapes(), mesh_dim: cut})


def _mesh_dim_of(x: ShardTensor, mesh_dim: int | None, who: str) -> int:
    layout = x._layout_of_pieces(who)
    cutting = [m for m, (kind, *_) in enumerate(layout.placements) if kind == _SHARD]
    if mesh_dim is None:
        if len(cutting) != 1:
            raise ValueError(f"{who}: {layout} is cut by {len(cutting)} mesh dims; argument 'mesh_dim' says whose cut moves (rank {layout.mesh.rank})")
        mesh_dim = cutting[0]
    mesh_dim %= len(layout.placements)
    if mesh_dim not in cutting:
        raise ValueError(f"{who}: argument 'mesh_dim': mesh dim {mesh_dim} of {layout} cuts nothing (rank {layout.mesh.rank})")
    dim, split = layout.placements[mesh_dim][1:3]
    if split > 1 or [layout.placements[m][1] for m in cutting].count(dim) > 1:
        raise NotImplementedError(
            f"{who}: in {layout} several mesh dims cut dim {dim}; redistribute it so that one does, and rebalance then (rank {layout.mesh.rank})"
        )
    return mesh_dim


def _lengths(x: ShardTensor, mesh_dim: int) -> list[int]:
    dim = x._layout.placements[mesh_dim][1]
    return [shape[dim] for shape in x.sharding_shapes()[mesh_dim]]


def _row_costs(x: ShardTensor, costs: Any, mesh_dim: int, who: str) -> list[float]:
    view, dim = x._layout.mesh, x._layout.placements[mesh_dim][1]
    if isinstance(costs, DTensor):
        costs = costs.detach().full_tensor()  # type: ignore[attr-defined]
    values = torch.as_tensor(costs, dtype=torch.float64, device="cpu")
    if values.shape != (x.shape[dim],):
        raise ValueError(
            f"{who}: argument 'costs' has sizes {list(values.shape)}; give one cost for each of the {x.shape[dim]} rows along dim {dim} "
            f"(rank {view.rank})"
        )
    numbers = [float(v) for v in values.tolist()]
    told = from_everyone([zlib.crc32(repr(numbers).encode()), _bad(numbers)], view, device_of(view))
    return _checked(numbers, told, "costs", view, who)


def _bad(numbers: Sequence[float]) -> int:
    return int(not all(0 <= v < float("inf") for v in numbers))


def _checked(numbers: list[float], told: list[list[int]], name: str, view: _C.Mesh, who: str) -> list[float]:
    for rank, (digest, bad) in zip(view.ranks, told, strict=True):
        if bad:
            raise ValueError(f"{who}: argument '{name}' has a value on rank {rank} that is negative or not finite (rank {view.rank})")
        if digest != told[0][0]:
            raise ValueError(f"{who}: argument '{name}' differs between ranks {view.ranks[0]} and {rank} (rank {view.rank})")
    return numbers


def _row_costs_of_times(x: ShardTensor, times: Any, mesh_dim: int, before: list[int], who: str) -> list[float]:
    view = x._layout.mesh
    if isinstance(times, (int, float)):
        times = times_of_ranks(x, float(times), mesh_dim, who)
    else:
        times = [float(t) for t in times]
        if len(times) != len(before):
            raise ValueError(f"{who}: argument 'times' has {len(times)} entries; mesh dim {mesh_dim} has {len(before)} ranks (rank {view.rank})")
        _checked(times, from_everyone([zlib.crc32(repr(times).encode()), _bad(times)], view, device_of(view)), "times", view, who)
    return costs_of_rows(times, before)


def costs_of_rows(times: Sequence[float], before: Sequence[int]) -> list[float]:
    """The cost of each row. A rank without rows does not count; if no rank took time, all rows count the same."""
    if not any(t for t, n in zip(times, before, strict=True) if n):
        return [1.0] * sum(before)
    return [t / n for t, n in zip(times, before, strict=True) for _ in range(n)]


def times_of_ranks(x: ShardTensor, seconds: float, mesh_dim: int, who: str) -> list[float]:
    """The times of the ranks along a mesh dim, the largest of those that share a coordinate; the same on all ranks of the mesh."""
    view = x._layout.mesh
    bad = _bad([seconds])
    told = from_everyone([0, bad, 0 if bad else round(seconds * 1e9)], view, device_of(view))
    _checked([], [row[:2] for row in told], "times", view, who)
    inner = 1
    for size in view.shape[mesh_dim + 1 :]:
        inner *= size
    out = [0.0] * view.shape[mesh_dim]
    for index, (_, _, nanoseconds) in enumerate(told):
        at = index // inner % view.shape[mesh_dim]
        out[at] = max(out[at], nanoseconds / 1e9)
    return out


# ---- when it pays ----


class Verdict(NamedTuple):
    """What a BalanceMonitor finds; the same on all ranks."""

    pays: bool
    times: list[float]  # of the ranks along the mesh dim: the median of the steps, in seconds
    step: float  # seconds of the slowest rank now
    balanced: float  # and after rebalance()
    move: float  # seconds that moving takes, once
    cut: list[int]  # the lengths of the ranks' pieces after rebalance()

    def __str__(self) -> str:
        verb = "pays" if self.pays else "does not pay"
        times = f"the slowest rank takes {self.step:.3g} s a step, then {self.balanced:.3g} s; moving takes {self.move:.3g} s"
        return f"rebalance() {verb}: {times}; the new cut is {self.cut}"


class BalanceMonitor:
    """Measures each rank's own time per step, and says on all ranks alike whether `rebalance` pays.

        monitor = BalanceMonitor(steps_ahead=1000)
        for step in range(...):
            with monitor:
                train_step(x)
            if step % 50 == 49 and (verdict := monitor.verdict(x)).pays:
                x = x.rebalance(times=verdict.times)
                monitor.restart()

    clock: what is measured. The default, the process's CPU time, leaves out the time in which a rank waits for others; on a GPU
    pass the seconds of the kernels with `add(seconds)` instead. steps_ahead: over how many steps moving must pay for itself.
    least_gain: the least share of a step's time that is worth a move; less counts as noise. bandwidth: bytes per second at which
    a tensor moves.
    """

    def __init__(
        self,
        *,
        steps_ahead: int = 100,
        least_gain: float = 0.05,
        bandwidth: float = 1e9,
        window: int = 50,
        clock: Callable[[], float] = time.process_time,
    ) -> None:
        self.steps_ahead, self.least_gain, self.bandwidth = steps_ahead, least_gain, bandwidth
        self._window, self._clock, self._steps = window, clock, list[float]()
        self._start = 0.0

    def __enter__(self) -> BalanceMonitor:
        self._start = self._clock()
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.add(self._clock() - self._start)

    def add(self, seconds: float) -> None:
        """Adds a step that took `seconds` on this rank."""
        self._steps = [*self._steps, seconds][-self._window :]

    def restart(self) -> None:
        """Forgets the steps so far, which do not apply to the new cuts."""
        self._steps = []

    def verdict(self, x: ShardTensor, *, mesh_dim: int | None = None, extra_bytes: int = 0, tolerance: float = 0.02, multiple_of: int = 1) -> Verdict:
        """Whether `x.rebalance(times=...)` pays. All ranks of the mesh call it; they exchange one number each.

        extra_bytes: per row of `x`, of other tensors that move along. The rest as in `rebalance`.
        """
        who = "BalanceMonitor.verdict"
        mesh_dim = _mesh_dim_of(x, mesh_dim, who)
        median = sorted(self._steps)[len(self._steps) // 2] if self._steps else 0.0
        times = times_of_ranks(x, median, mesh_dim, who)
        before = _lengths(x, mesh_dim)
        costs = costs_of_rows(times, before)
        cut = balanced_cut(costs, before, tolerance, multiple_of)
        total = [0.0, *accumulate(costs)]
        ends = [0, *accumulate(cut)]
        step, balanced = max(times), max(total[b] - total[a] for a, b in pairwise(ends))
        dim = x._layout.placements[mesh_dim][1]
        row = x.numel() // max(1, x.shape[dim]) * x.element_size() + extra_bytes
        move = _most_received(before, cut) * row / self.bandwidth
        gain = step - balanced
        pays = gain > self.least_gain * step and gain * self.steps_ahead > move
        return Verdict(pays, times, step, balanced, move, cut)


def _most_received(before: Sequence[int], after: Sequence[int]) -> int:
    """The rows of the rank that receives most."""
    old, new = ([0, *accumulate(lengths)] for lengths in (before, after))
    spans = zip(pairwise(old), pairwise(new), strict=True)
    return max(d - c - max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in spans)
