"""Batches of any sizes from each rank's own loader, as ShardTensors; and a sampler that repeats no sample."""

from shardtensor.data._batches import shard_batches
from shardtensor.data._sampler import ShardSampler

__all__ = ["ShardSampler", "shard_batches"]
