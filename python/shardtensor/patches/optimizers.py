"""torch.optim on the pieces. All versions.

An optimizer's step is elementwise, so it can run on every rank's piece and costs what it costs on plain tensors. torch's
optimizers pass lists of parameters, gradients and states to one function per algorithm. That function gets the pieces if all
tensors of an index have the same layout. Gradients in other layouts, also summands, are first moved to it, once per step. Other
lists run on the ShardTensors, op by op.

In a graph (torch.compile) torch's own functions run on the ShardTensors, because the graph holds only pieces anyway.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.optim.optimizer import _foreach_supported_types as _optimizers_types

from shardtensor import _C
from shardtensor.patches._once import wrap_once
from shardtensor.tensor._tensor import ShardTensor

_ELEMENTWISE = ("adadelta", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd")


def _on_pieces(step: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(step)
    def run(params: list[torch.Tensor], grads: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        if is_compiling() or not params or type(params[0]) is not ShardTensor or kwargs.get("differentiable"):
            return step(params, grads, *args, **kwargs)
        scaled = kwargs.get("grad_scale") is not None  # then a fused step writes the unscaled gradients back
        grads = (None if scaled else _C.laid_out_like(params, grads)) or grads
        given = [params, grads, *args]
        lists = [i for i, a in enumerate(given) if type(a) is list]
        if not any(type(a) is ShardTensor for a in (*given, *kwargs.values())):
            local = _C.local_lists([given[i] for i in lists], -1 if scaled else 1)
            for i, pieces in zip(lists, local or (), strict=False):
                given[i] = pieces
        return step(*given, **kwargs)

    return run


def install() -> None:
    """Wraps torch.optim's functions, and makes torch choose foreach as for plain tensors; once."""
    for name in _ELEMENTWISE:
        wrap_once(importlib.import_module(f"torch.optim.{name}"), name, _on_pieces)
    if ShardTensor not in _optimizers_types:
        _optimizers_types.append(ShardTensor)  # type: ignore[arg-type]
