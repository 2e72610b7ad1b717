"""Batches of any sizes from each rank's own loader, as ShardTensors; a sampler that repeats no sample; arrays on disk, box by box."""

from shardtensor.data._batches import shard_batches
from shardtensor.data._io import read, write, write_safetensors
from shardtensor.data._sampler import ShardSampler

__all__ = ["ShardSampler", "read", "shard_batches", "write", "write_safetensors"]
