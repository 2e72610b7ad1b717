"""Random values of shards. Each rank draws its own, as in torch; with a generator that all ranks share, an element's value depends only
on the generator's state and the element's global index, as in shardtensor.random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import shardtensor._C as _C
from shardtensor.sharded_tensor._move import carrier_of
from shardtensor.sharded_tensor._tensor import ShardedTensor
from shardtensor.tensor._mesh import group_mesh


def _box_layout(offsets: list[int], sizes: list[int], whole: list[int], device_type: str) -> _C.Layout:
    """A layout whose piece here is that box. Its mesh only gives positions and never communicates: each dim that is cut has
    three coordinates, for the indices before the box, the box, and the indices after it."""
    cut = [d for d, (n, size) in enumerate(zip(sizes, whole, strict=True)) if n != size]
    shape = [3] * len(cut) or [1]
    here = (3 ** len(cut)) // 2  # 1, 1, ..., 1
    mesh = _C.Mesh(device_type, shape, list(range(3 ** len(cut))), [], [""] * len(shape), here)
    _C.mark_random_agreed(mesh)
    placements = [(1, d, 1, "sum", 2.0) for d in cut] or [(0, -1, 1, "sum", 2.0)]
    return _C.Layout(mesh, placements, [[offsets[d], sizes[d], whole[d] - offsets[d] - sizes[d]] for d in cut] or [None])


def fill(draw: Callable[..., Any], t: ShardedTensor, *args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> ShardedTensor:
    """Runs Tensor.uniform_ or another random fill, with a generator on all ranks: all take one step of it.

    torch.default_generator stands for the generators that draw by default, which all ranks must have in the same state.
    """
    if generator is None:
        with torch.no_grad():
            for shard in t._local_shards:
                draw(shard.tensor, *args, **kwargs)
        return t
    if dist.distributed_c10d._rank_not_in_group(t._process_group):
        return t
    given = None if generator is torch.default_generator else generator
    if given is None:
        _C.agree_random(group_mesh(t._process_group, carrier_of(t._process_group, set()).type))
    state = generator.get_state()
    boxes = [(s.tensor.detach(), s.metadata.shard_offsets, s.metadata.shard_sizes) for s in t._local_shards if s.tensor.numel()]
    with torch.no_grad():
        # The same step for every shard, and for a rank that has no element.
        for tensor, offsets, sizes in boxes or [(torch.empty(0, dtype=t.dtype), [0], [0])]:
            whole = list(t.size()) if boxes else sizes
            generator.set_state(state)
            layout = _box_layout(offsets, sizes, whole, tensor.device.type)
            draw(_C.wrap(tensor, layout, whole, _C.strides_like(whole, tensor)), *args, generator=given, **kwargs)
    return t
