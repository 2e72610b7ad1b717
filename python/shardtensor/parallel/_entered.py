"""Plain tensors that several modules take, such as the input of q, k and v: they enter as one ShardTensor.

Each module's gradient is a summand. Autograd adds up the gradients of one ShardTensor on each rank, and reduces their sum once.
Which tensors are shared depends on the order of calls alone, not on what the garbage collector has freed: it is the same on all
ranks.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Replicate

import shardtensor._C as _C
from shardtensor.tensor import _compile
from shardtensor.tensor._layout import make_layout
from shardtensor.tensor._mesh import as_device_mesh
from shardtensor.tensor._tensor import ShardTensor

_MOST = 8  # how many tensors a thread remembers: decoder layers read the encoder's output by turns with others


class _Plain(weakref.ref):  # type: ignore[type-arg]
    """A plain tensor, its state when it entered, and its ShardTensor while the plain tensor is alive."""

    __slots__ = ("node", "tensor", "version")
    node: Any  # its grad_fn
    version: int
    tensor: ShardTensor | weakref.ref[ShardTensor] | None

    def still(self, value: torch.Tensor, layout: _C.Layout) -> ShardTensor | None:
        """The ShardTensor, if it stands for `value` as it is now: neither was written, and nobody replaced `value.data`."""
        held = self.tensor
        tensor = held() if isinstance(held, weakref.ref) else held
        if (
            tensor is None
            or self.node is not value.grad_fn
            or self.version != value._version
            or tensor._version
            or _C.layout(tensor) != layout
            or _memory(_C.local(tensor)) != _memory(value)
        ):
            return None
        return tensor if tensor is held else _kept_by_users(tensor)


class _Recent(threading.local):
    """The plain tensors that entered last on this thread, the newest last. Threads must not depend on each other's order."""

    def __init__(self) -> None:
        self.plain: list[_Plain] = []


_recent = _Recent()


def can_share(value: Any) -> bool:
    """Only a gradient makes it worth while. In a graph, dynamo would have to trace this file."""
    return (
        type(value) is torch.Tensor and value.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    )


class Entrance:
    """Lets plain tensors enter a mesh as replicated ShardTensors."""

    __slots__ = ("layout",)

    def __init__(self, mesh: DeviceMesh) -> None:
        self.layout = make_layout(mesh, (Replicate(),), None, who="a parallel style")

    def enter(self, value: torch.Tensor) -> ShardTensor:
        """ShardTensor.from_local(value, mesh, [Replicate()]), if can_share(value). Returns the same ShardTensor until `value`
        is written or many others have entered."""
        layout, recent = self.layout, _recent.plain
        for i in range(len(recent) - 1, -1, -1):
            if recent[i]() is value:
                plain = recent.pop(i)
                shared = plain.still(value, layout)
                if shared is not None:
                    recent.append(plain)
                    return shared
                break
        if not layout.mesh.has_this_rank or torch._C._functorch.is_functorch_wrapped_tensor(value):
            return ShardTensor.from_local(value, as_device_mesh(layout.mesh), (Replicate(),))
        tensor = _C.from_local(value, layout)
        plain = _Plain(value, _forget)
        plain.node, plain.version = value.grad_fn, value._version
        recent.append(plain)
        del recent[:-_MOST]
        if plain.node is not None:
            plain.tensor = tensor  # costs no memory: its piece shares `value`'s
            return tensor
        # A leaf. A strong reference would keep it alive: tensor -> its node -> AccumulateGrad -> leaf. The users' nodes keep `tensor`.
        plain.tensor = weakref.ref(tensor)
        return _kept_by_users(tensor)


def enter_in_graph(value: torch.Tensor, mesh: DeviceMesh) -> ShardTensor:
    """The same while a graph is traced: modules that take the same tensor of the graph get one ShardTensor."""
    if type(value) is FunctionalTensor and value.requires_grad and torch.is_grad_enabled():
        return Entrance(mesh).enter(value)
    return ShardTensor.from_local(value, mesh, (Replicate(),))


_compile.in_graph(enter_in_graph)


def _memory(t: torch.Tensor) -> tuple[Any, ...]:
    """Without an op: modes must not see one (selective checkpoints expect the recomputation to call the same ops)."""
    return 0 if type(t) is FunctionalTensor else t.data_ptr(), t.shape, t.stride(), t.dtype


def _kept_by_users(tensor: ShardTensor) -> ShardTensor:
    """A view. Its node, which is alive as long as a graph uses the view, keeps `tensor`."""
    view = tensor.view_as(tensor)
    kept: Any = view.grad_fn.metadata  # type: ignore[union-attr]
    kept["shardtensor"] = tensor
    return view  # type: ignore[return-value]


def _forget(plain: _Plain) -> None:
    plain.tensor = plain.node = None
