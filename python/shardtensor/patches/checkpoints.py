"""torch.distributed.checkpoint, and the state dicts of torch.distributed._state_dict_utils beneath it. All versions.

Some of torch's code looks only at placements, as if all cuts were even, or moves one tensor at a time. It is wrapped here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map

import shardtensor._C as _C
from shardtensor.patches._patch import Patch
from shardtensor.shards._shards import in_places_of, wrapper_of
from shardtensor.tensor._many import redistribute
from shardtensor.tensor._mesh import device_of
from shardtensor.tensor._pieces import _nothing_of, _piece, _refuse_summands, holds_shards
from shardtensor.tensor._tensor import ShardTensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem


def _with_local(t: ShardTensor, local: torch.Tensor) -> ShardTensor:
    return _C.wrap(local, t._layout, list(t.shape), list(t.stride()))


def _part(key: str, whole: torch.Tensor, t: ShardTensor) -> torch.Tensor:
    """The part of `whole` that belongs to this rank's piece of `t`."""
    layout, wrapper = t._layout, wrapper_of(t)
    if wrapper is not None and not wrapper.local_shards():  # it may not know the sizes
        return in_places_of(wrapper, whole)
    if whole.shape != t.shape:
        raise ValueError(
            f"state dict: {key!r} has sizes {list(whole.shape)}, but is loaded into a tensor of sizes {list(t.shape)} "
            f"(rank {layout.mesh.rank})"
        )
    _refuse_summands(layout, f"state dict: the tensor that {key!r} is loaded into")
    if wrapper is not None:
        return in_places_of(wrapper, whole.detach())
    return _piece(whole.detach(), layout) if layout.mesh.has_this_rank else _nothing_of(whole.detach())


def _cut_alike(key: str, whole: torch.Tensor, t: ShardTensor, device: torch.device) -> ShardTensor:
    """The whole tensor's values in new memory, in the layout of `t`."""
    local = torch.empty_like(t._local_tensor, dtype=whole.dtype, device=device)
    return _with_local(t, local.copy_(_part(key, whole, t)))


def _spread_broadcast(stock: Callable[..., None]) -> Callable[..., None]:
    """set_model_state_dict with broadcast_from_rank0: copies this rank's part of each whole tensor into its piece."""

    def distribute(local_state_dict: dict[str, Any], keys: list[str], device: torch.device, pg: Any = None) -> None:
        for key in keys:
            pair = local_state_dict.get(key)
            if not isinstance(pair, tuple) or not isinstance(pair[0], ShardTensor):
                continue
            mine, whole = pair
            if mine.is_meta:
                mine = _cut_alike(key, whole, mine, whole.device)
            else:
                mine._local_tensor.detach().copy_(_part(key, whole, mine))
            local_state_dict[key] = mine
        stock(local_state_dict, keys, device, pg)

    return distribute


def _spread_scalars(stock: Callable[..., None]) -> Callable[..., None]:
    """set_model_state_dict with broadcast_from_rank0: torch leaves 0-d tensors plain; here they become ShardTensors again."""

    def broadcast(
        full_state_dict: dict[str, Any],
        local_state_dict: dict[str, Any],
        device: torch.device,
        pg: Any = None,
        strict: bool = False,
        cpu_offload: bool = False,
    ) -> None:
        mine = {k: t for k, t in local_state_dict.items() if isinstance(t, ShardTensor) and t.ndim == 0}
        stock(full_state_dict, local_state_dict, device, pg, strict, cpu_offload)
        for key, t in mine.items():
            value = local_state_dict.get(key)
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                local_state_dict[key] = _cut_alike(key, value, t, value.device if cpu_offload else device)

    return broadcast


def _spread_own(stock: Callable[..., None]) -> Callable[..., None]:
    """set_model_state_dict with full_state_dict: every rank has the whole tensor and takes its piece, without communication."""

    def distribute(full_state_dict: dict[str, Any], local_state_dict: dict[str, Any], device: torch.device, pg: Any = None) -> None:
        mine = {k: t for k, t in local_state_dict.items() if isinstance(t, ShardTensor) and torch.is_tensor(full_state_dict.get(k))}
        stock({k: v for k, v in full_state_dict.items() if k not in mine}, local_state_dict, device, pg)
        for key, t in mine.items():
            whole = full_state_dict[key]
            if isinstance(whole, DTensor):  # it is not whole
                whole = whole.full_tensor()
            local_state_dict[key] = _cut_alike(key, whole, t, device)

    return distribute


# Bytes of whole tensors that a full state dict holds on the device beside those that it keeps.
_TOGETHER = 1 << 24


def _batches(state_dict: dict[str, Any]) -> Iterator[list[ShardTensor]]:
    """The tensors to gather, each once, in batches of _TOGETHER bytes (or one larger tensor).

    A batch has tensors of one mesh: the ranks of a mesh agree about these, but may hold different ones of other meshes. Several
    shards on a rank, and pieces that are not on their mesh's device, are left to torch.
    """
    of_mesh: dict[Any, dict[int, ShardTensor]] = {}
    for t in tree_leaves(state_dict):
        if isinstance(t, ShardTensor) and t.device.type == t.device_mesh.device_type and not holds_shards(t._local_tensor):
            of_mesh.setdefault(t._layout.mesh, {})[id(t)] = t
    for tensors in of_mesh.values():
        batch: list[ShardTensor] = []
        room = _TOGETHER
        for t in tensors.values():
            room -= t.nbytes
            if batch and room < 0:
                yield batch
                batch, room = [], _TOGETHER - t.nbytes
            batch.append(t)
        yield batch


def _gather_together(stock: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """A full state dict: several tensors are gathered by one collective, and leave the device before the next batch if asked to."""

    def gather(
        state_dict: dict[str, Any],
        *,
        pg: Any = None,
        device: torch.device | None = None,
        cpu_offload: bool = False,
        ranks_only: tuple[int, ...] = (),
        type_check: bool = True,
    ) -> dict[str, Any]:
        kept = not ranks_only or dist.get_rank(pg) in ranks_only
        wholes: dict[int, torch.Tensor] = {}
        for batch in _batches(state_dict):
            moved = redistribute(batch, [[Replicate()] * len(t.placements) for t in batch])
            for t, whole in zip(batch, moved, strict=True):
                local = whole.to_local()
                wholes[id(t)] = local.new_empty(0) if not kept else local.cpu() if cpu_offload else local
            del moved
        gathered = tree_map(lambda value: wholes.get(id(value), value), state_dict)
        return stock(gathered, pg=pg, device=device, cpu_offload=cpu_offload, ranks_only=ranks_only, type_check=type_check)

    return gather


def _give_memory(stock: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    """Before a load, gives tensors on the meta device pieces on their mesh's device."""

    def real(t: Any) -> Any:
        if not isinstance(t, ShardTensor) or not t.is_meta:
            return t
        return _with_local(t, torch.empty_like(t._local_tensor, device=device_of(t.device_mesh)))

    def initialise(state_dict: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.planner_helpers import _iterate_state_dict  # noqa: PLC0415  slow

        _iterate_state_dict(state_dict, real, lambda t: t, lambda t: t)
        stock(state_dict)

    return initialise


def _stage_piece(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """async_save's copy on the CPU: copies the piece, since the whole has no memory."""

    def offload(self: Any, x: torch.Tensor, memo: dict[int, Any], non_blocking: bool = False) -> torch.Tensor:
        if hasattr(x, "_staged"):  # a ShardedTensor
            staged: torch.Tensor = x._staged(lambda shard: stock(self, shard, memo, non_blocking=non_blocking))
            return memo.setdefault(id(x), staged)  # type: ignore[no-any-return]
        if holds_shards(x):
            from shardtensor.shards._wrapper import as_ours  # noqa: PLC0415  slow: torch's checkpoints

            parts = [stock(self, part, memo, non_blocking=non_blocking) for part in as_ours(x).parts()]
            memo[id(x)] = as_ours(x).like(parts)
            return memo[id(x)]  # type: ignore[no-any-return]
        if not isinstance(x, ShardTensor):
            return stock(self, x, memo, non_blocking=non_blocking)
        local = x._local_tensor.detach()
        self._keep_alive(local, memo)  # staged tensors are found by their id
        out = memo[id(x)] = _with_local(x, offload(self, local, memo, non_blocking=non_blocking))
        out.__dict__.update(self.deepcopy_with_tensor_offload(x._attributes(), memo, non_blocking=non_blocking))
        return out

    return offload


def _plan_of_boxes(stock: Callable[[dict[str, Any]], SavePlan]) -> Callable[[dict[str, Any]], SavePlan]:
    """A save plan that is only read."""

    def plan(state_dict: dict[str, Any]) -> SavePlan:
        out = stock({fqn: value for fqn, value in state_dict.items() if not isinstance(value, ShardTensor)})
        for fqn, value in state_dict.items():
            out.items.extend(value.__create_write_items__(fqn, value) if isinstance(value, ShardTensor) else [])
        return out

    return plan


def _one_box_per_file(stock: Callable[..., dict[int, list[WriteItem]]]) -> Callable[..., dict[int, list[WriteItem]]]:
    """A safetensors file holds one box of a tensor under its name; a second box on the same rank goes to another file."""

    def split(self: Any, storage_plan: dict[str, int] | None, items: list[WriteItem]) -> dict[int, list[WriteItem]]:
        files: dict[int, list[WriteItem]] = {}
        more: list[WriteItem] = []
        for index, bucket in stock(self, storage_plan, items).items():
            first = {item.index.fqn: item for item in reversed(bucket)}
            files[index] = [item for item in bucket if first[item.index.fqn] is item]
            more += [item for item in bucket if first[item.index.fqn] is not item]
        last = max(storage_plan.values()) if storage_plan else max(files, default=1)
        while more:
            last += 1
            first = {item.index.fqn: item for item in reversed(more)}
            files[last] = [item for item in more if first[item.index.fqn] is item]
            more = [item for item in more if first[item.index.fqn] is not item]
        return files

    return split


_STATES = "torch.distributed._state_dict_utils"
_DCP = "torch.distributed.checkpoint"
_SHAPES = "a protocol of DTensor for the part of a whole tensor that is this rank's (`__create_chunk_list__` says where it is)"
PATCHES = (
    Patch(
        _STATES,
        "_broadcast_state_dict",
        _spread_scalars,
        why="set_model_state_dict with broadcast_from_rank0 leaves 0-d tensors plain.",
        ask="0-d DTensors that stay DTensors",
        without="set_model_state_dict with broadcast_from_rank0 makes plain tensors of 0-d ShardTensors.",
        by_name=True,
    ),
    Patch(
        _STATES,
        "_distribute_state_dict",
        _spread_own,
        why="set_model_state_dict with full_state_dict cuts whole tensors evenly.",
        ask=_SHAPES,
        without="Do not use set_model_state_dict with full_state_dict for tensors with uneven cuts.",
        by_name=True,
    ),
    Patch(
        _STATES,
        "_distribute_tensors",
        _spread_broadcast,
        why="set_model_state_dict with broadcast_from_rank0 cuts whole tensors evenly.",
        ask=_SHAPES,
        without="Do not use set_model_state_dict with broadcast_from_rank0 for tensors with uneven cuts.",
        by_name=True,
    ),
    Patch(
        _STATES,
        "_gather_state_dict",
        _gather_together,
        why="get_model_state_dict with full_state_dict gathers one tensor at a time.",
        ask="gathering in batches",
        without="get_model_state_dict with full_state_dict gathers one tensor at a time.",
        by_name=True,
    ),
    Patch(
        f"{_DCP}._state_dict_stager",
        "StateDictStager._offload_tensor",
        _stage_piece,
        why="async_save copies a tensor's memory, which a ShardTensor does not have.",
        ask="a protocol of wrapper subclasses for staging (their inner tensors)",
        without="async_save does not work with ShardTensors; use save.",
    ),
    Patch(
        f"{_DCP}.planner_helpers",
        "_create_default_metadata_only_plan",
        _plan_of_boxes,
        why="a save plan that is only read takes DTensors to be cut evenly.",
        ask="a call of `__create_write_items__`, as in the other plans",
        without="Checkpoint metadata that torch plans without saving describes even cuts.",
        by_name=True,
    ),
    Patch(
        f"{_DCP}.planner_helpers",
        "_init_state_dict",
        _give_memory,
        why="before a load, torch gives memory only to DTensors on the meta device that are cut evenly.",
        ask="`torch.empty_like(t, device=...)` for DTensors",
        without="Give tensors on the meta device memory (module.to_empty) before loading.",
        by_name=True,
    ),
    Patch(
        f"{_DCP}.hf_storage",
        "HuggingFaceStorageWriter._split_by_storage_plan",
        _one_box_per_file,
        why="a safetensors file holds one box of a tensor on each rank, where a piece may be several.",
        ask="names of boxes with their index",
        without="HuggingFaceStorageWriter cannot save tensors of which a rank holds several boxes.",
    ),
)
