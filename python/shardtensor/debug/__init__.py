"""What is communicated, where and why: the public names of torch.distributed.tensor.debug, and others."""

from typing import TYPE_CHECKING

from shardtensor._late import names

if TYPE_CHECKING:
    from shardtensor.debug._checking import check
    from shardtensor.debug._comm_mode import CommDebugMode
    from shardtensor.debug._gathers import log_gathers
    from shardtensor.debug._kept import kept
    from shardtensor.debug._limits import ExplicitRedistributionContext, comm_budget
    from shardtensor.debug._logging import halos, log_redistributions
    from shardtensor.debug._patches import patches
    from shardtensor.debug._visualize import draw_sharding, visualize_sharding

__getattr__, __dir__ = names(
    __name__,
    {
        "CommDebugMode": "shardtensor.debug._comm_mode",
        "ExplicitRedistributionContext": "shardtensor.debug._limits",
        "check": "shardtensor.debug._checking",
        "comm_budget": "shardtensor.debug._limits",
        "draw_sharding": "shardtensor.debug._visualize",
        "halos": "shardtensor.debug._logging",
        "kept": "shardtensor.debug._kept",
        "log_gathers": "shardtensor.debug._gathers",
        "log_redistributions": "shardtensor.debug._logging",
        "patches": "shardtensor.debug._patches",
        "visualize_sharding": "shardtensor.debug._visualize",
    },
)

__all__ = [
    "CommDebugMode",
    "ExplicitRedistributionContext",
    "check",
    "comm_budget",
    "draw_sharding",
    "halos",
    "kept",
    "log_gathers",
    "log_redistributions",
    "patches",
    "visualize_sharding",
]
