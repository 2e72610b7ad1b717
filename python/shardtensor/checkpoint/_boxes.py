"""torch's checkpoint protocol: which boxes of a ShardTensor this rank writes and reads, for cuts of any sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardtensor.shards._shards import wrapper_of
from shardtensor.tensor._pieces import _refuse_summands, box_views
from shardtensor.tensor._tensor import ShardTensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


def chunks(t: ShardTensor) -> list[ChunkStorageMetadata]:
    """This rank's boxes: none if it has no elements; one empty box if no rank has elements."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # noqa: PLC0415  slow

    layout, wrapper = t._layout, wrapper_of(t)
    _refuse_summands(layout, "checkpoint: a tensor")
    if wrapper is not None:
        return [chunk for chunk in wrapper.local_chunks if all(chunk.sizes) or not t.numel()]
    return [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        for offsets, sizes in (layout.boxes(list(t.shape)) if layout.mesh.has_this_rank else [])
        if all(sizes) or not t.numel()
    ]


def write_items(t: ShardTensor, fqn: str, object: Any) -> list[WriteItem]:
    """One per box; ignores `object`. Replicas offer the same boxes, and torch's planner keeps one of each."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties  # noqa: PLC0415  slow
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType  # noqa: PLC0415  slow

    properties = TensorProperties.create_from_tensor(t._local_tensor)
    properties.requires_grad = t.requires_grad
    return [
        WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, t.size()))
        for chunk in chunks(t)
    ]


def box_at(t: ShardTensor, index: MetadataIndex) -> torch.Tensor:
    """The box that begins at index.offset, as a view of this rank's piece. A load writes into this view."""
    layout, piece, wrapper = t._layout, t._local_tensor.detach(), wrapper_of(t)
    _refuse_summands(layout, f"checkpoint: {index.fqn!r}")
    if wrapper is not None:
        return wrapper.__get_tensor_shard__(index).detach()
    boxes = box_views(piece, layout, list(t.shape))
    if index.offset is None and len(boxes) == 1:
        return piece
    starts = None if index.offset is None else list(index.offset)
    for offsets, box in boxes:
        if offsets == starts:
            return box
    raise ValueError(
        f"checkpoint: no box of {index.fqn!r} begins at {starts} on rank {layout.mesh.rank}, which holds "
        f"{layout.boxes(list(t.shape)) or 'nothing'} of {layout}"
    )
