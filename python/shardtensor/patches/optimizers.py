"""torch.optim on the pieces. All versions.

An optimizer's step is elementwise, so it can run on every rank's piece and costs what it costs on plain tensors. torch's
optimizers pass lists of parameters, gradients and states to one function per algorithm. That function gets the pieces if all
tensors of an index have the same layout, and plain tensors as they are. Gradients in other layouts are first moved to it, once per
step; small ones in summands together. Other lists run on the ShardTensors, op by op.

In a graph (torch.compile) torch's own functions run on the ShardTensors, because the graph holds only pieces anyway.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.optim.optimizer import _foreach_supported_types as _optimizers_types

from shardtensor import _C
from shardtensor.patches._once import wrap_once
from shardtensor.tensor._layout import _SHARD
from shardtensor.tensor._tensor import ShardTensor

_ELEMENTWISE = ("adadelta", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd")


_SMALL = 2**18  # bytes of a gradient that is reduced together with others: copying it costs less than a collective
_TOGETHER = 2**24  # bytes of all of them

Lists = list[list[Any]]


def _on_pieces(step: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(step)
    def run(params: list[torch.Tensor], grads: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        if is_compiling() or ShardTensor not in set(map(type, params)) or kwargs.get("differentiable"):
            return step(params, grads, *args, **kwargs)
        scaled = kwargs.get("grad_scale") is not None  # then a fused step writes the unscaled gradients back
        given = [params, grads, *args]
        number = any(type(a) is ShardTensor for a in (*given, *kwargs.values()))  # pieces do not mix with it
        at = [i for i, a in enumerate(given) if type(a) is list]
        for i, changed in zip(at, _as_pieces([given[i] for i in at], scaled, number), strict=True):
            given[i] = changed
        try:
            return step(*given, **kwargs)
        except Exception as e:
            _C.failed_in_part("an optimizer's step", f"{type(e).__name__}: {e}")
            raise

    return run


def _as_pieces(lists: Lists, scaled: bool, number: bool) -> Lists:
    """The lists of parameters, gradients and states with pieces in place of ShardTensors, if that is possible; else with the gradients
    in the parameters' layouts, if that is possible. The indices of plain parameters stay as they are."""
    ours = [i for i, p in enumerate(lists[0]) if type(p) is ShardTensor]
    if len(ours) == len(lists[0]):
        return _all_as_pieces(lists, scaled, number)
    parts = [[a[i] for i in ours] if a else a for a in lists]
    merged = []
    for a, part, changed in zip(lists, parts, _all_as_pieces(parts, scaled, number), strict=True):
        if changed is not part:  # else it must stay the same list: SGD puts its first momentum there
            a = list(a)
            for i, t in zip(ours, changed, strict=bool(a)):
                if a:
                    a[i] = t
        merged.append(a)
    return merged


def _all_as_pieces(lists: Lists, scaled: bool, number: bool) -> Lists:
    read_only = -1 if scaled else 1
    pieces = None if number else _C.local_lists(lists, read_only)
    if pieces is None and not scaled:
        params, grads, *states = lists
        lists = [params, _C.laid_out_like(params, _reduced_together(params, grads)) or grads, *states]
        pieces = None if number else _C.local_lists(lists, read_only)
    return pieces or lists


def _reduced_together(params: list[torch.Tensor], grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients with the small ones that are summands of replicated parameters reduced. Each collective has as many as fit."""
    alike: dict[Any, list[int] | None] = {}  # None for what cannot be reduced so
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        if type(g) is not ShardTensor or not (have := _C.layout(g)).has_partial:
            continue
        want, dtype = _C.layout(p), g.dtype
        if (have, want, dtype) not in alike:
            reducible = want.is_replicated and have.mesh == want.mesh and not any(kind == _SHARD for kind, *_ in have.placements)
            alike[have, want, dtype] = [] if reducible else None
        indices = alike[have, want, dtype]
        if indices is not None and p.shape == g.shape and p.is_contiguous() and g.numel() * dtype.itemsize <= _SMALL:
            indices.append(i)
    grads = list(grads)
    for (have, want, dtype), indices in alike.items():
        most = _TOGETHER // dtype.itemsize
        while indices and len(indices) > 1:
            ends = list(itertools.accumulate(grads[i].numel() for i in indices))
            count = max(1, sum(end <= most for end in ends))
            part, indices = indices[:count], indices[count:]
            flat = torch.cat([_C.local(grads[i]).reshape(-1) for i in part])
            summed = _C.local(_C.redistribute(_C.wrap(flat, have, [len(flat)], [1]), want))
            shapes = [grads[i].shape for i in part]
            pieces: list[torch.Tensor] = summed.split([shape.numel() for shape in shapes])  # type: ignore[no-untyped-call]
            for i, piece, shape in zip(part, pieces, shapes, strict=True):
                grads[i] = _C.wrap(piece.view(shape), want, shape, params[i].stride())
    return grads


def install() -> None:
    """Wraps torch.optim's functions, and makes torch choose foreach as for plain tensors; once."""
    for name in _ELEMENTWISE:
        wrap_once(importlib.import_module(f"torch.optim.{name}"), name, _on_pieces)
    if ShardTensor not in _optimizers_types:
        _optimizers_types.append(ShardTensor)  # type: ignore[arg-type]
