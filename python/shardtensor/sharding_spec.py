"""How a ShardedTensor is cut: a drop-in for torch.distributed._shard.sharding_spec."""

from shardtensor.sharded_tensor._ops import _dispatch_custom_op, _has_custom_op, custom_sharding_spec_op  # noqa: F401  as below
from shardtensor.sharded_tensor._spec import (  # noqa: F401  torch's private name, which is in use
    ChunkShardingSpec,
    DevicePlacementSpec,
    EnumerableShardingSpec,
    PlacementSpec,
    ShardingSpec,
    ShardMetadata,
    _infer_sharding_spec_from_shards_metadata,
)

__all__ = [
    "ChunkShardingSpec",
    "DevicePlacementSpec",
    "EnumerableShardingSpec",
    "PlacementSpec",
    "ShardMetadata",
    "ShardingSpec",
    "custom_sharding_spec_op",
]
