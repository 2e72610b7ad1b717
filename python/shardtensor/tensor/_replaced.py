"""Parameters that distribute_module or fully_shard has replaced. An optimizer that was built before still holds them, so its steps would change
nothing in the model: step() raises. It looks at its parameters only while such parameters are alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

_replaced: dict[int, weakref.ReferenceType[nn.Parameter]] = {}  # by id
_hook: RemovableHandle | None = None


def note_replaced(before: list[nn.Parameter], module: nn.Module) -> None:
    """`before`: the module's parameters before it was distributed."""
    still_there = {id(p) for p in module.parameters()}
    note_gone(p for p in before if id(p) not in still_there)


def note_gone(parameters: Iterable[nn.Parameter]) -> None:
    """No module holds these any more."""
    global _hook
    for parameter in parameters:
        key = id(parameter)
        _replaced[key] = weakref.ref(parameter, lambda _, key=key: _forget(key))  # type: ignore[misc]
    if _replaced and _hook is None:
        _hook = register_optimizer_step_pre_hook(_check)


def _forget(key: int) -> None:
    global _hook
    _replaced.pop(key, None)
    if not _replaced and _hook is not None:
        _hook.remove()
        _hook = None


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    parameters: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
    # One with a gradient is still used, by a module that was not distributed.
    lost = [p for p in parameters if p.grad is None and id(p) in _replaced and _replaced[id(p)]() is p]
    if lost:
        raise RuntimeError(
            f"{type(optimizer).__name__}.step: {len(lost)} of its {len(parameters)} parameters (the first has shape "
            f"{tuple(lost[0].shape)}) are no longer in the model: distribute_module, parallelize_module or fully_shard has "
            "replaced them by ShardTensors since the optimizer was built, so this step would not train them. Build the optimizer afterwards."
        )
