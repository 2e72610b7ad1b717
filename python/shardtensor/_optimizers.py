"""torch.optim on the pieces.

An optimizer's step is elementwise from end to end, so it can run on every rank's piece as it stands, and costs what it costs on
plain tensors. torch's optimizers gather lists of parameters, gradients and states and hand them to one function per algorithm;
that function is given the pieces where they all lie alike. Gradients that lie elsewhere, summands too, are brought there first,
once per step. Whatever does not fit runs on the ShardTensors, op by op.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import _foreach_supported_types as _optimizers_types
from torch.utils._foreach_utils import _foreach_supported_types as _clipping_types

from shardtensor import _C
from shardtensor._tensor import ShardTensor

_ELEMENTWISE = ("adadelta", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd")


def _on_pieces(step: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(step)
    def run(params: list[torch.Tensor], grads: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        if not params or type(params[0]) is not ShardTensor or kwargs.get("differentiable"):
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
    """Wraps torch.optim's functions, and has foreach chosen where torch would choose it for plain tensors; once."""
    for name in _ELEMENTWISE:
        module = importlib.import_module(f"torch.optim.{name}")
        step = getattr(module, name)
        if not hasattr(step, "_shardtensor"):
            wrapped = _on_pieces(step)
            wrapped._shardtensor = True  # type: ignore[attr-defined]
            setattr(module, name, wrapped)
    for types in (_optimizers_types, _clipping_types):
        if ShardTensor not in types:
            types.append(ShardTensor)  # type: ignore[arg-type]
