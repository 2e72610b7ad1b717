"""torch.optim on the pieces. All versions.

An optimizer's step is elementwise, so it can run on every rank's piece and costs what it costs on plain tensors. torch's
optimizers pass lists of parameters, gradients and states to one function per algorithm. That function gets the pieces if all
tensors of an index have the same layout, and plain tensors as they are. Gradients in other layouts are first moved to it, together,
once per step. Other lists run on the ShardTensors, op by op.

In a graph (torch.compile) torch's own functions run on the ShardTensors, because the graph holds only pieces anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.optim.optimizer import Optimizer

import shardtensor._C as _C
from shardtensor.patches._patch import Patch
from shardtensor.patches.clipping import take_foreach
from shardtensor.tensor._modes import get_promotion_mode, implicit_replication, promotion_mode
from shardtensor.tensor._tensor import ShardTensor

_ELEMENTWISE = ("adadelta", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd")

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
        except BaseException as e:
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
        lists = [params, _C.laid_out_like(params, grads) or grads, *states]
        pieces = None if number else _C.local_lists(lists, read_only)
    return pieces or lists


def _with_own_state(step: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer's step, in which plain tensors (identity matrices, vectors of numbers) count as replicated: all ranks make them
    alike. Not if it also has plain parameters, whose gradients may differ between ranks. The closure keeps the caller's mode: it
    runs the model."""

    @functools.wraps(step)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not _only_ours(self):
            return step(self, *args, **kwargs)
        outside = get_promotion_mode()

        def as_before(closure: Any) -> Any:
            def call() -> Any:
                with promotion_mode(outside):
                    return closure()

            return call if callable(closure) else closure

        if args:
            args = as_before(args[0]), *args[1:]
        if "closure" in kwargs:
            kwargs["closure"] = as_before(kwargs["closure"])
        with implicit_replication():
            return step(self, *args, **kwargs)

    return run


def _only_ours(optimizer: Any) -> bool:
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim.") and kind.__name__.lower() in _ELEMENTWISE:  # their state has the parameters' layouts
        return False
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return bool(held) and all(isinstance(p, ShardTensor) for p in held)


def _wrap_steps(profile_hook_step: Callable[..., Any]) -> Any:
    """torch calls it with a class's step when the class makes its first optimizer. Steps of classes that have made one are wrapped here."""
    classes: list[type] = [Optimizer]
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        step = vars(cls).get("step")
        if hasattr(step, "hooked"):
            cls.step = _with_own_state(step)  # type: ignore[attr-defined, arg-type]

    @functools.wraps(profile_hook_step)
    def wrap(step: Callable[..., Any]) -> Any:
        return profile_hook_step(_with_own_state(step))

    return staticmethod(wrap)


PATCHES = (
    Patch(
        "torch.optim.optimizer",
        "Optimizer.profile_hook_step",
        _wrap_steps,
        why="optimizers make plain tensors in their steps (identity matrices, numbers), alike on all ranks.",
        ask="a hook around the step that sees the optimizer",
        without="Optimizers other than torch's elementwise ones run under shardtensor.implicit_replication().",
    ),
    *(
        Patch(
            f"torch.optim.{name}",
            name,
            _on_pieces,
            why="an elementwise step runs on the pieces, at the cost of plain tensors.",
            ask="lists of inner tensors in place of wrapper subclasses that agree on their layout",
            without="Its steps run op by op on ShardTensors, which is slower.",
        )
        for name in _ELEMENTWISE
    ),
    Patch(
        "torch.optim.optimizer",
        "_foreach_supported_types",
        take_foreach,
        why="torch uses its foreach functions only for types in this list.",
        ask="a public way to register a type",
        without="Optimizers call each op once per parameter.",
    ),
)
