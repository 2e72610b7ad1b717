"""One global tensor whose pieces live on many ranks, in sizes of any kind: a drop-in for torch.distributed.tensor."""

from typing import TYPE_CHECKING

from shardtensor import _load  # noqa: F401  checks torch's version and loads the extension; must come first

# isort: split
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from shardtensor import _C, _checking, _fsdp, _interop, _logging, _optimizers, _pipelines, _tools, patches, random
from shardtensor._api import (
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
from shardtensor._explain import Explanation, explain
from shardtensor._limits import ExplicitRedistributionContext, comm_budget
from shardtensor._modes import (
    get_promotion_mode,
    implicit_replication,
    promotion_mode,
    set_promotion_mode,
    set_strict,
    strict_mode,
)
from shardtensor._replace import Replacement, replace_dtensor
from shardtensor._tensor import ShardTensor, ShardTensorSpec

if TYPE_CHECKING:
    from shardtensor._shards_wrapper import LocalShardsWrapper

_C.install_handler()
_checking.install()
patches.install()
_interop.install()
_optimizers.install()
_fsdp.install()
_pipelines.install()
_tools.install()
_logging.install()

DTensor = ShardTensor


def __getattr__(name: str) -> object:
    """LocalShardsWrapper needs torch's checkpoints, which take longer to import than all the rest."""
    if name == "LocalShardsWrapper":
        from shardtensor._shards_wrapper import LocalShardsWrapper

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
    "replace_dtensor",
    "scatter_tensor",
    "set_promotion_mode",
    "set_strict",
    "strict_mode",
    "zeros",
]
