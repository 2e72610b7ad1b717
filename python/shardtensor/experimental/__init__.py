"""torch.distributed.tensor.experimental for ShardTensors."""

from shardtensor.experimental._context_parallel import context_parallel, context_parallel_unshard, set_rotate_method
from shardtensor.experimental._local_map import local_map
from shardtensor.experimental._register_sharding import register_sharding
from shardtensor.tensor._modes import implicit_replication

__all__ = [
    "context_parallel",
    "context_parallel_unshard",
    "implicit_replication",
    "local_map",
    "register_sharding",
    "set_rotate_method",
]
