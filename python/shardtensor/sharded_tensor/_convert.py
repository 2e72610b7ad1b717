"""ShardTensor to ShardedTensor and back: shares the memory if both can describe the same boxes, else one exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor as StockShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.remote_device import _remote_device
from torch.distributed.tensor.placement_types import Placement, Replicate
from torch.distributed.tensor.placement_types import Shard as ShardPlacement

import shardtensor._C as _C
from shardtensor.sharded_tensor._move import Box, carrier_of, group_of, move, require_member
from shardtensor.sharded_tensor._spec import ChunkShardingSpec, ShardingSpec, own_spec
from shardtensor.sharded_tensor._tensor import ShardedTensor, _device_types, _with_spec
from shardtensor.tensor._factories import _full_layout
from shardtensor.tensor._from_local import coordinate_at
from shardtensor.tensor._layout import ShardingShapes, make_layout
from shardtensor.tensor._mesh import as_device_mesh, group_mesh
from shardtensor.tensor._pieces import _nothing_of, _refuse_summands, box_views
from shardtensor.tensor._tensor import ShardTensor


def _layout_boxes(layout: _C.Layout, sizes: list[int], replicas: bool) -> list[Box]:
    """All ranks' boxes; of replicas, all of them (`replicas`) or only the first rank's."""
    out = []
    for index, rank in enumerate(layout.mesh.ranks):
        coordinate = coordinate_at(layout.mesh, index)
        first = all(c == 0 for c, (kind, *_) in zip(coordinate, layout.placements, strict=True) if kind == 0)
        if replicas or first:
            out += [(rank, offsets, lengths) for offsets, lengths in layout.boxes(sizes, coordinate)]
    return out


# ---- to ----


def to_sharded(t: ShardTensor, spec: ShardingSpec | None, process_group: ProcessGroup | None) -> ShardedTensor:
    layout, me = t._layout, dist.get_rank()
    _refuse_summands(layout, "ShardTensor.to_sharded_tensor: a tensor")
    group = process_group if process_group is not None else _group_of_mesh(layout.mesh)
    require_member(group, "ShardTensor.to_sharded_tensor")
    piece = t._local_tensor.detach()

    def shard(box: Box) -> ShardMetadata:
        rank, offsets, lengths = box
        device = piece.device if rank == me else torch.device(piece.device.type)
        return ShardMetadata(offsets, lengths, _remote_device(f"rank:{rank}/{device}"))

    boxes = _layout_boxes(layout, list(t.shape), replicas=False)
    properties = TensorProperties(t.dtype, torch.strided, t.requires_grad, torch.contiguous_format, piece.is_pinned())
    metadata = ShardedTensorMetadata([shard(box) for box in boxes], t.size(), properties)
    found, metadata = _chunks(layout, metadata) or _with_spec(metadata, None)
    held = {(*offsets, *view.shape): view for offsets, view in box_views(piece, layout, list(t.shape))}
    shards = []
    for s in metadata.shards_metadata:
        if s.placement is not None and s.placement.rank() == me:
            tensor = held.get((*s.shard_offsets, *s.shard_sizes), piece)  # an empty chunk has another offset
            shards.append(Shard(tensor.contiguous().detach().requires_grad_(t.requires_grad), s))
    out = ShardedTensor._make(found, metadata, shards, group)
    if spec is None:
        return out
    with torch.no_grad():
        return out.reshard(spec)


def _group_of_mesh(mesh: _C.Mesh) -> ProcessGroup:
    if len(mesh.shape) == 1 and mesh.groups[0]:
        return dist.distributed_c10d._resolve_process_group(mesh.groups[0])  # type: ignore[arg-type, attr-defined, no-any-return]
    group = group_of(None)
    if sorted(mesh.ranks) != list(range(dist.get_world_size())):
        raise ValueError(
            f"ShardTensor.to_sharded_tensor: argument 'process_group': {mesh} has no group of all its ranks; pass one (rank {mesh.rank})"
        )
    return group


def _chunks(layout: _C.Layout, metadata: ShardedTensorMetadata) -> tuple[ShardingSpec, ShardedTensorMetadata] | None:
    """If the pieces are even and in order, returns a ChunkShardingSpec, which gives empty chunks other offsets."""
    if len(layout.placements) != 1 or not layout.is_sharded or not layout.is_even:
        return None
    spec = ChunkShardingSpec(layout.placements[0][1], [s.placement for s in metadata.shards_metadata])  # type: ignore[misc]
    made = spec.build_metadata(metadata.size, metadata.tensor_properties)
    pairs = zip(made.shards_metadata, metadata.shards_metadata, strict=True)
    alike = all(a.shard_sizes == b.shard_sizes and (a.shard_offsets == b.shard_offsets or not all(a.shard_sizes)) for a, b in pairs)
    return (spec, made) if alike else None


# ---- from ----


def from_sharded(
    t: Any, device_mesh: DeviceMesh | None, placements: Sequence[Placement] | None, sharding_shapes: ShardingShapes | None
) -> ShardTensor:
    who = "ShardTensor.from_sharded_tensor"
    if isinstance(t, StockShardedTensor):
        t = ShardedTensor._make(own_spec(t.sharding_spec()), t.metadata(), t.local_shards(), t._process_group)
    if not isinstance(t, ShardedTensor):
        raise TypeError(f"{who}: argument 'sharded_tensor' is {type(t).__name__}, not a ShardedTensor")
    group, sizes = t._process_group, list(t.size())
    require_member(group, who)
    devices = _device_types(t.metadata().shards_metadata)
    if device_mesh is None:
        device_mesh = as_device_mesh(group_mesh(group, carrier_of(group, devices).type))
    held = [box for box in t._boxes() if all(box[2])]
    if placements is not None:
        layout = _full_layout(device_mesh, placements, sizes, sharding_shapes, who)
    else:
        layout = _layout_of(held, sizes, device_mesh, who) or _even_layout(device_mesh, len(sizes), who)
    outside = sorted(set(layout.mesh.ranks) - set(dist.get_process_group_ranks(group)))
    if outside:
        raise ValueError(f"{who}: argument 'device_mesh': ranks {outside} are not in the ShardedTensor's process group")
    local = _pieces_as_local(t, held, layout, sizes, devices | {device_mesh.device_type})
    out = _C.wrap(local, layout, sizes, list(t.stride()))
    return out.requires_grad_(t.requires_grad)  # type: ignore[return-value]


def _pieces_as_local(t: ShardedTensor, held: list[Box], layout: _C.Layout, sizes: list[int], devices: set[str]) -> torch.Tensor:
    """This rank's piece under the layout: its shard, if on all ranks the shard is the same box; else the values are moved."""
    me = dist.get_rank()
    wanted = [box for box in _layout_boxes(layout, sizes, replicas=True) if all(box[2])]
    ranks = [rank for rank, *_ in wanted]
    one_each = len(set(ranks)) == len(ranks) and len(devices) == 1
    if one_each and sorted(held) == sorted(wanted):
        mine = [s.tensor.detach() for s in t.local_shards() if s.tensor.numel()]
    else:
        mine = move(t._pieces(), t._boxes(), wanted, t._process_group, t.dtype, devices)
    device = torch.device(layout.mesh.device_type)
    if device.type not in ("cpu", "meta"):
        device = torch.device(device.type, torch.accelerator.current_device_index())
    if not layout.mesh.has_this_rank:
        return _nothing_of(torch.empty(0, dtype=t.dtype, device=device))
    if len(mine) == 1:
        return mine[0].to(device)
    local = torch.empty(layout.local_sizes(sizes), dtype=t.dtype, device=device)
    views = {tuple(offsets): view for offsets, view in box_views(local, layout, sizes) if view.numel()}
    for piece, (_, offsets, _) in zip(mine, [box for box in wanted if box[0] == me], strict=True):
        views[tuple(offsets)].copy_(piece)
    return local


def _layout_of(held: list[Box], sizes: list[int], mesh: DeviceMesh, who: str) -> _C.Layout | None:
    """The layout that describes the boxes, if there is one: one dim cut in the order of the ranks."""
    ranks = mesh.mesh.flatten().tolist()
    for dim in range(len(sizes)) if mesh.ndim == 1 else ():
        lengths = {rank: lengths[dim] for rank, _, lengths in held}
        cut = [lengths.get(rank, 0) for rank in ranks]
        layout = make_layout(mesh, [ShardPlacement(dim)], len(sizes), [cut], who=who) if sum(cut) == sizes[dim] else None
        if layout is not None and sorted(held) == sorted(b for b in _layout_boxes(layout, sizes, replicas=True) if all(b[2])):
            return layout
    return None


def _even_layout(mesh: DeviceMesh, ndim: int, who: str) -> _C.Layout:
    rest = [Replicate()] * (mesh.ndim - bool(ndim))
    return make_layout(mesh, [*([ShardPlacement(0)] if ndim else []), *rest], ndim, who=who)


# ---- a sharded embedding, computed by a ShardTensor ----


def embedding(
    input: torch.Tensor,
    weight: ShardedTensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """The rows at this rank's indices. Every rank of the group calls it with its own indices; gradients reach the shards."""
    who, group, sizes = "embedding of a ShardedTensor", weight._process_group, list(weight.size())
    require_member(group, who)
    mesh = as_device_mesh(group_mesh(group, carrier_of(group, _device_types(weight.metadata().shards_metadata)).type))
    layout = _layout_of([box for box in weight._boxes() if all(box[2])], sizes, mesh, who)
    if layout is None:
        raise NotImplementedError(f"{who}: {weight.sharding_spec()} does not cut one dim in order of rank; reshard it first")
    if max_norm is not None:
        raise NotImplementedError(f"{who}: argument 'max_norm' would write to rows that other ranks hold; scale the weight yourself")
    mine = [shard.tensor for shard in weight.local_shards() if shard.tensor.numel()]
    if not mine:  # no rows, but the rank takes part in the backward
        mine = [torch.empty(layout.local_sizes(sizes), dtype=weight.dtype, device=mesh.device_type, requires_grad=weight.requires_grad)]
    rows = _C.from_local(mine[0], layout, sizes, None, None)
    ids = ShardTensor.from_local(input, mesh, [ShardPlacement(0)], sharding_shapes="infer")
    cut = {m: [shape[0] for shape in shapes] for m, shapes in ids.sharding_shapes().items()}
    out: Any = torch.nn.functional.embedding(ids, rows, padding_idx, None, norm_type, scale_grad_by_freq, sparse)
    return out.redistribute(placements=[ShardPlacement(0)], sharding_shapes=cut).to_local()  # type: ignore[no-any-return]
