"""RRefs to the other ranks' shards: every rank sends its own to all others, by RPC."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.distributed._shard.sharded_tensor.shard import Shard

_lock = threading.Lock()
_next_id = 0
_sharded_tensor_map: dict[int, weakref.ReferenceType[Any]] = {}


def share(tensor: Any) -> None:
    """Must be called by all RPC workers, in the same order as for their other ShardedTensors."""
    if not rpc._is_current_rpc_agent_set():  # type: ignore[attr-defined]
        raise RuntimeError(
            "RPC Framework needs to be initialized using torch.distributed.rpc.init_rpc if init_rrefs is set to True"
        )
    me = rpc.get_worker_info().id
    if dist.get_rank() != me:
        raise ValueError(
            "Default ProcessGroup and RPC ranks must be the same for ShardedTensor, found process group rank: "
            f"{dist.get_rank()} and RPC rank: {me}"
        )
    ids: dict[str, int] = rpc.api._all_gather(_register(tensor))
    sent = []
    for worker in rpc._get_current_rpc_agent().get_worker_infos():  # type: ignore[attr-defined]
        if worker.id != me and tensor._local_shards:
            rrefs = [rpc.RRef(shard) for shard in tensor._local_shards]
            sent.append(rpc.rpc_async(worker.name, _receive, args=(ids[worker.name], rrefs, me)))
    torch.futures.wait_all(sent)
    rpc.api._all_gather(None)  # no rank goes on before it has them all


def _register(tensor: Any) -> int:
    global _next_id
    with _lock:
        number, _next_id = _next_id, _next_id + 1
        tensor._sharded_tensor_id = number
        _sharded_tensor_map[number] = weakref.ref(tensor, lambda _: _sharded_tensor_map.pop(number, None))
        return number


def _receive(tensor_id: int, rrefs: list[rpc.RRef[Shard]], rank: int) -> Any:
    with _lock:
        found = _sharded_tensor_map.get(tensor_id)
    tensor = None if found is None else found()
    if tensor is None:
        raise RuntimeError(f"Could not find sharded_tensor_id: {tensor_id} in map: {_sharded_tensor_map.keys()}")
    tensor._remote_shards[rank] = rrefs
