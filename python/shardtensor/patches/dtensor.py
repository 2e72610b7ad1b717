"""torch.distributed.tensor's DTensor and its engine: calls with both stock DTensors and ShardTensors. All versions.

A stock DTensor carries the Python key, so torch's own engine gets such a call first and mistakes a ShardTensor for a DTensor.
A ShardTensorSpec never equals a stock spec, so the engine's caches miss and its slow path runs. The slow path is wrapped here:
it turns the stock DTensors into ShardTensors, without a copy, and calls the op again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils._pytree as pytree
from torch.distributed.tensor import DTensor

import shardtensor._C as _C
from shardtensor.patches._patch import Patch
from shardtensor.tensor._layout import make_layout
from shardtensor.tensor._tensor import ShardTensor, ShardTensorSpec


def _promote(value: Any) -> Any:
    if isinstance(value, DTensor) and not isinstance(value, ShardTensor):
        spec = value._spec
        layout = make_layout(spec.mesh, spec.placements, value.ndim, who="a DTensor among ShardTensors")
        return _C.wrap(value._local_tensor, layout, list(value.shape), list(value.stride()))
    return value


def _is_mixed(leaves: list[Any]) -> bool:
    return any(isinstance(t, ShardTensor) for t in leaves)


def _again(op: Any, leaves: list[Any], tree: Any) -> Any:
    args, kwargs = pytree.tree_unflatten([_promote(t) for t in leaves], tree)
    if any(isinstance(t, ShardTensor) and _C.is_traced(t) for t in leaves):  # torch 2.11 also sends these to its engine
        return ShardTensor.__torch_dispatch__(op, (), args, kwargs)
    return op(*args, **kwargs)


_everything = False


def make_everything_ours(on: bool) -> None:
    """Sets whether every new DTensor becomes a ShardTensor."""
    global _everything
    _everything = on


def _for_dtensors(slow: Callable[..., Any]) -> Callable[..., Any]:
    def slow_path(op: Any, args: Any, kwargs: Any, *rest: Any) -> Any:
        leaves, tree = pytree.tree_flatten((args, kwargs or {}))
        return _again(op, leaves, tree) if _is_mixed(leaves) else slow(op, args, kwargs, *rest)

    return slow_path


def _handlers_for_dtensors(handlers: dict[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    def guarded(handler: Callable[..., Any]) -> Callable[..., Any]:
        def call(op: Any, args: Any, kwargs: Any) -> Any:
            leaves, tree = pytree.tree_flatten((args, kwargs or {}))
            return _again(op, leaves, tree) if _is_mixed(leaves) else handler(op, args, kwargs)

        return call

    for op, handler in list(handlers.items()):
        handlers[op] = guarded(handler)
    return handlers


def _ours_by_spec(make: Callable[..., DTensor]) -> Callable[..., DTensor]:
    def new(cls: type[DTensor], *args: Any, **kwargs: Any) -> DTensor:
        """torch's own tools (FSDP2) build a DTensor from a parameter's spec. Our spec makes a ShardTensor."""
        spec = args[1] if len(args) > 1 else kwargs.get("spec")
        ours = _everything or isinstance(spec, ShardTensorSpec)
        return ShardTensor(*args, **kwargs) if ours else make(cls, *args, **kwargs)

    return new


PATCHES = (
    Patch(
        "torch.distributed.tensor",
        "DTensor.__new__",
        _ours_by_spec,
        why="torch's own tools make a DTensor from a parameter's spec, which must become a ShardTensor if the spec is ours.",
        ask="a spec that names the class of its tensors",
    ),
    Patch(
        "torch.distributed.tensor",
        "DTensor._op_dispatcher._propagate_op_sharding_dispatch_slow_path",
        _for_dtensors,
        why="the engine of stock DTensors gets calls with ShardTensors among them, and would take them for DTensors.",
        ask="an engine that returns NotImplemented for subclasses of DTensor",
    ),
    Patch(
        "torch.distributed.tensor",
        "DTensor._op_dispatcher._custom_op_handlers",
        _handlers_for_dtensors,
        why="the handlers in this table get such calls as well.",
        ask="the same",
    ),
)
