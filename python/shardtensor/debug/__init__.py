"""What is communicated, where and why: the public names of torch.distributed.tensor.debug, and others."""

from typing import TYPE_CHECKING

from shardtensor.debug._checking import check
from shardtensor.debug._gathers import log_gathers
from shardtensor.debug._kept import kept
from shardtensor.debug._limits import ExplicitRedistributionContext, comm_budget
from shardtensor.debug._logging import halos, log_redistributions
from shardtensor.debug._visualize import draw_sharding, visualize_sharding

if TYPE_CHECKING:
    from shardtensor.debug._comm_mode import CommDebugMode


def __getattr__(name: str) -> object:
    """Imports CommDebugMode late: it needs torch's, which imports torch.compile and takes seconds."""
    if name == "CommDebugMode":
        from shardtensor.debug._comm_mode import CommDebugMode  # noqa: PLC0415  slow

        return CommDebugMode
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
    "visualize_sharding",
]
