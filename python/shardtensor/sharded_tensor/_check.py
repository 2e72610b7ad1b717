"""Checks of local shards and metadata, with torch's error texts and the rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard

from shardtensor.sharded_tensor._move import place
from shardtensor.sharded_tensor._spec import check_cover, check_disjoint


def flat_sizes(size: Sequence[Any]) -> torch.Size:
    """Sizes, passed one by one or as one sequence."""
    dims = list(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else list(size)
    if not all(isinstance(n, int) for n in dims):
        raise TypeError(f"size has to be a sequence of ints, found: {dims}")
    return torch.Size(dims)


def properties_of(tensor: torch.Tensor) -> TensorProperties:
    return TensorProperties(
        dtype=tensor.dtype,
        layout=tensor.layout,
        requires_grad=tensor.requires_grad,
        memory_format=torch.contiguous_format,
        pin_memory=tensor.is_pinned(),
    )


def require_strided(layout: torch.layout) -> None:
    if layout != torch.strided:
        raise ValueError("Only torch.strided layout is currently supported")


# ---- the shards of one rank, before the ranks communicate ----


def local_metadata(shards: Sequence[Shard], sizes: torch.Size, group: ProcessGroup) -> ShardedTensorMetadata | None:
    """This rank's metadata for the others; checks that its shards are alike. None if it has no shards."""
    if not shards:
        return None
    first = properties_of(shards[0].tensor)
    for shard in shards:
        _check_placed(shard, group)
        _check_alike(properties_of(shard.tensor), first)
    return ShardedTensorMetadata([shard.metadata for shard in shards], sizes, first)


def _check_placed(shard: Shard, group: ProcessGroup) -> None:
    me, tensor = dist.get_rank(), shard.tensor
    rank, device = place(group, shard.metadata.placement)
    if tensor.layout != torch.strided:
        raise ValueError(f"Only torch.strided layout is currently supported, but found {tensor.layout} on rank:{me}!")
    if not tensor.is_contiguous():
        raise ValueError(
            f"Only torch.contiguous_format memory_format is currently supported! Found strides {tensor.stride()} of sizes "
            f"{list(tensor.shape)} on rank:{me}"
        )
    if rank != me:
        raise ValueError(
            "Local shard metadata's rank does not match with the rank in its process group! "
            f"Found current rank in the process group: {me}, local ShardMetadata placement's rank: {rank}"
        )
    if tensor.device != device:
        raise ValueError(
            "Local shard tensor device does not match with local Shard's placement! "
            f"Found local shard tensor device: {tensor.device}, local shard metadata placement device: {device} on rank:{me}"
        )
    _raise_local(shard.metadata.shard_sizes, list(tensor.shape), "size")


def _check_alike(found: TensorProperties, first: TensorProperties) -> None:
    for name in ("pin_memory", "dtype", "requires_grad"):
        _raise_local(getattr(found, name), getattr(first, name), name)


def _raise_local(expected: Any, found: Any, name: str) -> None:
    if expected != found:
        raise ValueError(
            f"Local shards' tensor {name} property need to be the same on rank:{dist.get_rank()}! "
            f"Found one local shard tensor {name}={expected}, the other local shard tensor {name}={found}."
        )


# ---- the shards of all ranks ----


def global_metadata(told: Sequence[ShardedTensorMetadata | None], group: ProcessGroup, asked: Sequence[int | None]) -> ShardedTensorMetadata:
    """The whole tensor's metadata from all ranks' metadata. With a None in `asked`, the shards are stacked along dim 0, by
    global rank, and their offsets are ignored."""
    holders = [(dist.get_global_rank(group, i), metadata) for i, metadata in enumerate(told) if metadata is not None]
    holders.sort(key=lambda holder: holder[0])
    if not holders:
        raise ValueError("ShardedTensor have no local shards on all ranks!")
    first_rank, first = holders[0]
    for rank, metadata in holders[1:]:
        _raise_across(first.size, metadata.size, "global_size", first_rank, rank)
        for name in ("dtype", "requires_grad", "pin_memory"):
            _raise_across(getattr(first.tensor_properties, name), getattr(metadata.tensor_properties, name), name, first_rank, rank)
    shards, sizes = [shard for _, metadata in holders for shard in metadata.shards_metadata], first.size
    if None in asked:
        shards, sizes = _stacked(shards, asked)
    check_disjoint(shards)
    check_cover(shards, sizes)
    return ShardedTensorMetadata(shards, sizes, first.tensor_properties)


def _raise_across(expected: Any, found: Any, name: str, rank: int, other: int) -> None:
    if expected != found:
        raise ValueError(
            f"ShardedTensor {name} property does not match from different ranks! "
            f"Found {name}={expected} on rank:{rank}, and {name}={found} on rank:{other}."
        )


def _stacked(shards: Sequence[ShardMetadata], asked: Sequence[int | None]) -> tuple[list[ShardMetadata], torch.Size]:
    out, rows = [], 0
    for shard in shards:
        out.append(ShardMetadata([rows, *[0] * (len(shard.shard_sizes) - 1)], list(shard.shard_sizes), shard.placement))
        rows += shard.shard_sizes[0]
    sizes = torch.Size([rows, *shards[0].shard_sizes[1:]])
    if any(want not in (None, size) for want, size in zip(asked, sizes, strict=True)):
        raise ValueError(f"init_from_local_shards: argument 'global_size' is {tuple(asked)}, but the shards make up {tuple(sizes)}")
    return out, sizes


# ---- shards against metadata that is trusted ----


def check_against(shards: Sequence[Shard], metadata: ShardedTensorMetadata, group: ProcessGroup) -> None:
    """Checks, without communication, that this rank's shards match the metadata and that its shards make up the tensor."""
    me = dist.get_rank()
    expected = [shard for shard in metadata.shards_metadata if place(group, shard.placement)[0] == me]
    if len(shards) != len(expected):
        raise RuntimeError(
            f"Number of local shards ({len(shards)}) does not match number of local "
            f"shards metadata in sharded_tensor_metadata ({len(expected)}) on rank ({me}) "
        )
    check_whole(metadata)
    for shard in shards:
        _check_shard_against(shard, metadata.tensor_properties, group)
        if shard.metadata not in expected:
            raise ValueError(f"Local shard {shard.metadata} is not in sharded_tensor_metadata for rank {me}: {expected}")


def check_whole(metadata: ShardedTensorMetadata) -> None:
    if not metadata.shards_metadata:
        raise ValueError("shards_metadata must not be empty!")
    require_strided(metadata.tensor_properties.layout)
    check_disjoint(metadata.shards_metadata)
    check_cover(metadata.shards_metadata, metadata.size)


def _check_shard_against(shard: Shard, properties: TensorProperties, group: ProcessGroup) -> None:
    rank, device = place(group, shard.metadata.placement)
    found = properties_of(shard.tensor)
    _raise_against(properties.layout, found.layout, "layout", rank, "tensor property")
    if not shard.tensor.is_contiguous():
        raise ValueError(f"Only torch.contiguous_format memory_format is currently supported (rank {rank})")
    _raise_against(shard.metadata.shard_sizes, list(shard.tensor.shape), "size", rank)
    _raise_against(properties.pin_memory, found.pin_memory, "pin_memory", rank, "tensor property")
    _raise_against(device, shard.tensor.device, "device", rank)
    _raise_against(properties.dtype, found.dtype, "dtype", rank, "tensor property")
    _raise_against(properties.requires_grad, found.requires_grad, "requires_grad", rank, "tensor property")


def _raise_against(expected: Any, found: Any, name: str, rank: int, what: str = "local ShardMetadata") -> None:
    if expected != found:
        raise ValueError(
            f"Local shards' tensor {name} property is incompatible with {what} on rank {rank}: "
            f"{what} {name}={expected}, local shard tensor {name}={found}."
        )


def with_properties(metadata: ShardedTensorMetadata, **changes: Any) -> ShardedTensorMetadata:
    return replace(metadata, tensor_properties=replace(metadata.tensor_properties, **changes))
