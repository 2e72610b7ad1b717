"""How a ShardedTensor is cut. Users import it as shardtensor.sharding_spec.

The specs are subclasses of torch's, and equal torch's specs of the same content. Empty shards may be anywhere, any spec can
shard a tensor, and every check covers every shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharding_spec.api import DevicePlacementSpec, PlacementSpec, ShardingSpec
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec as StockEnumerable
from torch.distributed._shard.sharding_spec.chunk_sharding_spec import ChunkShardingSpec as StockChunk

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "ChunkShardingSpec",
    "DevicePlacementSpec",
    "EnumerableShardingSpec",
    "PlacementSpec",
    "ShardMetadata",
    "ShardingSpec",
]

_PUBLIC = "shardtensor.sharding_spec"  # where users and files find the classes
_shard: Callable[..., Any]  # add_shard() sets it


# ---- checks of a list of shards ----


def _overlapping(shards: Sequence[ShardMetadata]) -> tuple[ShardMetadata, ShardMetadata] | None:
    """Two shards with an element in common, if there are any, by a sweep along the dim that separates most shards."""
    full = [(i, s) for i, s in enumerate(shards) if all(s.shard_sizes)]
    if len(full) < 2:
        return None
    dims = range(len(full[0][1].shard_sizes))
    if not dims:
        return full[0][1], full[1][1]
    along = max(dims, key=lambda d: len({s.shard_offsets[d] for _, s in full}))
    active: list[tuple[int, ShardMetadata]] = []
    for i, s in sorted(full, key=lambda entry: entry[1].shard_offsets[along]):
        active = [(j, a) for j, a in active if a.shard_offsets[along] + a.shard_sizes[along] > s.shard_offsets[along]]
        for j, a in active:
            if all(
                max(a.shard_offsets[d], s.shard_offsets[d])
                < min(a.shard_offsets[d] + a.shard_sizes[d], s.shard_offsets[d] + s.shard_sizes[d])
                for d in dims
            ):
                return (a, s) if j < i else (s, a)
        active.append((i, s))
    return None


def check_disjoint(shards: Sequence[ShardMetadata]) -> None:
    """Raises if the shards have different numbers of dims, or two have an element in common."""
    if len(shards) == 0:
        raise ValueError(f"Empty shard list provided: {shards}")
    ndim = len(shards[0].shard_offsets)
    for shard in shards:
        if len(shard.shard_offsets) != ndim:
            raise ValueError(f"Found inconsistent ranks for shards: {ndim} and {len(shard.shard_offsets)}")
    pair = _overlapping(shards)
    if pair is not None:
        raise ValueError(f"Shards {pair[0]} and {pair[1]} overlap")


def check_cover(shards: Sequence[ShardMetadata], sizes: Sequence[int]) -> None:
    """Raises if the shards, which have no element in common, do not cover exactly the tensor's elements."""
    if len(sizes) != len(shards[0].shard_offsets):
        raise ValueError(f"Rank of tensor is {len(sizes)}, but shards rank is {len(shards[0].shard_offsets)}")
    volume = 0
    for shard in shards:
        if not all(shard.shard_sizes):
            continue
        for offset, length, size in zip(shard.shard_offsets, shard.shard_sizes, sizes, strict=True):
            if offset + length > size:
                raise ValueError(f"Shard offset {offset} and length {length} exceeds tensor dim: {size} for shard {shard}")
        volume += torch.Size(shard.shard_sizes).numel()
    if volume != torch.Size(sizes).numel():
        raise ValueError(
            f"Total volume of shards: {volume} does not match tensor volume: {torch.Size(sizes).numel()}, in other words "
            f"all the individual shards do not cover the entire tensor, of sizes {list(sizes)}"
        )


# ---- the specs ----


@dataclass(eq=False)
class ChunkShardingSpec(StockChunk):
    """Cut along `dim` as torch.chunk does, one chunk per placement ("rank:R/device"); the last ones may be empty."""

    __module__ = _PUBLIC

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        if not self.placements:
            raise ValueError("ChunkShardingSpec: argument 'placements' is empty; one placement per chunk is needed")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StockChunk) and (self.dim, self.placements) == (other.dim, other.placements)

    __hash__ = None  # type: ignore[assignment]

    def shard(self, tensor: torch.Tensor, src_rank: int = 0, process_group: ProcessGroup | None = None) -> Any:
        return _shard(tensor, self, src_rank, process_group)


@dataclass(eq=False)
class EnumerableShardingSpec(StockEnumerable):
    """Any shards that have no element in common: a list of ShardMetadata(offsets, sizes, placement)."""

    __module__ = _PUBLIC

    def __post_init__(self) -> None:
        check_disjoint(self.shards)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StockEnumerable) and self.shards == other.shards

    __hash__ = None  # type: ignore[assignment]

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        check_cover(self.shards, tensor_sizes)
        return ShardedTensorMetadata(list(self.shards), tensor_sizes, tensor_properties)

    def shard(self, tensor: torch.Tensor, src_rank: int = 0, process_group: ProcessGroup | None = None) -> Any:
        return _shard(tensor, self, src_rank, process_group)


def add_shard(shard_whole: Callable[..., Any]) -> None:
    """Sets the function that the specs' shard() calls with tensor, spec, source and process group. _modules, which knows
    ShardedTensor, calls this."""
    global _shard
    _shard = shard_whole


def own_spec(spec: Any) -> ShardingSpec:
    """Converts torch's two specs to ours; users' specs stay unchanged."""
    if type(spec) is StockChunk:
        return ChunkShardingSpec(spec.dim, list(spec.placements))
    if type(spec) is StockEnumerable:
        return EnumerableShardingSpec(spec.shards)
    if not isinstance(spec, ShardingSpec):
        raise ValueError(f"Expecting ShardingSpec but got: {type(spec)}")
    return spec


def _infer_sharding_spec_from_shards_metadata(shards_metadata: Sequence[ShardMetadata]) -> ShardingSpec:
    """The ChunkShardingSpec that gives exactly these shards, if there is one; else an EnumerableShardingSpec."""
    shards = list(shards_metadata)
    for dim in range(len(shards[0].shard_offsets)):
        if not any(s.shard_offsets[dim] for s in shards) or any(s.placement is None for s in shards):
            continue
        order = sorted(shards, key=lambda s: s.shard_offsets[dim])
        sizes = torch.Size(
            max((s.shard_offsets[d] + s.shard_sizes[d] for s in shards if s.shard_sizes[d]), default=0)
            for d in range(len(shards[0].shard_sizes))
        )
        spec = ChunkShardingSpec(dim, [s.placement for s in order])  # type: ignore[misc]
        if spec.build_metadata(sizes, TensorProperties()).shards_metadata == order:
            return spec
    return EnumerableShardingSpec(shards)
