"""ShardTensor to ShardedTensor and back: methods of ShardTensor that import shardtensor.sharded_tensor when they are called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from shardtensor.tensor._layout import ShardingShapes
from shardtensor.tensor._tensor import ShardTensor, add_methods

if TYPE_CHECKING:
    from shardtensor.sharded_tensor import ShardedTensor


def from_sharded_tensor(
    sharded_tensor: Any,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    sharding_shapes: ShardingShapes | None = None,
) -> ShardTensor:
    """Converts a ShardedTensor, ours or torch's, to a leaf ShardTensor. Shares its memory if the layout has the same box on
    every rank; otherwise moves the values once.

    Without `placements`, cuts the dim that the ShardedTensor is cut along; if no 1-d layout describes its shards, cuts dim 0
    evenly. The mesh's ranks must be in its process group, and all ranks of the group must call this.
    """
    from shardtensor.sharded_tensor import _convert  # noqa: PLC0415  slow: torch's _shard

    return _convert.from_sharded(sharded_tensor, device_mesh, placements, sharding_shapes)


def to_sharded_tensor(t: ShardTensor, sharding_spec: Any = None, *, process_group: Any = None) -> ShardedTensor:
    """A leaf ShardedTensor of this tensor. Shares its memory (of replicas, the first one's) unless the spec needs a move."""
    from shardtensor.sharded_tensor import _convert  # noqa: PLC0415  slow: torch's _shard

    return _convert.to_sharded(t, sharding_spec, process_group)


add_methods(from_sharded_tensor=staticmethod(from_sharded_tensor), to_sharded_tensor=to_sharded_tensor)
