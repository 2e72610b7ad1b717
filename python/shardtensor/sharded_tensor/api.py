"""The names that users import from torch.distributed._shard.sharded_tensor.api and from torch.distributed._shard.api."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed._shard.sharder import Sharder
from torch.distributed._shard.sharding_plan.api import ShardingPlan

from shardtensor.sharded_tensor._modules import _collect_local_shard, _reshard_output, _shard_tensor, shard_module, shard_parameter
from shardtensor.sharded_tensor._move import _get_current_process_group, load_with_process_group
from shardtensor.sharded_tensor._ops import _CUSTOM_SHARDED_OPS, _SHARDED_OPS
from shardtensor.sharded_tensor._remote import _sharded_tensor_map
from shardtensor.sharded_tensor._spec import ChunkShardingSpec, ShardingSpec
from shardtensor.sharded_tensor._tensor import ShardedTensor, ShardedTensorBase

__all__ = [
    "ChunkShardingSpec",
    "Shard",
    "ShardedTensor",
    "ShardedTensorBase",
    "ShardedTensorMetadata",
    "Sharder",
    "ShardingPlan",
    "ShardingSpec",
    "TensorProperties",
    "_CUSTOM_SHARDED_OPS",
    "_SHARDED_OPS",
    "_collect_local_shard",
    "_create_tensor_from_params",
    "_get_current_process_group",
    "_reshard_output",
    "_shard_tensor",
    "_sharded_tensor_map",
    "load_with_process_group",
    "shard_module",
    "shard_parameter",
]


def _create_tensor_from_params(*size: Any, local_device: torch.device, tensor_properties: TensorProperties) -> torch.Tensor:
    """A plain tensor for a shard, not initialised."""
    return torch.empty(
        *size,
        dtype=tensor_properties.dtype,
        layout=tensor_properties.layout,
        device=local_device,
        requires_grad=tensor_properties.requires_grad,
        memory_format=tensor_properties.memory_format,
        pin_memory=tensor_properties.pin_memory,
    )
