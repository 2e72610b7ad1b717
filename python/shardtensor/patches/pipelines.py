"""torch.distributed.pipelining with ShardTensors as inputs of stages, between them (since torch 2.12), and as outputs. All versions.

A stage describes to the next stage what it will send, and builds DTensors from what it receives; for ShardTensors the
description must include the cuts. Batches of ShardTensors are split and joined as whole tensors, not piece by piece.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import shardtensor._C as _C
from shardtensor._late import when_imported
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


def _tell_cuts(module: Any) -> None:
    meta = getattr(module, "_DTensorMeta", None)
    if meta is None:  # before torch 2.12: no DTensors between stages; sending a ShardTensor raises
        return
    describe = meta.from_dtensor

    def from_dtensor(t: DTensor) -> Any:
        described = describe(t)
        if not isinstance(t, ShardTensor):
            return described
        placements = _Placements(described.placements)
        placements.cuts = t._layout.cuts
        return dataclasses.replace(described, placements=placements)

    meta.from_dtensor = staticmethod(from_dtensor)
    module.DTensor = _Received


def _receive(module: Any) -> None:
    if hasattr(module, "DTensor"):
        module.DTensor = _Received


def _split(module: Any) -> None:
    if hasattr(module, "DTensor"):
        module.DTensor = _Stock


def install() -> None:
    """Called once."""
    when_imported("torch.distributed.pipelining._utils", _tell_cuts)
    when_imported("torch.distributed.pipelining.stage", _receive)
    when_imported("torch.distributed.pipelining.microbatch", _split)
