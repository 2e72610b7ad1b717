"""ShardedTensor, its factories and the sharding of modules: a drop-in for torch.distributed._shard and its sharded_tensor."""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

import torch
from torch.distributed import ProcessGroup
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import MEM_FORMAT_ENCODING, ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed._shard.sharder import Sharder
from torch.distributed.remote_device import _remote_device

from shardtensor.sharded_tensor import _tensor
from shardtensor.sharded_tensor._modules import (  # noqa: F401  torch's private names, which are in use
    _collect_local_shard,
    _reshard_output,
    _shard_tensor,
    pre_load_state_dict_hook,
    shard_module,
    shard_parameter,
    state_dict_hook,
)
from shardtensor.sharded_tensor._move import _get_current_process_group, load_with_process_group  # noqa: F401
from shardtensor.sharded_tensor._ops import (  # noqa: F401
    _CUSTOM_SHARDED_OPS,
    _SHARDED_OPS,
    _likes,
    _sharded_op_impl,
    custom_sharded_op_impl,
)
from shardtensor.sharded_tensor._optim import ShardedOptimizer, named_params_with_sharded_tensor
from shardtensor.sharded_tensor._spec import ChunkShardingSpec, EnumerableShardingSpec, ShardingSpec
from shardtensor.sharded_tensor._tensor import ShardedTensor, ShardedTensorBase

__all__ = [
    "MEM_FORMAT_ENCODING",
    "Shard",
    "ShardMetadata",
    "ShardedOptimizer",
    "Sharder",
    "ShardedTensor",
    "ShardedTensorBase",
    "ShardedTensorMetadata",
    "TensorProperties",
    "custom_sharded_op_impl",
    "empty",
    "full",
    "init_from_local_shards",
    "load_with_process_group",
    "named_params_with_sharded_tensor",
    "ones",
    "pre_load_state_dict_hook",
    "rand",
    "randn",
    "shard_module",
    "shard_parameter",
    "state_dict_hook",
    "zeros",
]


class Options(TypedDict, total=False):
    """The keyword arguments of ShardedTensor and the factories."""

    dtype: torch.dtype | None
    layout: torch.layout
    requires_grad: bool
    pin_memory: bool
    memory_format: torch.memory_format
    process_group: ProcessGroup | None
    init_rrefs: bool


def empty(sharding_spec: ShardingSpec, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """Not initialised."""
    return ShardedTensor(sharding_spec, *size, **options)


def zeros(sharding_spec: ShardingSpec, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    return full(sharding_spec, size, 0, **options)


def ones(sharding_spec: ShardingSpec, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    return full(sharding_spec, size, 1, **options)


def full(sharding_spec: ShardingSpec, size: Any, fill_value: Any, **options: Unpack[Options]) -> ShardedTensor:
    return torch.nn.init.constant_(ShardedTensor(sharding_spec, *size, **options), fill_value)  # type: ignore[return-value]


def rand(sharding_spec: ShardingSpec, *size: Any, generator: torch.Generator | None = None, **options: Unpack[Options]) -> ShardedTensor:
    """Uniform in [0, 1). Each rank draws its shards, as in torch. With a generator that is in the same state on all ranks, the values
    do not depend on how the tensor is cut; with torch.default_generator they are those of shardtensor.rand."""
    return torch.nn.init.uniform_(ShardedTensor(sharding_spec, *size, **options), generator=generator)  # type: ignore[return-value]


def randn(sharding_spec: ShardingSpec, *size: Any, generator: torch.Generator | None = None, **options: Unpack[Options]) -> ShardedTensor:
    """Standard normal; the rest is as in rand."""
    return torch.nn.init.normal_(ShardedTensor(sharding_spec, *size, **options), generator=generator)  # type: ignore[return-value]


def init_from_local_shards(local_shards: list[Shard], *global_size: Any, process_group: Any = None, init_rrefs: bool = False) -> ShardedTensor:
    """Makes a ShardedTensor of each rank's shards. The ranks compare their metadata, and a mismatch raises on all.

    With a None among the sizes, the shards are stacked along dim 0 in the order of the ranks; their own sizes give the total.
    """
    return ShardedTensor._init_from_local_shards(local_shards, *global_size, process_group=process_group, init_rrefs=init_rrefs)


_likes(empty=empty, full=full, ones=ones, rand=rand, randn=randn, zeros=zeros)
torch.serialization.add_safe_globals(
    [
        ChunkShardingSpec, EnumerableShardingSpec, MEM_FORMAT_ENCODING, Shard, ShardMetadata, ShardedTensor, ShardedTensorMetadata,
        TensorProperties, _remote_device, _tensor._rebuild,
    ]
)  # fmt: skip
