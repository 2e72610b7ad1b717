"""Methods of ShardTensor that import what they need when they are called: `import shardtensor` imports only what training needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from shardtensor.tensor._layout import ShardingShapes
from shardtensor.tensor._tensor import ShardTensor, add_methods

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    from shardtensor.debug._explain import Explanation


def explain(
    self: ShardTensor,
    placements: Sequence[Placement],
    device_mesh: DeviceMesh | None = None,
    *,
    sharding_shapes: ShardingShapes | None = None,
) -> Explanation:
    """The steps that redistribute() would take, and the bytes that every rank would send and receive. See `shardtensor.explain`."""
    from shardtensor.debug import _explain

    return _explain.explain(self, placements, device_mesh, sharding_shapes=sharding_shapes)


def rebalance(
    self: ShardTensor,
    *,
    costs: torch.Tensor | Sequence[float] | None = None,
    times: float | Sequence[float] | None = None,
    mesh_dim: int | None = None,
    tolerance: float = 0.02,
    multiple_of: int = 1,
) -> ShardTensor:
    """The same tensor with its cuts moved so that all ranks have the same work, as nearly as whole rows allow. Rows keep their order. Of
    all cuts that are equally good (to `tolerance`) it takes the one that moves the fewest bytes; if rows cost differently and a cut may be
    at more than 32 of them, it tries only some, and takes one that moves few. Differentiable.

    costs: what each row costs, along the dim that is cut: a list or a plain tensor, the same on all ranks, or a ShardTensor.
    times: the measured time of all of this rank's rows (the ranks exchange their times); or a list of all ranks' times along the mesh dim.
    Each row of a rank then counts the same. Pass either costs or times.
    mesh_dim: the mesh dim whose cut moves; needed only if several mesh dims cut. multiple_of: pieces begin at multiples of it, for example
    of the product of a network's strides, which makes its halos smaller.

    Tensors that belong together are moved alike by `y.redistribute(placements=y.placements, sharding_shapes=...)`.
    """
    from shardtensor.data import _balance

    return _balance.rebalance(self, costs=costs, times=times, mesh_dim=mesh_dim, tolerance=tolerance, multiple_of=multiple_of)


def local_shards(self: ShardTensor) -> LocalShardsWrapper:
    """This rank's piece as a wrapper of views of its boxes (several if placements are strided), with their offsets."""
    from shardtensor.shards import _shards

    return _shards.as_shards(self)


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
    from shardtensor.sharded_tensor import _convert

    return _convert.from_sharded(sharded_tensor, device_mesh, placements, sharding_shapes)


def to_sharded_tensor(self: ShardTensor, sharding_spec: Any = None, *, process_group: Any = None) -> Any:
    """A leaf ShardedTensor of this tensor. Shares its memory (of replicas, the first one's) unless the spec needs a move."""
    from shardtensor.sharded_tensor import _convert

    return _convert.to_sharded(self, sharding_spec, process_group)


# ---- torch's checkpoint protocol ----


def _chunks(self: ShardTensor) -> list[ChunkStorageMetadata]:
    from shardtensor.checkpoint import _boxes

    return _boxes.chunks(self)


def _write_items(self: ShardTensor, fqn: str, object: Any) -> list[WriteItem]:
    from shardtensor.checkpoint import _boxes

    return _boxes.write_items(self, fqn, object)


def _box_at(self: ShardTensor, index: MetadataIndex) -> torch.Tensor:
    from shardtensor.checkpoint import _boxes

    return _boxes.box_at(self, index)


# ---- pieces that are several shards ----


def _of_shards(name: str) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        from shardtensor.shards import _shards

        return getattr(_shards, name)(*args, **options)

    return call


add_methods(
    explain=explain,
    rebalance=rebalance,
    local_shards=local_shards,
    from_sharded_tensor=staticmethod(from_sharded_tensor),
    to_sharded_tensor=to_sharded_tensor,
    __create_chunk_list__=_chunks,
    __create_write_items__=_write_items,
    __get_tensor_shard__=_box_at,
    _from_shards=staticmethod(_of_shards("from_shards")),
    _shards_as_local=_of_shards("to_local"),
    _redistribute_shards=_of_shards("redistribute"),
    _first_offsets_of_shards=_of_shards("first_offsets"),
    _dispatch_on_shards=staticmethod(_of_shards("dispatch")),
    _rebuilt_shards=staticmethod(_of_shards("rebuild")),
)
