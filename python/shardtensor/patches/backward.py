"""torch.autograd: a backward that fails on one rank alone, in a user's hook for example, leaves the other ranks in its
collectives. torch.autograd.grad: its result for a leaf has the leaf's cuts, like .grad. Compiled autograd, which cannot hold the
layouts that our nodes save: the engine runs the backward of ShardTensors. All versions."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

import shardtensor._C as _C
from shardtensor.patches._patch import Patch
from shardtensor.tensor._tensor import ShardTensor


def _with_cuts(gradients: Any, inputs: Any) -> Any:
    if not inputs or not isinstance(gradients, tuple) or len(gradients) != len(inputs):
        return gradients  # of backward()
    leaves = (t if isinstance(t, ShardTensor) and t.is_leaf else None for t in inputs)
    return tuple(g if t is None or g is None else _C.with_cuts_of(t, g) for t, g in zip(leaves, gradients, strict=True))


def _compiled_autograd() -> Any:
    """torch's module, if it has been imported and is on."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled if compiled is not None and compiled.compiled_autograd_enabled else None


def _warn_of_compiled_autograd() -> None:
    warnings.warn(
        "shardtensor: compiled autograd cannot trace the backward of ShardTensors; torch's engine runs it instead, with the same "
        "gradients. To compile the backward, compile the forward (torch.compile) without compiled autograd",
        stacklevel=4,
    )


def _reaches_ours(roots: Any) -> bool:
    """Whether a ShardTensor is among the leaves of these tensors' graph, or one of our nodes in it."""
    tensors: Iterable[Any] = (roots,) if isinstance(roots, torch.Tensor) else roots
    waiting = [node for t in tensors for node in (getattr(t, "grad_fn", t),) if node is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if isinstance(getattr(node, "variable", None), ShardTensor) or "shardtensor::" in node.name():
            return True
        new = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= new
        waiting += new
    return False


def _telling(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        try:
            compiled = _compiled_autograd()
            if compiled is not None and _reaches_ours(args[0] if args else kwargs.get("t_outputs", ())):
                _warn_of_compiled_autograd()
                with compiled._disable():
                    gradients = run(*args, **kwargs)
            else:
                gradients = run(*args, **kwargs)
            return _with_cuts(gradients, args[4] if len(args) > 4 else kwargs.get("inputs"))
        except BaseException as e:
            _C.failed_in_part("backward", f"{type(e).__name__}: {e}")
            raise

    return run_backward


PATCHES = (
    Patch(
        "torch.autograd.graph",
        "_engine_run_backward",
        _telling,
        why="a backward that fails on one rank tells the others; gradients of leaves get the leaves' cuts; compiled autograd is kept away.",
        ask="hooks around a backward, and a way for a node to say that compiled autograd cannot trace it",
        by_name=True,
    ),
)
