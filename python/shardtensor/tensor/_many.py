"""redistribute() of several tensors at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

import shardtensor._C as _C
from shardtensor.tensor import _compile
from shardtensor.tensor._layout import ShardingShapes, moved_layout, target_layout
from shardtensor.tensor._pieces import holds_shards
from shardtensor.tensor._tensor import ShardTensor


def redistribute(
    tensors: Sequence[ShardTensor],
    placements: Sequence[Placement] | Sequence[Sequence[Placement]],
    device_mesh: DeviceMesh | None = None,
    *,
    sharding_shapes: ShardingShapes | Sequence[ShardingShapes | None] | None = None,
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> list[ShardTensor]:
    """Each tensor with its pieces in another layout, as `x.redistribute` makes it, with far fewer collectives; differentiable.

    `placements` are those of all tensors, or a list with one sequence of them for each; so is `sharding_shapes`. The tensors may have
    any sizes, dtypes, layouts and meshes. Steps of one kind along one mesh dim are one collective for all tensors: sums and other
    reductions one for each dtype and reduction, everything else one whatever the dtypes. Tensors of more than 2 MiB move by
    themselves, because copying them into a common buffer would cost more than a call; of smaller ones, each collective has up to
    16 MiB. The gradients move back together, once all of them have arrived.

    async_op returns before the last collectives are done; the first use of each result's data waits for its own, also if other
    results have been dropped. The gradients move in the same way.

    All ranks of the meshes call it, with the same tensors in the same order. A sum may differ from that of `x.redistribute` in its
    last bits, since a backend may add up a longer buffer in another order; it is the same on all ranks.
    """
    who = "redistribute"
    tensors = list(tensors)
    for i, t in enumerate(tensors):
        if not isinstance(t, torch.Tensor) or not _C.is_shard_tensor(t):
            raise TypeError(f"{who}: argument 'tensors': item {i} is a {type(t).__name__}, not a ShardTensor; distribute it first, or leave it out")
    given = _each(list(placements), len(tensors), lambda p: not p or isinstance(p[0], Placement), "placements", who)
    shapes = _each(sharding_shapes, len(tensors), lambda s: s is None or isinstance(s, (Mapping, str)), "sharding_shapes", who)
    out: list[Any] = [None] * len(tensors)
    dense, layouts = [], []
    for i, (t, wanted, shape) in enumerate(zip(tensors, given, shapes, strict=True)):
        if _C.is_traced(t) and holds_shards(_C.local(t)):
            out[i] = t.redistribute(
                device_mesh, wanted, sharding_shapes=shape, forward_dtype=forward_dtype, backward_dtype=backward_dtype
            )
            continue
        here = f"{who}: tensor {i}"
        dense.append(i)
        layouts.append(
            moved_layout(t._layout, wanted, t.ndim, who=here)
            if device_mesh is None and shape is None
            else target_layout(t._layout, t.shape, wanted, device_mesh, shape, who=here)
        )
    moved = _C.redistribute_all([tensors[i] for i in dense], layouts, forward_dtype, backward_dtype, async_op)
    for i, t in zip(dense, moved, strict=True):
        out[i] = t
    return out


def _each(given: Any, count: int, is_one: Any, name: str, who: str) -> list[Any]:
    """What each tensor is given: the same for all, or one item of a list for each."""
    if is_one(given):
        return [given] * count
    if len(given) != count:
        raise ValueError(f"{who}: argument '{name}' has {len(given)} items for {count} tensors; give one for each, or one for all")
    return list(given)


_compile.in_graph(redistribute)
