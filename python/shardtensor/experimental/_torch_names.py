"""torch's private names for context parallelism (torch.distributed.tensor.experimental._attention), for replace_dtensor().

torch puts the positions in an order of its own (`_context_parallel_shard`), calls the pieces DTensors cut along the sequence, and
has DTensor's engine call a ring that knows the order. ShardTensors do not ask that engine: to them the order is the natural one.
So here the order is kept, and attention goes to our ring. FlexAttention stays torch's: it gathers plain tensors.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.experimental import _attention as stock

from shardtensor.experimental._context_parallel import (
    _attention,
    _Inside,
    _refuse,
    _served,
    context_parallel,
    context_parallel_unshard,
    set_rotate_method,
)
from shardtensor.experimental._ring import SEQUENCE, Plan, Run, make_plan
from shardtensor.tensor._mesh import as_mesh
from shardtensor.tensor._tensor import ShardTensor

__all__ = [
    "_ContextParallel",
    "_context_parallel_shard",
    "_disable_context_parallel_dispatcher",
    "_enable_context_parallel_dispatcher",
    "context_parallel",
    "context_parallel_unshard",
    "set_rotate_method",
]

_shard = stock._context_parallel_shard


@dataclass
class _Order:
    """The positions that each rank of a mesh holds."""

    length: int
    runs: tuple[tuple[Run, ...], ...] | None  # None: the sequences of a batch have different orders
    calls: int = 0  # of attention so far

    @property
    def is_natural(self) -> bool:
        runs = [run for own in self.runs or () for run in own]
        ends = [0, *(run.stop for run in runs[:-1])]
        return self.runs is not None and all(run.document == 0 and run.start == end for run, end in zip(runs, ends, strict=True))

    def inside(self, mesh: DeviceMesh) -> _Inside:
        if self.runs is None:
            raise NotImplementedError(
                "_context_parallel_shard: the load balancer orders the sequences of a batch differently; scaled_dot_product_attention needs "
                f"one order for all. Use FlexAttention or _HeadTailLoadBalancer (rank {as_mesh(mesh).rank})"
            )
        return _Inside(Plan(mesh, self.length, self.runs), self.calls)


_orders: dict[tuple[int, ...], _Order] = {}  # of the last call of _context_parallel_shard, by the mesh's ranks


def _order_of(length: int, ranks: int, balancer: Any) -> _Order:
    """As torch cuts it: by torch.chunk, after `balancer` has put it in order."""
    found = None if balancer is None else balancer._generate_indices()
    rows = torch.arange(length).unsqueeze(0) if found is None else found.reshape(-1, length).long().cpu()
    documents = {tuple(row) for row in getattr(balancer, "seq_length_per_doc", ())} or {(length,)}
    if len(documents) > 1 or not bool((rows == rows[0]).all()):
        return _Order(length, None)
    ends = torch.tensor(documents.pop()).cumsum(0)
    owner = torch.searchsorted(ends, rows[0], right=True)
    chunk = max(1, -(-length // ranks))
    # A run ends where the next position is another, in another document or at another rank.
    starts = torch.ones(length, dtype=torch.bool)
    starts[1:] = (rows[0].diff() != 1) | (owner.diff() != 0) | (torch.arange(1, length) % chunk == 0)
    first = starts.nonzero().flatten().tolist()
    runs: list[list[Run]] = [[] for _ in range(ranks)]
    for at, end in zip(first, [*first[1:], length], strict=True):
        start = int(rows[0][at])
        runs[at // chunk].append(Run(start, start + end - at, int(owner[at])))
    return _Order(length, tuple(map(tuple, runs)))


def _context_parallel_shard(mesh: DeviceMesh, buffers: Any, seq_dims: Any, load_balancer: Any = None) -> Any:
    """torch's, which also notes the order of the positions for attention."""
    out = _shard(mesh, buffers, seq_dims, load_balancer)
    dims = torch.utils._pytree.tree_leaves(seq_dims)
    leaves = torch.utils._pytree.tree_leaves(buffers, is_leaf=lambda b: isinstance(b, torch.nn.attention.flex_attention.BlockMask))
    lengths = {t.size(d) for t, d in zip(leaves, dims, strict=True) if isinstance(t, torch.Tensor)}
    if len(lengths) > 1:
        raise ValueError(f"_context_parallel_shard: argument 'buffers': sequences of different lengths, {sorted(lengths)}")
    for length in lengths:
        if type(load_balancer) is stock._HeadTailLoadBalancer:
            order = _Order(length, make_plan(mesh, length, True, None).runs)  # without reading indices from a device
        else:
            order = _order_of(length, mesh.size(), load_balancer)
        _orders[tuple(as_mesh(mesh).ranks)] = order
    return out


# ---- a module that calls scaled_dot_product_attention ----


class _Entered(threading.local):
    def __init__(self) -> None:
        self.stack: list[tuple[ExitStack, _Order, _Inside]] = []


_entered = _Entered()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _enter(module: nn.Module, args: Any, mesh: DeviceMesh) -> None:
    order = _orders.get(tuple(as_mesh(mesh).ranks))
    if order is None:
        raise RuntimeError(
            "_ContextParallel: the order of the sequence's positions on the ranks is unknown; call _context_parallel_shard on "
            f"the inputs first (rank {as_mesh(mesh).rank})"
        )
    inside, stack = order.inside(mesh), ExitStack()
    stack.enter_context(_served(inside, True))
    _entered.stack.append((stack, order, inside))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _leave(module: nn.Module, args: Any, out: Any) -> None:
    if not _entered.stack:  # _enter has raised
        return
    stack, order, inside = _entered.stack.pop()
    stack.close()
    if inside.calls == order.calls and out is not None:
        _refuse("scaled_dot_product_attention was not called inside, so the module's attention")
    order.calls = inside.calls


class _ContextParallel(stock._ContextParallel):
    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if self.attention_type != self.AttentionType.SDPA:
            return super()._apply(module, mesh)
        if self.seq_dim != SEQUENCE:
            raise NotImplementedError(f"_ContextParallel: argument 'seq_dim' is {self.seq_dim}; scaled_dot_product_attention needs {SEQUENCE}")

        def enter(module: nn.Module, args: Any) -> None:
            _enter(module, args, mesh)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(_leave, always_call=True)
        return module


# ---- scaled_dot_product_attention of ShardTensors ----

_stock_attention: Callable[..., torch.Tensor] = F.scaled_dot_product_attention


def _reordered(t: Any) -> tuple[_Order, int] | None:
    """The order of a ShardTensor's positions if it is not the natural one, and the mesh dim that cuts them."""
    layout = t._layout
    whole = torch.tensor(layout.mesh.ranks).reshape(layout.mesh.shape)
    for m, placement in enumerate(t.placements):
        if isinstance(placement, Shard) and placement.dim == SEQUENCE:
            at = [slice(None) if k == m else c for k, c in enumerate(layout.mesh.coordinate)]
            order = _orders.get(tuple(whole[tuple(at)].tolist()))
            if order is not None and not order.is_natural:
                return order, m
    return None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _of_shard_tensors(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    found = [_reordered(t) for t in (query, key, value) if isinstance(t, ShardTensor) and t.ndim == 4]
    order = next((f for f in found if f is not None), None)
    if order is None:
        return _stock_attention(query, key, value, *args, **kwargs)
    mesh = query.device_mesh
    if mesh.ndim != 1 or found != [order] * 3:
        raise NotImplementedError(
            "scaled_dot_product_attention: _context_parallel_shard has put the positions in an order of its own, so query, key and value must "
            f"be ShardTensors of the 1-d mesh of that call, all [Shard(2)], not {[getattr(t, '_layout', 'plain') for t in (query, key, value)]} "
            f"(rank {as_mesh(mesh).rank})"
        )
    inside = order[0].inside(mesh)
    out = _attention(inside, query.to_local(), key.to_local(), value.to_local(), *args, **kwargs)
    order[0].calls = inside.calls
    return ShardTensor.from_local(out, mesh, [Shard(SEQUENCE)], sharding_shapes={0: inside.plan.lengths()})


def _routed(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    ours = isinstance(query, ShardTensor) or isinstance(key, ShardTensor) or isinstance(value, ShardTensor)
    return (_of_shard_tensors if ours else _stock_attention)(query, key, value, *args, **kwargs)


def _switch(old: Any, new: Any) -> None:
    for module_name, module in list(sys.modules.items()):
        if module_name != "torch.nn.functional" and module_name.split(".")[0] in ("torch", "shardtensor"):
            continue
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is old:
                setattr(module, name, new)


def _enable_context_parallel_dispatcher() -> None:
    """scaled_dot_product_attention of ShardTensors asks for the order of the positions."""
    _switch(_stock_attention, _routed)


def _disable_context_parallel_dispatcher() -> None:
    _switch(_routed, _stock_attention)
