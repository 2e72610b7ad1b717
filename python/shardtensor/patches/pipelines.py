"""torch.distributed.pipelining with ShardTensors as inputs of stages, between them (since torch 2.12), and as outputs. All versions.

A stage describes to the next stage what it will send, and builds DTensors from what it receives; for ShardTensors the
description must include the cuts. Batches of ShardTensors are split and joined as whole tensors, not piece by piece.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import shardtensor._C as _C
from shardtensor.patches._patch import Patch
from shardtensor.tensor._layout import make_layout
from shardtensor.tensor._tensor import ShardTensor


class _Placements(tuple):  # type: ignore[type-arg]
    """Placements that hold the cuts, also after they are sent to another rank."""

    cuts: list[list[int] | None]


class _LikeDTensor(type):
    def __instancecheck__(cls, t: Any) -> bool:
        return isinstance(t, DTensor)


class _Received(metaclass=_LikeDTensor):
    @staticmethod
    def from_local(local: torch.Tensor, device_mesh: Any = None, placements: Any = None, **kwargs: Any) -> DTensor:
        if not isinstance(placements, _Placements):
            return DTensor.from_local(local, device_mesh, placements, **kwargs)
        shape, stride = kwargs["shape"], kwargs["stride"]
        layout = make_layout(device_mesh, tuple(placements), len(shape), placements.cuts, who="pipelining")
        return _C.from_local(local, layout, list(shape), list(stride), None)


class _NotOurs(_LikeDTensor):
    def __instancecheck__(cls, t: Any) -> bool:
        return isinstance(t, DTensor) and not isinstance(t, ShardTensor)


class _Stock(metaclass=_NotOurs):
    from_local = staticmethod(DTensor.from_local)


def _with_cuts(describe: Callable[[DTensor], Any]) -> Any:
    def from_dtensor(t: DTensor) -> Any:
        described = describe(t)
        if not isinstance(t, ShardTensor):
            return described
        placements = _Placements(described.placements)
        placements.cuts = t._layout.cuts
        return dataclasses.replace(described, placements=placements)

    return staticmethod(from_dtensor)


def _receive(_: type) -> type:
    return _Received


def _split(_: type) -> type:
    return _Stock


_PIPELINES = "torch.distributed.pipelining"
_FROM_SPEC = "DTensors that are rebuilt from their spec"
# Before torch 2.12 there are no DTensors between stages; sending a ShardTensor raises.
PATCHES = (
    Patch(
        f"{_PIPELINES}._utils",
        "_DTensorMeta.from_dtensor",
        _with_cuts,
        why="what a stage tells the next about a DTensor has no cuts.",
        ask="the tensor's spec in the description",
        since="2.12",
    ),
    Patch(f"{_PIPELINES}._utils", "DTensor", _receive, why="a stage makes DTensors of what it receives.", ask=_FROM_SPEC, since="2.12"),
    Patch(f"{_PIPELINES}.stage", "DTensor", _receive, why="the same.", ask=_FROM_SPEC, since="2.12"),
    Patch(
        f"{_PIPELINES}.microbatch",
        "DTensor",
        _split,
        why="batches of DTensors are split piece by piece; those of ShardTensors are split as whole tensors.",
        ask="torch.tensor_split and torch.cat of DTensors",
        since="2.12",
    ),
)
