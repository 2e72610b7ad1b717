"""What is communicated, where and why: the public names of torch.distributed.tensor.debug, and more."""

from shardtensor._checking import check
from shardtensor._limits import ExplicitRedistributionContext, comm_budget
from shardtensor._logging import log_redistributions
from shardtensor.debug._comm_mode import CommDebugMode
from shardtensor.debug._visualize import draw_sharding, visualize_sharding

__all__ = [
    "CommDebugMode",
    "ExplicitRedistributionContext",
    "check",
    "comm_budget",
    "draw_sharding",
    "log_redistributions",
    "visualize_sharding",
]
