"""Runs scripts written for torch.distributed.tensor unchanged: torch's names then make ShardTensors."""

from __future__ import annotations

import importlib
import sys
from types import TracebackType
from typing import Any

from torch.distributed.tensor import DTensor

from shardtensor._late import first_use
from shardtensor.parallel import _accelerate, _transformers
from shardtensor.patches import dtensor
from shardtensor.tensor._tensor import ShardTensor

# torch's modules and the modules with the same names here; and names that are public in torch without being listed.
_MODULES = {
    "": "tensor._factories",
    ".device_mesh": "device_mesh",
    ".parallel": "parallel",
    ".experimental": "experimental",
    ".experimental._attention": "experimental._torch_names",
    ".debug": "debug",
    "._utils": "debug",
}
_UNLISTED = {".parallel": ("input_reshard",), "._utils": ("ExplicitRedistributionContext",)}


def _pairs() -> dict[int, tuple[Any, Any]]:
    """{id of torch's object: (torch's object, ours)}. DTensor and DeviceMesh stay: ours is a subclass, or the same."""
    out: dict[int, tuple[Any, Any]] = {}
    for name, room in _MODULES.items():
        stock = importlib.import_module(f"torch.distributed.tensor{name}")
        ours = importlib.import_module(f"shardtensor.{room}")
        for attribute in (*(getattr(stock, "__all__", ())), *_UNLISTED.get(name, ())):
            old, new = getattr(stock, attribute, None), getattr(ours, attribute, None)
            if old is not None and new is not None and new is not old and old is not DTensor:
                out[id(old)] = old, new
    return out


class Replacement:
    """The effect of replace_dtensor(). restore() undoes it, and so does leaving it as a context."""

    _count = 0
    _knows_libraries = False

    def __init__(self) -> None:
        first_use()
        if not Replacement._knows_libraries:
            Replacement._knows_libraries = True
            for library in (_transformers, _accelerate):
                library.install(lambda: Replacement._count > 0)
        self._undo: list[tuple[Any, str, Any]] = []
        pairs = _pairs()
        for module_name, module in list(sys.modules.items()):
            if module is None or module_name.split(".")[0] == "shardtensor":
                continue
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if id(value) in pairs and pairs[id(value)][0] is value:
                    self._set(module, name, pairs[id(value)][1])
        self._set(DTensor, "from_local", staticmethod(ShardTensor.from_local))
        Replacement._count += 1
        dtensor.make_everything_ours(True)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Gives torch's names their own functions back. Tensors that exist stay as they are."""
        if not self._undo:
            return
        for owner, name, value in reversed(self._undo):
            setattr(owner, name, value)
        self._undo.clear()
        Replacement._count -= 1
        dtensor.make_everything_ours(Replacement._count > 0)

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.restore()


def replace_dtensor() -> Replacement:
    """From now on torch.distributed.tensor's functions, in every module that has imported them, and torch's own tools (FSDP2,
    checkpoints, pipelines) make ShardTensors instead of DTensors. `isinstance(x, DTensor)` holds for these.

    Call it before the script builds its model, or run the script by `torchrun ... -m shardtensor script.py`. To undo it, call
    restore() on the result, or use the result as a context. Undo several calls in reverse order."""
    return Replacement()
