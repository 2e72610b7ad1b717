"""The same plain weights on all ranks."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import shardtensor._C as _C
from shardtensor.tensor._from_local import from_everyone
from shardtensor.tensor._mesh import as_mesh, device_of

_MOST = 1 << 26  # bytes that are sent at a time


@torch.no_grad()
def sync_module_over_mesh(module: torch.nn.Module, mesh: DeviceMesh, src_mesh_rank: int = 0, verify: bool = False) -> None:
    """Gives all ranks of a 1-d mesh the plain parameters and buffers that the `src_mesh_rank`-th has. ShardTensors and DTensors stay.

    Gradients need no such call: those of plain weights among ShardTensors are summed over the mesh. verify: compares the values
    afterwards; that names, sizes and dtypes agree is checked in any case.
    """
    who = "sync_module_over_mesh"
    view = as_mesh(mesh)
    if len(view.shape) != 1:
        raise ValueError(f"{who}: argument 'mesh' has {len(view.shape)} dims; pass the one along which ranks have the same weights, as mesh['domain']")
    if not 0 <= src_mesh_rank < view.shape[0]:
        raise ValueError(f"{who}: argument 'src_mesh_rank' is {src_mesh_rank}; the mesh has ranks 0 to {view.shape[0] - 1}")
    named = [(n, t.detach()) for n, t in itertools.chain(module.named_parameters(), module.named_buffers()) if not isinstance(t, DTensor)]
    wrong = [name for name, t in named if t.is_meta or t.device.type != view.device_type]
    about = [(name, tuple(t.shape), str(t.dtype)) for name, t in named]
    told = from_everyone([bool(wrong), zlib.crc32(repr(about).encode())], view, device_of(mesh))
    if wrong:
        raise RuntimeError(f"{who}: {wrong} are not on the mesh's device, {view.device_type}; move the module there first (rank {view.rank})")
    for rank, (others, digest) in zip(view.ranks, told, strict=True):
        if others:
            raise RuntimeError(f"{who}: rank {rank} has tensors that are not on the mesh's device (rank {view.rank})")
        if digest != told[0][1]:
            raise RuntimeError(f"{who}: names, sizes or dtypes differ between ranks {view.ranks[0]} and {rank}; here they are {about} (rank {view.rank})")
    if not named and any(True for _ in itertools.chain(module.parameters(), module.buffers())):
        raise RuntimeError(f"{who}: the module has no plain tensors; call it before they are distributed (rank {view.rank})")
    for together in _buckets([t for _, t in named]):
        flat = torch.cat([t.reshape(-1) for t in together])
        _C.broadcast(flat, view, 0, src_mesh_rank)
        for t, part in zip(together, flat.split([t.numel() for t in together]), strict=True):  # type: ignore[no-untyped-call]
            t.copy_(part.view(t.shape))
    if verify:
        values = [int(torch.hash_tensor(t.contiguous().reshape(-1).view(torch.uint8))) if t.numel() else 0 for _, t in named]
        told = from_everyone([zlib.crc32(repr(values).encode())], view, device_of(mesh))
        for rank, (digest,) in zip(view.ranks, told, strict=True):
            if digest != told[0][0]:
                raise RuntimeError(f"{who}: values differ between ranks {view.ranks[0]} and {rank} (rank {view.rank})")


def _buckets(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors of one dtype, together no larger than _MOST unless one alone is."""
    for _, of_dtype in itertools.groupby(sorted(tensors, key=lambda t: str(t.dtype)), key=lambda t: t.dtype):
        bucket: list[torch.Tensor] = []
        for t in of_dtype:
            if bucket and sum(b.nbytes for b in bucket) + t.nbytes > _MOST:
                yield bucket
                bucket = []
            bucket.append(t)
        yield bucket
