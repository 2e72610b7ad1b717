"""torch._functorch._aot_autograd.runtime_wrappers: the code around a graph when it runs. All versions; seen in torch 2.15."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shardtensor import _C


def patch(wrappers: Any) -> None:
    wrappers.gen_alias_from_base = _with_our_aliases(wrappers.gen_alias_from_base)
    _look_through(wrappers)


def _with_our_aliases(torchs: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """If a result is a view of an input, torch takes the view again. torch adds the input's storage offset to the result's,
    which for ShardTensors already includes it; and torch does not handle views with another dtype."""

    def alias(base: torch.Tensor, like: torch.Tensor, requires_grad: bool, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not (_C.is_shard_tensor(base) and _C.is_shard_tensor(like)):
            return torchs(base, like, requires_grad, *args, **kwargs)
        bits = base if base.dtype == like.dtype else base.view(like.dtype)
        out = bits.as_strided(like.size(), like.stride(), like.storage_offset())
        if requires_grad:
            return out if out.requires_grad else out.requires_grad_()
        return out.detach()

    return alias


def _look_through(wrappers: Any) -> None:
    """torch's mode that checks aliases at a graph's first run lets subclasses handle their own calls. But for the dispatcher,
    ShardTensors with values are not subclasses, so nothing would run the op."""
    mode = getattr(wrappers, "_AnalyzeCustomOpInputOutputMode", None)
    if mode is None:
        return
    dispatch = mode.__torch_dispatch__

    def look(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(_C.is_shard_tensor(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)):
            return func(*args, **(kwargs or {}))
        return dispatch(self, func, types, args, kwargs)

    mode.__torch_dispatch__ = look

