"""What a redistribution would do and cost. Nothing is moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

import shardtensor._C as _C
from shardtensor.debug._text import in_bytes
from shardtensor.tensor._layout import ShardingShapes, make_layout, target_layout
from shardtensor.tensor._pieces import has_shards
from shardtensor.tensor._tensor import ShardTensor


@dataclass(frozen=True)
class Step:
    """One collective, or one local step, on the way."""

    kind: str
    along: int | str  # a mesh dim, or "mesh": all at once
    before: _C.Layout
    after: _C.Layout
    sent: Mapping[int, int]  # bytes that each global rank contributes
    received: Mapping[int, int]  # new bytes that each global rank receives


@dataclass(frozen=True)
class Explanation:
    """The steps from one layout to another, and the bytes they move."""

    source: _C.Layout
    target: _C.Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    steps: tuple[Step, ...]

    def sent(self, rank: int) -> int:
        """The bytes that a global rank contributes, in all steps."""
        return sum(step.sent.get(rank, 0) for step in self.steps)

    def received(self, rank: int) -> int:
        """The new bytes that a global rank receives, in all steps."""
        return sum(step.received.get(rank, 0) for step in self.steps)

    def __str__(self) -> str:
        head = f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}: {self.source} -> {self.target}"
        if not self.steps:
            return f"{head}\n  nothing to do"
        rows = [("step", "along", "leaves", "sent by a rank", "received by a rank")]
        for step in self.steps:
            along = step.along if isinstance(step.along, str) else f"mesh dim {step.along}"
            rows.append((step.kind, along, str(step.after), _span(step.sent), _span(step.received)))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([head, *lines])


def _span(of: Mapping[int, int]) -> str:
    least, most = min(of.values()), max(of.values())
    return in_bytes(most) if least == most else f"{in_bytes(least)} to {in_bytes(most)}"


def explain(
    source: ShardTensor | tuple[DeviceMesh, Sequence[Placement], Sequence[int], torch.dtype],
    placements: Sequence[Placement],
    device_mesh: DeviceMesh | None = None,
    *,
    sharding_shapes: ShardingShapes | None = None,
) -> Explanation:
    """The steps that redistribute() would take from `source`, a ShardTensor or (mesh, placements, shape, dtype).

    Nothing is sent, and one rank may call it alone. The result has the bytes that every rank would send and receive.
    """
    who = "explain"
    if isinstance(source, torch.Tensor):
        if not _C.is_shard_tensor(source):
            raise TypeError(f"{who}: argument 'source' is a plain torch.Tensor; pass a ShardTensor or (mesh, placements, shape, dtype)")
        if has_shards(source):
            raise NotImplementedError(f"{who}: argument 'source' holds LocalShardsWrappers, whose layout does not say what would move")
        ours, shape, dtype = _C.layout(source), tuple(source.shape), source.dtype
    else:
        mesh, given, sizes, dtype = source
        shape = tuple(sizes)
        ours = make_layout(mesh, given, len(shape), who=who)
    target = target_layout(ours, shape, placements, device_mesh, sharding_shapes, who=who)
    steps = tuple(
        Step(
            kind,
            "mesh" if mesh_dim < 0 else mesh_dim,
            before,
            after,
            {rank: sent for rank, (sent, _) in traffic.items()},
            {rank: received for rank, (_, received) in traffic.items()},
        )
        for kind, mesh_dim, before, after, traffic in _C.route(ours, target, list(shape), dtype.itemsize)
    )
    return Explanation(ours, target, shape, dtype, steps)
