"""The stock DTensor beside shardtensor: what shardtensor lays into torch's engine at import is taken out again."""

from __future__ import annotations

import importlib
from typing import Any

from torch.distributed.tensor import DTensor


def import_shard_tensor() -> Any:
    """The ShardTensor class, with torch's own engine left as it was."""
    engine: Any = DTensor._op_dispatcher
    attributes, handlers, make = set(vars(engine)), dict(engine._custom_op_handlers), DTensor.__new__
    cls = importlib.import_module("shardtensor").ShardTensor
    for name in set(vars(engine)) - attributes:
        delattr(engine, name)
    engine._custom_op_handlers.update(handlers)
    DTensor.__new__ = make
    return cls
