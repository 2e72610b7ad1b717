"""Which ops can run on each shard alone with the same result as on the tensor, and how they run on LocalShardsWrappers."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from shardtensor.tensor._pieces import holds_shards

_FOREACH = "_foreach_"
# Besides the ops that torch tags as pointwise.
_SHARD_BY_SHARD = {
    *("_pin_memory", "_to_copy", "alias", "clone", "copy_", "detach", "empty_like", "fill", "fill_", "full_like", "lift_fresh"),
    *("masked_fill", "masked_fill_", "ones_like", "zero", "zero_", "zeros_like"),
    *("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"),
}


@functools.cache
def runs_shard_by_shard(func: Any) -> bool:
    name = func.overloadpacket.__name__
    if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if name.startswith(_FOREACH):
        name = name.removeprefix(_FOREACH)
        single = getattr(torch.ops.aten, name.rstrip("_"), None)
        return name in _SHARD_BY_SHARD or any(_is_pointwise(getattr(single, o)) for o in (single.overloads() if single else ()))
    return name in _SHARD_BY_SHARD or _is_pointwise(func)


def _is_pointwise(func: Any) -> bool:
    return bool(torch.Tag.pointwise in func.tags)


@functools.cache
def is_on_lists(func: Any) -> bool:
    """Whether the op takes lists with one entry per tensor."""
    return bool(func.overloadpacket.__name__.startswith((_FOREACH, "_fused_")))


@functools.cache
def is_in_place(func: Any) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The arguments that the op writes, which it returns."""
    arguments = func._schema.arguments
    values = [
        args[i] if i < len(args) else kwargs[a.name]
        for i, a in enumerate(arguments)
        if a.alias_info is not None and a.alias_info.is_write
    ]
    count = len(func._schema.returns)
    return None if count == 0 else values[0] if count == 1 else tuple(values)


def sizes_meant(size: Sequence[int], numel: int) -> list[int]:
    """The sizes with -1 replaced by its value."""
    rest = math.prod(n for n in size if n != -1)
    return [numel // max(rest, 1) if n == -1 else int(n) for n in size]


def refuse_unlike(func: Any, tensors: Sequence[Any]) -> None:
    """Raises unless all wrappers have shards at the same places, and every other tensor is one value for all shards."""
    first, *others = [t for t in tensors if holds_shards(t)]
    for other in others:
        if other.local_chunks != first.local_chunks:
            raise ValueError(
                f"{func}: LocalShardsWrappers with shards at different places, {_places(first)} and {_places(other)}, cannot be "
                "combined shard by shard"
            )
    for t in tensors:
        if isinstance(t, torch.Tensor) and not holds_shards(t) and t.ndim > 0:
            raise NotImplementedError(
                f"{func} is not supported for LocalShardsWrapper and a plain tensor of sizes {list(t.shape)}: nothing says which "
                "part belongs to which shard; use local_shards(), one by one"
            )


def _places(w: Any) -> list[tuple[list[int], list[int]]]:
    return [(list(c.offsets), list(c.sizes)) for c in w.local_chunks]


def on_each(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs the op on each shard and joins the results; None for an op that writes its arguments."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    refuse_unlike(func, leaves)
    first = next(t for t in leaves if holds_shards(t))
    results = []
    for i in range(len(first.parts())):
        part_args, part_kwargs = pytree.tree_unflatten([t.parts()[i] if holds_shards(t) else t for t in leaves], tree)
        results.append(func(*part_args, **part_kwargs))
    if is_in_place(func):
        return None
    if isinstance(results[0], torch.Tensor):
        return first.like(results)
    return tuple(first.like(list(of_all)) for of_all in zip(*results, strict=True))


def on_each_of_lists(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs the op in one call: each wrapper in a list is replaced by its shards."""
    tensors = len(args[0])
    values = [*args, *kwargs.values()]
    lists = [v for v in values if isinstance(v, (list, tuple)) and len(v) == tensors]
    counts = []
    for entries in zip(*lists, strict=True):
        first = next((t for t in entries if holds_shards(t)), None)
        if first is not None:
            refuse_unlike(func, entries)
        counts.append(len(first.parts()) if first is not None else 1)

    def spread(value: Any) -> Any:
        if not any(value is v for v in lists):
            return value
        return [
            part
            for t, count in zip(value, counts, strict=True)
            for part in (t.parts() if holds_shards(t) else [t] * count)
        ]

    results = func(*(spread(a) for a in args), **{name: spread(v) for name, v in kwargs.items()})
    if results is None:
        return None
    rest = iter(results)
    grouped = [[next(rest) for _ in range(count)] for count in counts]
    return [t.like(group) if holds_shards(t) else group[0] for t, group in zip(args[0], grouped, strict=True)]
