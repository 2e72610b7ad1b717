"""A ShardedTensor in torch's distributed checkpoints: which shards this rank writes and reads."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


def _written(t: Any) -> list[Shard]:
    """The shards with elements; if no rank has elements, one shard per place."""
    return list({tuple(s.metadata.shard_offsets): s for s in t._local_shards if all(s.metadata.shard_sizes) or not t.numel()}.values())


def _chunk(shard: Shard) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(shard.metadata.shard_offsets), torch.Size(shard.metadata.shard_sizes))


def chunks(t: Any) -> list[ChunkStorageMetadata]:
    return [_chunk(shard) for shard in _written(t)]


def write_items(t: Any, fqn: str) -> list[WriteItem]:
    return [
        WriteItem(
            MetadataIndex(fqn, _chunk(shard).offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(_chunk(shard), TensorProperties.create_from_tensor(shard.tensor), t.size()),
        )
        for shard in _written(t)
    ]


def shard_at(t: Any, index: MetadataIndex) -> torch.Tensor:
    """The shard itself, detached. A load writes into it."""
    if index.offset is None:
        raise ValueError(f"Cannot lookup {index.fqn} since its a ShardedTensor and no offset was provided (rank {dist.get_rank()})")
    for shard in _written(t):
        if torch.Size(shard.metadata.shard_offsets) == index.offset:
            return shard.tensor.detach()
    raise ValueError(f"Could not find shard at '{index.offset}' for FQN: '{index.fqn}' on rank {dist.get_rank()}")
