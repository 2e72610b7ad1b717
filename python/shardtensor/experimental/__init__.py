"""torch.distributed.tensor.experimental for ShardTensors, as far as it is here: implicit_replication and local_map."""

from shardtensor._modes import implicit_replication
from shardtensor.experimental._local_map import local_map

__all__ = ["implicit_replication", "local_map"]
