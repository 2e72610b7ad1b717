"""An optimizer of modules with sharded parameters: a drop-in for torch.distributed._shard.sharded_optim."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardtensor.sharded_tensor._tensor import ShardedTensor


def named_params_with_sharded_tensor(module: nn.Module, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """The module's ShardedTensors that are plain attributes, then its parameters, of which shard_parameter has sharded some."""
    seen: set[ShardedTensor] = set()
    for path, part in module.named_modules(prefix=prefix) if recurse else [(prefix, module)]:
        for name, value in vars(part).items():
            if isinstance(value, ShardedTensor) and value not in seen:
                seen.add(value)
                yield f"{path}.{name}" if path else name, value
    yield from module.named_parameters()


class ShardedOptimizer(Optimizer):
    """Runs an optimizer on plain parameters and on this rank's shards of the ShardedTensors.

    It has no state_dict, as in torch: convert the parameters with ShardTensor.from_sharded_tensor, and torch.optim's optimizers
    and torch.distributed.checkpoint take them.
    """

    def __init__(
        self, named_params: Mapping[str, torch.Tensor], optimizer_class: Callable[..., Optimizer], *optimizer_args: Any, **optimizer_kwargs: Any
    ) -> None:
        tensors: list[torch.Tensor] = []
        for value in named_params.values():
            tensors += [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]
        self.named_params = named_params
        self._optim = optimizer_class(tensors, *optimizer_args, **optimizer_kwargs)
        self.param_groups = self._optim.param_groups
        self.state = self._optim.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optim.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self._optim.step(closure)

    def state_dict(self) -> dict[str, Any]:
        raise self._missing("state_dict")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        raise self._missing("load_state_dict")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise self._missing("add_param_group")

    def _missing(self, name: str) -> NotImplementedError:
        return NotImplementedError(
            f"ShardedOptimizer {name} not implemented yet! Convert the parameters with ShardTensor.from_sharded_tensor; torch.optim's "
            "optimizers take them"
        )
