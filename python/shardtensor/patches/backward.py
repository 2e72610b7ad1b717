"""torch.autograd: a backward that fails on one rank alone, in a user's hook for example, leaves the other ranks in its collectives.
All versions."""

from __future__ import annotations

import functools
from typing import Any

import torch

import shardtensor._C as _C


def install() -> None:
    run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    @functools.wraps(run)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except BaseException as e:
            _C.failed_in_part("backward", f"{type(e).__name__}: {e}")
            raise

    torch.autograd._engine_run_backward = run_backward  # type: ignore[attr-defined]
