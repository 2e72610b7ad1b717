"""Batches of any sizes from each rank's own loader; arrays on disk, box by box; cuts that give all ranks the same work."""

from shardtensor.data._balance import BalanceMonitor, Verdict
from shardtensor.data._batches import shard_batches
from shardtensor.data._io import read, write, write_safetensors
from shardtensor.data._sampler import ShardSampler

__all__ = ["BalanceMonitor", "ShardSampler", "Verdict", "read", "shard_batches", "write", "write_safetensors"]
