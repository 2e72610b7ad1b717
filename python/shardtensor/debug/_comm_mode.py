"""Collectives and their bytes by module, op, forward and backward."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import torch
from torch.distributed.tensor.debug import CommDebugMode as _Stock
from torch.utils._pytree import tree_leaves

import shardtensor._C as _C
from shardtensor.debug import _watch
from shardtensor.debug._text import in_bytes
from shardtensor.tensor._tensor import ShardTensor

# The names under which torch's mode counts them.
_PACKETS: dict[str, Any] = {
    "all_reduce": torch.ops.c10d_functional.all_reduce,
    "all_gather": torch.ops.c10d_functional.all_gather_into_tensor,
    "all_to_all": torch.ops._dtensor.shard_dim_alltoall,
    "reduce_scatter": torch.ops.c10d_functional.reduce_scatter_tensor,
    "broadcast": torch.ops.c10d_functional.broadcast,
    "scatter": torch.ops.c10d.scatter_,
}


class _Calls(int):
    """The number of calls, with the bytes that this rank contributed."""

    bytes = 0

    def __add__(self, other: int) -> _Calls:
        both = _Calls(int(self) + int(other))
        both.bytes = self.bytes + getattr(other, "bytes", 0)
        return both

    __radd__ = __add__

    def __str__(self) -> str:
        return f"{int(self)} ({in_bytes(self.bytes)})"


def _one(size: int) -> _Calls:
    call = _Calls(1)
    call.bytes = size
    return call


class CommDebugMode(_Stock):
    """Counts collectives, and the bytes that this rank contributes, within its context: in all, by module, by op, forward and
    backward. For ShardTensors it counts shardtensor's own calls, so an all-gather of uneven pieces is one, however many calls
    the backend needs. Stock DTensors' collectives and the user's own are counted as in torch's mode."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.comm_bytes: dict[Any, int] = defaultdict(int)
        self._operation: dict[str, Any] | None = None

    def get_comm_bytes(self) -> dict[Any, int]:
        """Bytes that this rank contributed, by collective; only those of ShardTensors."""
        return self.comm_bytes

    def __enter__(self) -> CommDebugMode:
        self.comm_bytes.clear()
        super().__enter__()  # type: ignore[no-untyped-call]
        _watch.calls.listen(self._hear)
        return self

    def __exit__(self, *error: Any) -> None:
        _watch.calls.forget(self._hear)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _hear(self, call: _watch.Call) -> None:
        packet = _PACKETS[call.kind]
        tracker = self.advanced_module_tracker
        direction = "backward" if tracker.is_bw else "forward"
        self.comm_counts[packet] += 1
        self.comm_bytes[packet] += call.bytes
        for module in {tracker.name, *tracker.module_parents_dict.get(tracker.name, ())}:
            counts = self.comm_module_counts.setdefault(module, {"forward": defaultdict(int), "backward": defaultdict(int)})[direction]
            counts[packet] = counts.get(packet, 0) + _one(call.bytes)
        if self._operation is not None:
            self._operation["collectives"].append((call.kind, call.bytes))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _C.is_calling():  # a process group's op, which is already counted
            return func(*args, **(kwargs or {}))
        ours = [a for a in tree_leaves(args) if isinstance(a, ShardTensor)]
        if not ours or isinstance(func, torch._ops.HigherOrderOperator):
            return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        tracker = self.advanced_module_tracker
        operation = {
            "name": func,
            "input_shape": [t.shape for t in ours],
            "input_sharding": [t.placements for t in ours],
            "device_mesh": str(ours[-1].device_mesh),
            "is_bw": tracker.is_bw,
            "is_activation_checkpointing": tracker.activation_checkpointing,
            "collectives": [],
        }
        listed = self.comm_module_operation_counts.setdefault(tracker.name, {"operations_list": []})
        listed["operations_list"].append(operation)
        before, self._operation = self._operation, operation
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._operation = before

    def generate_json_dump(self, file_name: str = "comm_mode_log.json", noise_level: int = 3) -> None:
        """Writes torch's file, with bytes beside the counts."""
        super().generate_json_dump(file_name, noise_level)  # type: ignore[no-untyped-call]
        with open(file_name) as file:
            root = json.load(file)
        modules = [root]
        while modules:
            module = modules.pop()
            modules += module["children"]
            for direction, counts in self.comm_module_counts.get(module["fqn"], {}).items():
                module[f"bytes_{direction}"] = [(str(packet), getattr(n, "bytes", 0)) for packet, n in counts.items()]
        with open(file_name, "w") as file:
            json.dump(root, file, indent=4)
