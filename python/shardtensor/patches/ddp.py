"""DistributedDataParallel, which copies parameters as plain memory; and torch.distributed.tensor.parallel.ddp: how DDP splits DTensor
parameters and puts them together again. All versions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import shardtensor._C as _C
from shardtensor.patches._patch import Patch
from shardtensor.tensor._tensor import ShardTensor, ShardTensorSpec


def _as_piece(flat: Callable[..., Any]) -> Callable[..., Any]:
    """DDP gets the pieces as plain parameters, and around each forward makes ShardTensors of them from the recorded layouts."""

    def flatten(t: torch.Tensor) -> Any:
        return (t._local_tensor.detach(), t._spec) if isinstance(t, ShardTensor) else flat(t)

    return flatten


def _of_piece(torchs: Callable[..., Any]) -> Callable[..., Any]:
    def unflatten(t: torch.Tensor, spec: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(spec, ShardTensorSpec):
            return torchs(t, spec, **kwargs)  # type: ignore[no-any-return]
        return _C.from_local(t, spec._layout, list(spec.shape), list(spec.stride), None)

    return unflatten


def _refusing(init: Callable[..., None]) -> Callable[..., None]:
    """Makes DDP refuse ShardTensors by name."""

    @functools.wraps(init)
    def checked(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        with_mesh = kwargs.get("device_mesh") is not None  # then it takes the pieces
        for name, p in () if with_mesh else module.named_parameters():
            if isinstance(p, ShardTensor):
                raise TypeError(
                    f"DistributedDataParallel: parameter '{name}' is a ShardTensor, {p._layout}, which DDP cannot broadcast or reduce. Pass "
                    "the data-parallel mesh dim, DistributedDataParallel(module, device_mesh=mesh['dp']), and it takes the pieces, or use "
                    f"torch.distributed.fsdp.fully_shard(module, mesh=mesh['dp']) (rank {p._layout.mesh.rank})"
                )
        init(self, module, *args, **kwargs)

    return checked


_DDP = "torch.distributed.tensor.parallel.ddp"
PATCHES = (
    Patch(
        "torch.nn.parallel.distributed",
        "DistributedDataParallel.__init__",
        _refusing,
        why="DDP would copy parameters as plain memory, which ShardTensors do not have.",
        ask="an error of its own for parameters without memory",
        without="Pass DDP a device_mesh if parameters are ShardTensors.",
    ),
    Patch(
        _DDP,
        "_flatten_tensor",
        _as_piece,
        why="DDP with a device_mesh takes the pieces of DTensors, and describes them by specs without cuts.",
        ask="`__tensor_flatten__` in place of these functions",
    ),
    Patch(
        _DDP,
        "_unflatten_tensor",
        _of_piece,
        why="DDP puts the pieces together again, as if they were cut evenly.",
        ask="`__tensor_unflatten__` in place of these functions",
    ),
)
