"""torch._functorch._aot_autograd.runtime_wrappers: the code around a graph when it runs. All versions; seen in torch 2.15."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import shardtensor._C as _C
from shardtensor.patches._graphs import REFUSED, refuse
from shardtensor.patches._patch import Patch


def _counting_writes(post_compile: Callable[..., Any]) -> Callable[..., Any]:
    """A graph writes the pieces of its inputs. The writes are counted as in eager mode: on the piece before the graph runs, as torch
    counts them on the ShardTensor, since the graph may save the piece; for views and kept sums afterwards, since the values of a view
    that moved data are then copied into its base. Which inputs a graph writes is the same on all ranks."""

    @functools.wraps(post_compile)
    def counted(self: Any, compiled: Any, config: Any, *, runtime_metadata: Any) -> Any:
        run = post_compile(self, compiled, config, runtime_metadata=runtime_metadata)
        written = [i for i, info in enumerate(runtime_metadata.input_info) if info.mutates_data]
        if not written:
            return run
        in_graph = [i for i in written if runtime_metadata.input_info[i].mutation_type.name == "MUTATED_IN_GRAPH"]
        seen = set(runtime_metadata.mutated_graph_handled_indices_seen_by_autograd)

        @functools.wraps(run)
        def counting(args: list[Any]) -> Any:
            _check_apart(args, written)
            ours = [(i, args[i]) for i in in_graph if isinstance(args[i], torch.Tensor) and _C.is_shard_tensor(args[i])]
            for i, t in ours:
                if i in seen:
                    _C.count_on_piece(t)
            out = run(args)
            for _, t in ours:
                _C.note_write(t)
            return out

        return counting

    return counted


def _check_apart(args: list[Any], written: list[int]) -> None:
    """A graph does not know that its inputs are views of each other. Decided alike on all ranks."""
    if found := _C.overlapping(args, written):
        t, other = (args[i] for i in found)
        raise RuntimeError(
            f"shardtensor: a compiled function writes one of its arguments ({tuple(t.shape)}, {_C.layout(t)}), and takes another "
            f"({tuple(other.shape)}, {_C.layout(other)}) that is a view of it, or of the same memory. Take the view inside the "
            "function, or clone() it before the call"
        )


def _with_our_aliases(torchs: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """If a result is a view of an input, torch takes the view again. torch adds the input's storage offset to the result's,
    which for ShardTensors already includes it; and torch does not handle views with another dtype."""

    def alias(base: torch.Tensor, like: torch.Tensor, requires_grad: bool, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not (_C.is_shard_tensor(base) and _C.is_shard_tensor(like)):
            return torchs(base, like, requires_grad, *args, **kwargs)
        out = _seen_as(base, like)
        if requires_grad:
            return out if out.requires_grad else out.requires_grad_()
        return out.detach()

    return alias


def _seen_as(base: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The memory of `base` as a tensor like this. A view as a complex or a real dtype has a gradient, a view as another has none."""
    if like.is_complex() and base.dtype == like.dtype.to_real():
        if not _holds_pairs(base):
            sizes, strides = (*like.size(), 2), (*(2 * n for n in like.stride()), 1)
            return torch.view_as_complex(_strided(base, sizes, strides, 2 * int(like.storage_offset())))
        base = torch.view_as_complex(base.view(*base.shape[:-1], base.shape[-1] // 2, 2))
    elif base.is_complex() and like.dtype == base.dtype.to_real():
        base = torch.view_as_real(base)
    elif base.dtype != like.dtype:
        base = base.view(like.dtype)
    return _strided(base, tuple(like.size()), tuple(like.stride()), int(like.storage_offset()))


def _holds_pairs(t: torch.Tensor) -> bool:
    """Whether its last dim has pairs that are adjacent in memory."""
    return t.ndim > 0 and t.stride(-1) == 1 and not any(n % 2 for n in (t.size(-1), t.storage_offset(), *t.stride()[:-1]))


def _strided(t: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int) -> torch.Tensor:
    if (t.size(), t.stride(), t.storage_offset()) == (sizes, strides, offset):
        return t.view_as(t)  # the gradient of as_strided may gather
    return t.as_strided(sizes, strides, offset)


def _look_through(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """torch's mode that checks aliases at a graph's first run lets subclasses handle their own calls. But for the dispatcher,
    ShardTensors with values are not subclasses, so nothing would run the op."""

    def look(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(_C.is_shard_tensor(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)):
            return func(*args, **(kwargs or {}))
        return dispatch(self, func, types, args, kwargs)

    return look


_WRAPPERS = "torch._functorch._aot_autograd.runtime_wrappers"
PATCHES = (
    Patch(
        _WRAPPERS,
        "gen_alias_from_base",
        _with_our_aliases,
        why="a result that is a view of an input has the wrong storage offset, and must have the input's dtype.",
        ask="views that are taken again by their view functions, for subclasses too",
        without=REFUSED,
        turn_off=refuse,
    ),
    Patch(
        _WRAPPERS,
        "RuntimeWrapper.post_compile",
        _counting_writes,
        why="a graph writes the pieces of its inputs, without counting the writes on the tensors.",
        ask="a hook of subclasses before and after a graph that writes their inner tensors",
        without=REFUSED,
        turn_off=refuse,
    ),
    Patch(
        _WRAPPERS,
        "_AnalyzeCustomOpInputOutputMode.__torch_dispatch__",
        _look_through,
        why="the mode that looks for aliases lets subclasses run their ops; the dispatcher does not take ShardTensors for one.",
        ask="a call of the op in place of NotImplemented",
        without="torch's check of aliases at a graph's first run does not work with ShardTensors.",
    ),
)
