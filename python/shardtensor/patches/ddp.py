"""torch.distributed.tensor.parallel.ddp: how DDP takes DTensor parameters apart and puts them together. All versions."""

from __future__ import annotations

from typing import Any

import torch

from shardtensor import _C
from shardtensor.tensor._tensor import ShardTensor, ShardTensorSpec


def patch(ddp: Any) -> None:
    """DDP gets the pieces as plain parameters, and makes them whole again around each forward from what was noted of them."""
    flat, torchs = ddp._flatten_tensor, ddp._unflatten_tensor

    def flatten(t: torch.Tensor) -> Any:
        return (t._local_tensor.detach(), t._spec) if isinstance(t, ShardTensor) else flat(t)

    def unflatten(t: torch.Tensor, spec: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(spec, ShardTensorSpec):
            return torchs(t, spec, **kwargs)  # type: ignore[no-any-return]
        return _C.from_local(t, spec._layout, list(spec.shape), list(spec.stride), None)

    ddp._flatten_tensor, ddp._unflatten_tensor = flatten, unflatten
