"""torch.autograd: a backward that fails on one rank alone, in a user's hook for example, leaves the other ranks in its collectives.
And torch.autograd.grad: what it returns for a leaf has the leaf's cuts, as .grad has. All versions."""

from __future__ import annotations

import functools
from typing import Any

import torch

import shardtensor._C as _C
from shardtensor.tensor._tensor import ShardTensor


def _with_cuts(gradients: Any, inputs: Any) -> Any:
    if not inputs or not isinstance(gradients, tuple) or len(gradients) != len(inputs):
        return gradients  # of backward()
    leaves = (t if isinstance(t, ShardTensor) and t.is_leaf else None for t in inputs)
    return tuple(g if t is None or g is None else _C.with_cuts_of(t, g) for t, g in zip(leaves, gradients, strict=True))


def install() -> None:
    run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    @functools.wraps(run)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        try:
            return _with_cuts(run(*args, **kwargs), args[4] if len(args) > 4 else kwargs.get("inputs"))
        except BaseException as e:
            _C.failed_in_part("backward", f"{type(e).__name__}: {e}")
            raise

    torch.autograd._engine_run_backward = run_backward  # type: ignore[attr-defined]
