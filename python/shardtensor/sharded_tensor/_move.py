"""The places of a ShardedTensor's boxes, what ranks must agree on before they communicate, and the one function that moves
data.

A rank knows the others only by a list of (global rank, offsets, sizes), made from the metadata and the same on every rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed.distributed_c10d import _get_default_group, _rank_not_in_group
from torch.distributed.remote_device import _remote_device

import shardtensor._C as _C
from shardtensor.tensor._mesh import group_mesh

Box = tuple[int, list[int], list[int]]
T = TypeVar("T")


# ---- groups and placements ----


def group_of(process_group: ProcessGroup | None) -> ProcessGroup:
    return process_group if process_group is not None else _get_default_group()


_loading_group: ProcessGroup | None = None


@contextmanager
def load_with_process_group(process_group: ProcessGroup) -> Iterator[ProcessGroup]:
    """Inside, unpickled ShardedTensors belong to this group, not to the default one."""
    global _loading_group
    if _loading_group is not None:
        raise RuntimeError('ProcessGroup already set by previous "load_with_process_group" context manager')
    _loading_group = process_group
    try:
        yield process_group
    finally:
        _loading_group = None


def _get_current_process_group() -> ProcessGroup:
    return group_of(_loading_group)


def require_member(group: ProcessGroup, who: str) -> None:
    if _rank_not_in_group(group):
        raise RuntimeError(f"{who}: rank {dist.get_rank()} is not in the process group; call it only on the group's ranks")


def place(group: ProcessGroup, placement: _remote_device | None) -> tuple[int, torch.device]:
    """The global rank and the device that a placement names."""
    if placement is None:
        raise ValueError("remote device is None")
    worker, rank = placement.worker_name(), placement.rank()
    if worker is not None:
        rank = _rank_of_worker(worker)
    elif rank is None:
        raise ValueError(f"placement {placement} names no rank, so no rank would hold the shard; use rank:R/{placement}")
    if not _rank_not_in_group(group) and rank not in (ranks := dist.get_process_group_ranks(group)):
        raise ValueError(f"Global rank {rank} does not exist in input process group: {ranks}")
    return rank, placement.device()


def _rank_of_worker(name: str) -> int:
    from torch.distributed import rpc  # noqa: PLC0415  slow

    if not rpc._is_current_rpc_agent_set():  # type: ignore[attr-defined]
        raise RuntimeError(f"RPC framework needs to be initialized for using worker names: {name}")
    workers = rpc._get_current_rpc_agent().get_worker_infos()  # type: ignore[attr-defined]
    ids = [worker.id for worker in workers if worker.name == name]
    if not ids:
        raise ValueError(f"Invalid worker name: {name}")
    return int(ids[0])


def boxes_of(shards: Sequence[ShardMetadata], group: ProcessGroup) -> list[Box]:
    return [(place(group, s.placement)[0], list(s.shard_offsets), list(s.shard_sizes)) for s in shards]


# ---- agreement ----


def attempt(function: Callable[..., T], *args: Any) -> tuple[T | None, Exception | None]:
    """The function's result, or its exception: for errors that the other ranks should raise too."""
    try:
        return function(*args), None
    except Exception as error:
        return None, error


def gather_values(value: Any, error: Exception | None, group: ProcessGroup) -> list[Any]:
    """Every rank's value, by group rank. If a rank has an error, all raise: that rank its own, the others the first error."""
    entry = (value, None if error is None else (type(error), str(error)))
    entries: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(entries, entry, group=group)
    if error is not None:
        raise error
    for group_rank, (_, failure) in enumerate(entries):
        if failure is not None:
            kind, text = failure
            raise kind(f"{text} (on rank {dist.get_global_rank(group, group_rank)})")
    return [value for value, _ in entries]


def agree(who: str, group: ProcessGroup, error: Exception | None = None, **same: Any) -> None:
    """Raises on all ranks if one has an error, or if arguments that must be the same differ. One small all-gather."""
    device = carrier_of(group, set())
    mesh = group_mesh(group, device.type)
    mine = torch.tensor([error is not None, zlib.crc32(repr(same).encode())], dtype=torch.int64, device=device)
    rows = _C.all_gather([torch.empty_like(mine) for _ in mesh.ranks], mine, mesh, 0)
    told = torch.stack(rows).tolist()
    if all(row == [0, told[0][1]] for row in told):
        return
    values = gather_values({name: repr(value) for name, value in same.items()}, error, group)
    for name, mine_ in values[dist.get_rank(group)].items():
        for group_rank, other in enumerate(values):
            if other[name] != mine_:
                rank = dist.get_global_rank(group, group_rank)
                raise ValueError(f"{who}: {name}={mine_} on rank: {dist.get_rank()} does not match with {name}={other[name]} on rank: {rank}")


def anywhere(flag: bool, group: ProcessGroup) -> bool:
    """Whether the flag is set on any rank of the group."""
    return bool(_C.max_over(group_mesh(group, carrier_of(group, set()).type), int(flag)))


# ---- data ----


def carrier_of(group: ProcessGroup, wanted: set[str]) -> torch.device:
    """The device from which data is sent: the tensors' own, if all have the same and the group supports it."""
    served = [device.type for device in group._device_types]
    kind = next(iter(wanted)) if len(wanted) == 1 and wanted <= set(served) else ("cpu" if "cpu" in served else served[0])
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def move(
    pieces: Sequence[torch.Tensor],
    held: Sequence[Box],
    wanted: Sequence[Box],
    group: ProcessGroup,
    dtype: torch.dtype,
    devices: set[str],
) -> list[torch.Tensor]:
    """This rank's boxes of `wanted`, from the ranks that hold their elements. `pieces`: this rank's boxes of `held`.

    `devices`: the types of all devices on which any rank has or wants a box, the same set on every rank.
    """
    carrier = carrier_of(group, devices)
    mesh = group_mesh(group, carrier.type)
    return _C.exchange_boxes([p.detach().to(carrier) for p in pieces], held, wanted, mesh, dtype, carrier)


class Move(torch.autograd.Function):
    """move() between two lists of boxes that hold each element once. The gradient moves back."""

    @staticmethod
    def forward(
        ctx: Any, held: list[Box], wanted: list[Box], group: ProcessGroup, devices: set[str], anchor: torch.Tensor, *pieces: torch.Tensor
    ) -> Any:
        """`anchor`, of the tensor's dtype, requires grad: for a rank without a piece that does."""
        ctx.way = held, wanted, group, devices
        ctx.like = [(p.dtype, p.device) for p in pieces]
        return tuple(move(pieces, held, wanted, group, anchor.dtype, devices))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        held, wanted, group, devices = ctx.way
        back = move(gradients, wanted, held, group, gradients[0].dtype, devices)
        return None, None, None, None, None, *(g.to(device, dtype) for g, (dtype, device) in zip(back, ctx.like, strict=True))
