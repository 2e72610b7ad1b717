"""One global tensor whose pieces live on many ranks, in any sizes: a drop-in for torch.distributed.tensor."""

from typing import TYPE_CHECKING

from shardtensor import _load  # noqa: F401  checks torch's version and loads the extension; must come first

# isort: split
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from shardtensor import _C, _methods, patches, random  # noqa: F401  _methods adds methods to ShardTensor
from shardtensor._late import names
from shardtensor.debug import _checking, _gathers, _logging, _profiling
from shardtensor.device_mesh import DeviceMesh, init_device_mesh
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
    from shardtensor import checkpoint, data, debug, parallel, shards  # noqa: F401
    from shardtensor._replace import Replacement, replace_dtensor
    from shardtensor.debug._explain import Explanation, explain
    from shardtensor.debug._limits import ExplicitRedistributionContext, comm_budget
    from shardtensor.shards._wrapper import LocalShardsWrapper

_C.install_handler()
_checking.install()
_profiling.install()
patches.install()
_logging.install()
_gathers.install()

DTensor = ShardTensor

# What is imported when it is first read.
__getattr__, __dir__ = names(
    __name__,
    {
        "Explanation": "shardtensor.debug._explain",
        "ExplicitRedistributionContext": "shardtensor.debug._limits",
        "LocalShardsWrapper": "shardtensor.shards._wrapper",
        "Replacement": "shardtensor._replace",
        "checkpoint": "",
        "comm_budget": "shardtensor.debug._limits",
        "data": "",
        "explain": "shardtensor.debug._explain",
        "parallel": "",
        "replace_dtensor": "shardtensor._replace",
        "shards": "",
    },
)

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
