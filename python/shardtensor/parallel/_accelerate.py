"""Hugging Face's accelerate, after replace_dtensor(): an optimizer's parameters are found again by name.

When accelerate has sharded a model, it finds the parameters that the optimizer should now have by the addresses of the old ones.
A ShardTensor has no address, and all empty pieces have the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardtensor._late import when_imported
from shardtensor.tensor._tensor import ShardTensor

# The wrappers that accelerate puts around modules.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def install(active: Callable[[], bool]) -> None:
    """Called once. Changes what accelerate does while `active()` is true."""

    def addresses(named: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def ours(self: Any, *args: Any, drop_refs: bool = False) -> dict[str, Any]:
            parameters = named(self, *args)
            if not drop_refs or not any(isinstance(p, ShardTensor) for p in parameters.values()):
                return named(self, *args, drop_refs=drop_refs)
            return {name: (p._local_tensor if isinstance(p, DTensor) else p).data_ptr() for name, p in parameters.items()}

        return ours

    def by_name(prepare: Callable[..., Any]) -> Callable[..., Any]:
        def ours(self: Any, *args: Any) -> Any:
            if not active():
                return prepare(self, *args)
            names = {id(p): name for name, p in _parameters(args).items()}
            optimizers = [arg for arg in args if isinstance(arg, torch.optim.Optimizer)]
            wanted = [[names.get(id(p), "") for p in group["params"]] for group in _groups(optimizers)]
            result = prepare(self, *args)
            after = _parameters(result)
            for group, own in zip(_groups(optimizers), wanted, strict=True):
                group["params"] = [after.get(name, p) for name, p in zip(own, group["params"], strict=True)]
            return result

        return ours

    def change(module: Any) -> None:
        for name, wrap in {"_get_named_parameters": addresses, "_prepare_tp": by_name, "_prepare_fsdp2": by_name}.items():
            if hasattr(module.Accelerator, name):
                setattr(module.Accelerator, name, wrap(getattr(module.Accelerator, name)))

    when_imported("accelerate.accelerator", change)


def _groups(optimizers: list[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """Their present ones: accelerate makes new ones."""
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def _parameters(objects: Any) -> dict[str, nn.Parameter]:
    named = {}
    for model in objects:
        if isinstance(model, nn.Module):
            for name, parameter in model.named_parameters():
                for wrapper in _WRAPPERS:
                    name = name.replace(wrapper, "")
                named[name] = parameter
    return named
