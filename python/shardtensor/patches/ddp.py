"""torch.distributed.tensor.parallel.ddp: how DDP splits DTensor parameters and puts them together again. All versions."""

from __future__ import annotations

from typing import Any

import torch

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
