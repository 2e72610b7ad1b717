"""The classes that benchmarks compare with shardtensor in one process: stock DTensor and PhysicsNeMo's ShardTensor."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.tensor import DTensor


@contextmanager
def making(cls: Any) -> Iterator[None]:
    """Inside, torch's own tools (FSDP2) make tensors of this class where they would make DTensors."""
    make = DTensor.__new__
    DTensor.__new__ = lambda _, *args, **kwargs: cls(*args, **kwargs)  # type: ignore[method-assign, assignment, return-value, misc]
    try:
        yield
    finally:
        DTensor.__new__ = make  # type: ignore[method-assign]


def import_shard_tensor() -> Any:
    """shardtensor's class. Leaves torch's own DTensor as it is."""
    engine: Any = DTensor._op_dispatcher
    attributes, handlers, make = set(vars(engine)), dict(engine._custom_op_handlers), DTensor.__new__
    cls = importlib.import_module("shardtensor").ShardTensor
    for name in set(vars(engine)) - attributes:
        delattr(engine, name)
    engine._custom_op_handlers.update(handlers)
    DTensor.__new__ = make
    return cls


def import_physicsnemo() -> tuple[Any, str]:
    """PhysicsNeMo's ShardTensor class; or None and the reason."""
    for module in ("physicsnemo.domain_parallel", "physicsnemo.distributed.shard_tensor"):  # version 2 and later; older versions
        try:
            return importlib.import_module(module).ShardTensor, ""
        except Exception as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            reason = "not installed" if missing == "physicsnemo" else f"cannot be imported: {first_line(error)}"
            if missing != module:
                break
    return None, reason


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
