"""Rows that go from any rank of a mesh to any other, in one exchange; differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import shardtensor._C as _C

_FAR = 1 << 40  # rows between one block and the next


def swap(rows: torch.Tensor, to_each: Sequence[int], of_each: Sequence[int], mesh: _C.Mesh) -> torch.Tensor:
    """Sends the first to_each[0] rows to the mesh's first rank, the next to_each[1] to its second, and so on. Returns the rows that
    the ranks send to this one, of_each[i] from the i-th, in the order of the ranks.

    All ranks of the mesh call it. Each must know what it gets.
    """
    out: torch.Tensor = _Swap.apply(rows, list(to_each), list(of_each), mesh)  # type: ignore[no-untyped-call]
    return out


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, to_each: list[int], of_each: list[int], mesh: _C.Mesh) -> torch.Tensor:
        ctx.way = to_each, of_each, mesh
        return _swapped(rows, to_each, of_each, mesh)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        to_each, of_each, mesh = ctx.way
        return _Swap.apply(grad, of_each, to_each, mesh), None, None, None  # type: ignore[no-untyped-call]


def _swapped(rows: torch.Tensor, to_each: list[int], of_each: list[int], mesh: _C.Mesh) -> torch.Tensor:
    """As boxes of one tensor that has a block of rows for each pair of ranks. A rank lists only those that it sends or gets."""
    ranks, features = mesh.ranks, list(rows.shape[1:])
    me = ranks.index(mesh.rank)
    if 0 in features:
        return rows.new_empty(sum(of_each), *features)

    def block(source: int, target: int, at: int, length: int) -> tuple[int, list[int], list[int]]:
        """Of the rows from `source` to `target`, as a box that the rank numbered `at` holds or wants."""
        return ranks[at], [(source * len(ranks) + target) * _FAR, *(0 for _ in features)], [length, *features]

    sent = [(target, n) for target, n in enumerate(to_each) if n]
    got = [(source, n) for source, n in enumerate(of_each) if n]
    held = [block(me, target, me, n) for target, n in sent] + [block(source, me, source, n) for source, n in got if source != me]
    wanted = [block(source, me, me, n) for source, n in got] + [block(me, target, target, n) for target, n in sent if target != me]
    pieces = [piece for piece in torch.split(rows.detach().contiguous(), to_each) if len(piece)]
    arrived = _C.exchange_boxes(pieces, held, wanted, mesh, rows.dtype, rows.device)
    return torch.cat(arrived) if arrived else rows.new_empty(0, *features)
