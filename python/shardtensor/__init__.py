"""One global tensor whose pieces live on many ranks, in any sizes: a drop-in for torch.distributed.tensor."""

from typing import TYPE_CHECKING

from shardtensor import _load  # noqa: F401  checks torch's version and loads the extension; must come first

# isort: split
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from shardtensor import _C, _conversions, patches, random  # noqa: F401  _conversions adds methods to ShardTensor
from shardtensor._replace import Replacement, replace_dtensor
from shardtensor.checkpoint import _boxes  # noqa: F401  adds methods to ShardTensor
from shardtensor.data import _balance  # noqa: F401  adds methods to ShardTensor
from shardtensor.debug import _checking, _gathers, _logging, _profiling
from shardtensor.debug._explain import Explanation, explain
from shardtensor.debug._limits import ExplicitRedistributionContext, comm_budget
from shardtensor.shards import _shards  # noqa: F401  adds methods to ShardTensor
from shardtensor.tensor._factories import (
    distribute_module,
    distribute_tensor,
    empty,
    full,
    linspace,
    logspace,
    ones,
    rand,
    randn,
    scatter_tensor,
    zeros,
)
from shardtensor.tensor._many import redistribute
from shardtensor.tensor._modes import (
    get_promotion_mode,
    implicit_replication,
    promotion_mode,
    set_fault_notice,
    set_promotion_mode,
    set_reduce_ahead,
    set_reduce_once,
    set_strict,
    strict_mode,
)
from shardtensor.tensor._tensor import ShardTensor, ShardTensorSpec

if TYPE_CHECKING:
    from shardtensor.shards._wrapper import LocalShardsWrapper

_C.install_handler()
_checking.install()
_profiling.install()
patches.install()
_logging.install()
_gathers.install()

DTensor = ShardTensor


def __getattr__(name: str) -> object:
    """Imports LocalShardsWrapper late: it needs torch's checkpoints, which take longer to import than all the rest."""
    if name == "LocalShardsWrapper":
        from shardtensor.shards._wrapper import LocalShardsWrapper  # noqa: PLC0415  slow

        return LocalShardsWrapper
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.1.0"
__all__ = [
    "DTensor",
    "DeviceMesh",
    "Explanation",
    "ExplicitRedistributionContext",
    "LocalShardsWrapper",
    "Partial",
    "Placement",
    "Replacement",
    "Replicate",
    "Shard",
    "ShardTensor",
    "ShardTensorSpec",
    "comm_budget",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "explain",
    "full",
    "get_promotion_mode",
    "implicit_replication",
    "init_device_mesh",
    "linspace",
    "logspace",
    "ones",
    "promotion_mode",
    "rand",
    "randn",
    "random",
    "redistribute",
    "replace_dtensor",
    "scatter_tensor",
    "set_fault_notice",
    "set_promotion_mode",
    "set_reduce_ahead",
    "set_reduce_once",
    "set_strict",
    "strict_mode",
    "zeros",
]
