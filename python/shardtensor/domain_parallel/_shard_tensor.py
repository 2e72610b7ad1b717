"""The class ShardTensor with PhysicsNeMo's defaults."""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from shardtensor.tensor import _modes, _tensor
from shardtensor.tensor._from_local import Shapes
from shardtensor.tensor._mesh import given_mesh


class TensorPromotionMode(enum.Enum):
    """What happens to a plain tensor among ShardTensors: it raises, or counts as replicated, with a warning or without one."""

    DISABLED = "disabled"
    WARN = "warn"
    SILENT = "silent"


_OURS: dict[TensorPromotionMode, _modes.Mode] = {
    TensorPromotionMode.DISABLED: "error",
    TensorPromotionMode.WARN: "warn",
    TensorPromotionMode.SILENT: "replicate",
}
_THEIRS = {ours: theirs for theirs, ours in _OURS.items()}


class _Kind(abc.ABCMeta, type(_tensor.ShardTensor)):  # type: ignore[misc]
    """ABCMeta's way to have other classes' objects as instances is the one that torch.compile knows."""


class ShardTensor(_tensor.ShardTensor, metaclass=_Kind):  # type: ignore[metaclass]
    """shardtensor.ShardTensor, with the defaults and the promotion modes of PhysicsNeMo's class. What it makes are
    shardtensor.ShardTensors; all of these are its instances."""

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        return issubclass(other, _tensor.ShardTensor) or NotImplemented if cls is ShardTensor else NotImplemented

    @staticmethod
    def from_local(  # type: ignore[override]
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        sharding_shapes: Shapes = "infer",
        global_shape: Sequence[int] | None = None,
        **options: Any,
    ) -> _tensor.ShardTensor:
        """A ShardTensor from this rank's piece, which first moves to the kind of device of the mesh. By default the ranks exchange the
        sizes of their pieces."""
        mesh = given_mesh(device_mesh, "ShardTensor.from_local")
        if isinstance(local_tensor, torch.Tensor) and not local_tensor.is_meta and local_tensor.device.type != mesh.device_type:
            local_tensor = local_tensor.to(mesh.device_type)
        return _tensor.ShardTensor.from_local(local_tensor, mesh, placements, sharding_shapes, global_shape, **options)

    @classmethod
    def patches_enabled(cls) -> bool:
        """True: handlers work from the start."""
        return True

    @classmethod
    def get_promotion_mode(cls) -> TensorPromotionMode:
        """What happens to plain tensors among ShardTensors."""
        return _THEIRS[_modes.get_promotion_mode()]

    @classmethod
    def set_promotion_mode(cls, mode: TensorPromotionMode | str) -> None:
        """Sets it, for all threads: a mode or its name."""
        _modes.set_promotion_mode(_OURS[TensorPromotionMode(mode)])

    @classmethod
    @contextmanager
    def promotion_mode(cls, mode: TensorPromotionMode | str) -> Iterator[None]:
        """Sets it inside, for this thread."""
        with _modes.promotion_mode(_OURS[TensorPromotionMode(mode)]):
            yield

    @staticmethod
    def register_function_handler(func: Callable[..., Any], handler: Callable[..., Any]) -> None:
        """From now on handler(func, types, args, kwargs) runs a Python-level function on ShardTensors. Plain tensors among the
        arguments arrive as replicated ShardTensors, if the promotion mode allows."""
        _tensor.ShardTensor.register_function_handler(func, _with_promoted(handler))

    @staticmethod
    def register_named_function_handler(name: str, handler: Callable[..., Any]) -> None:
        """The same for an op of torch.library by its name, "module.op.default", even before it is defined."""
        _tensor.ShardTensor.register_named_function_handler(name, handler if "::" in name else _with_promoted(handler))


def _with_promoted(handler: Callable[..., Any]) -> Callable[..., Any]:
    def promoted(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if _modes.get_promotion_mode() != "error":
            first = next((a for a in (*args, *kwargs.values()) if isinstance(a, DTensor)), None)
            if first is not None:
                mesh = first.device_mesh
                args = tuple(_promoted(a, mesh) for a in args)
                kwargs = {name: _promoted(a, mesh) for name, a in kwargs.items()}
        return handler(func, types, args, kwargs)

    return promoted


def _promoted(value: Any, mesh: DeviceMesh) -> Any:
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or not (value.ndim or value.requires_grad):
        return value
    return _tensor.ShardTensor.from_local(value, mesh, None)
