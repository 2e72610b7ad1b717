"""Tied parameters: one parameter that several modules hold. It stays one when the modules are distributed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import nn

from shardtensor.tensor._tensor import ShardTensor


class Place(NamedTuple):
    """Where a module holds a parameter."""

    name: str  # as in named_parameters()
    module: nn.Module
    key: str

    @property
    def parameter(self) -> nn.Parameter | None:
        return self.module._parameters.get(self.key)

    def __str__(self) -> str:
        return f"'{self.name}' ({type(self.module).__name__})"


def places(module: nn.Module) -> list[list[Place]]:
    """For each parameter inside the module, all places that hold it. Without the parameters, which may be freed meanwhile."""
    found: dict[int, list[Place]] = {}
    for prefix, submodule in module.named_modules():
        for key, parameter in submodule._parameters.items():
            if parameter is not None:
                name = f"{prefix}.{key}" if prefix else key
                found.setdefault(id(parameter), []).append(Place(name, submodule, key))
    return list(found.values())


@contextmanager
def ties_kept(module: nn.Module, who: str) -> Iterator[list[tuple[Place, Place]]]:
    """For code that makes parameters ShardTensors one place at a time: on leaving, each tied parameter that became a ShardTensor
    in some places is that one ShardTensor in all of them. Raises if it got several layouts.

    Yields a list. On leaving, it has each place that the code left alone, after a place that it gets its ShardTensor from.
    """
    tied = [(held[0].parameter, held) for held in places(module) if len(held) > 1]
    followed: list[tuple[Place, Place]] = []
    yield followed
    for parameter, held in tied:
        made = [place for place in held if place.parameter is not parameter and isinstance(place.parameter, ShardTensor)]
        left = [place for place in held if place.parameter is parameter]
        for place in made[1:]:
            _check_same_layout(made[0], place, who)
        if made:
            for place in made[1:] + left:
                place.module.register_parameter(place.key, made[0].parameter)
            followed += [(made[0], place) for place in left]


def _check_same_layout(one: Place, other: Place, who: str) -> None:
    """Reads layouts and sizes alone, so all ranks raise or none does."""
    a, b = one.parameter, other.parameter
    assert isinstance(a, ShardTensor) and isinstance(b, ShardTensor)
    if a._layout == b._layout and a.shape == b.shape:
        return
    raise ValueError(
        f"{who}: {one} and {other} are one tied parameter, but {one.name} is to be {_described(a)}, and {other.name} {_described(b)}. "
        "Give both the same placements (a vocabulary is cut alike by RowwiseParallel for the Embedding and ColwiseParallel for the "
        f"Linear), or untie them first: model.{other.name} = nn.Parameter(model.{other.name}.detach().clone()) "
        f"(rank {a._layout.mesh.rank})"
    )


def _described(t: ShardTensor) -> str:
    return f"{t._layout} of sizes {tuple(t.shape)}"
