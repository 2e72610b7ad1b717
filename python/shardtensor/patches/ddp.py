"""DistributedDataParallel, which copies parameters as plain memory; and torch.distributed.tensor.parallel.ddp: how DDP splits DTensor
parameters and puts them together again. All versions."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import shardtensor._C as _C
from shardtensor.tensor._tensor import ShardTensor, ShardTensorSpec


def patch(ddp: Any) -> None:
    """DDP gets the pieces as plain parameters, and around each forward makes ShardTensors of them from the recorded layouts."""
    flat, torchs = ddp._flatten_tensor, ddp._unflatten_tensor

    def flatten(t: torch.Tensor) -> Any:
        return (t._local_tensor.detach(), t._spec) if isinstance(t, ShardTensor) else flat(t)

    def unflatten(t: torch.Tensor, spec: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(spec, ShardTensorSpec):
            return torchs(t, spec, **kwargs)  # type: ignore[no-any-return]
        return _C.from_local(t, spec._layout, list(spec.shape), list(spec.stride), None)

    ddp._flatten_tensor, ddp._unflatten_tensor = flatten, unflatten


def install() -> None:
    """Makes DDP refuse ShardTensors by name, once."""
    init: Any = DistributedDataParallel.__init__
    if hasattr(init, "_shardtensor"):
        return

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

    checked._shardtensor = True  # type: ignore[attr-defined]
    DistributedDataParallel.__init__ = checked  # type: ignore[method-assign]
