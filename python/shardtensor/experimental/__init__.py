"""torch.distributed.tensor.experimental for ShardTensors; context_parallel is not here yet."""

from shardtensor._modes import implicit_replication
from shardtensor.experimental._local_map import local_map
from shardtensor.experimental._register_sharding import register_sharding

__all__ = ["implicit_replication", "local_map", "register_sharding"]
