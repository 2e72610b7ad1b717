"""This rank's piece of a tensor: its place in the whole, its boxes, and whether it is several shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch

import shardtensor._C as _C


def _piece(whole: torch.Tensor, layout: _C.Layout, coordinate: Sequence[int] | None = None) -> torch.Tensor:
    """The part of the whole tensor at a coordinate (default: this rank's); a view if it is one run per dim."""
    for dim in range(whole.ndim):
        runs = layout.intervals(dim, whole.shape[dim], list(coordinate) if coordinate is not None else None)
        if runs != [(0, whole.shape[dim])]:
            parts = [whole.narrow(dim, start, length) for start, length in runs]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return whole


def _nothing_of(t: torch.Tensor) -> torch.Tensor:
    """The piece of a rank outside the tensor's mesh: empty; its gradient comes back as zeros."""
    return t.flatten()[:0]


def box_views(piece: torch.Tensor, layout: _C.Layout, sizes: list[int]) -> list[tuple[list[int], torch.Tensor]]:
    """For each box of this rank's piece: its offset in the whole, and the box as a view of the piece."""
    out = []
    for offsets, lengths in layout.boxes(sizes) if layout.mesh.has_this_rank else []:
        box = piece
        for dim, wanted in enumerate(zip(offsets, lengths, strict=True)):
            at = 0
            for interval in layout.intervals(dim, sizes[dim]):
                if interval == wanted:
                    box = box.narrow(dim, at, interval[1])
                    break
                at += interval[1]
        out.append((list(offsets), box))
    return out


def _refuse_summands(layout: _C.Layout, what: str) -> None:
    if layout.has_partial:
        raise RuntimeError(
            f"{what} is in summands, {layout}, which cannot be saved or loaded; redistribute it to Replicate "
            f"or Shard first (rank {layout.mesh.rank})"
        )


# ---- several shards ----


def holds_shards(t: Any) -> TypeGuard[Any]:
    """Whether `t` is a LocalShardsWrapper, this project's or torch's. Checks its attributes, which needs no import."""
    return isinstance(t, torch.Tensor) and hasattr(type(t), "local_chunks")


def has_shards(t: torch.Tensor) -> bool:
    """Whether a ShardTensor's piece is a LocalShardsWrapper. Such a ShardTensor carries Python's dispatch key."""
    return _C.is_traced(t) and holds_shards(_C.local(t))
