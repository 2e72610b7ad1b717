"""Which parameters of a module shard_module shards, and how: a drop-in for torch.distributed._shard.sharding_plan."""

from torch.distributed._shard.sharder import Sharder
from torch.distributed._shard.sharding_plan.api import ShardingPlan, ShardingPlanner

__all__ = ["Sharder", "ShardingPlan", "ShardingPlanner"]
