"""The ranks' messages about a batch, as integers, which travel while the previous batch is computed."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardtensor._C as _C
from shardtensor.tensor._from_local import _DTYPES, from_everyone
from shardtensor.tensor._layout import make_layout
from shardtensor.tensor._mesh import as_mesh, device_of

LIVE, ENDED, FAILED = range(3)
_HEAD = 3  # state, how many numbers follow, digest
_ROOM = 128  # numbers of a message that travel ahead; the rest of a longer one follows when all messages are there


@dataclass(frozen=True)
class About:
    """One tensor of a rank's batch."""

    dtype: str
    records: bool  # whether autograd records it
    values: int  # a digest of its values, 0 if they are not compared
    shape: tuple[int, ...]
    order: tuple[int, ...]  # strides that a dense tensor with its order of dims, and two entries in each, would have


@dataclass(frozen=True)
class Message:
    state: int
    digest: int = 0  # of the paths of the batch's tensors, and of the placements
    tensors: tuple[About, ...] = ()
    error: str = field(default="", compare=False)


def about(t: torch.Tensor, compare_values: bool) -> About:
    order = tuple(_C.strides_like([2] * t.ndim, t))
    return About(str(t.dtype), t.requires_grad and torch.is_grad_enabled(), _digest(t) if compare_values else 0, tuple(t.shape), order)


def _digest(t: torch.Tensor) -> int:
    """Of the values, row by row."""
    if t.numel() == 0:
        return 0
    t = t.detach().flatten(1) if t.ndim > 1 else t.detach().unsqueeze(1)
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj()).flatten(1)
    if t.is_floating_point() and t.itemsize == 1:
        t = t.contiguous().view(torch.uint8)
    return zlib.crc32(repr(torch.hash_tensor(t, dim=1).view(torch.int64).tolist()).encode())


def _encode(message: Message) -> list[int]:
    rest: list[int] = []
    for t in message.tensors:
        rest += [_DTYPES.index(t.dtype), t.records, t.values, len(t.shape), *t.shape, *t.order]
    if message.error:
        rest = _packed(message.error.encode())
    return [message.state, len(rest), message.digest, *rest]


def _decode(numbers: Sequence[int]) -> Message:
    state, length, digest, *rest = numbers
    rest = rest[:length]
    if state == FAILED:
        return Message(state, error=_unpacked(rest).decode(errors="replace"))
    tensors: list[About] = []
    while rest:
        dtype, records, values, ndim, *rest = rest
        tensors.append(About(_DTYPES[dtype], bool(records), values, tuple(rest[:ndim]), tuple(rest[ndim : 2 * ndim])))
        rest = rest[2 * ndim :]
    return Message(state, digest, tuple(tensors))


def _packed(data: bytes) -> list[int]:
    return [len(data), *(int.from_bytes(data[i : i + 7], "little") for i in range(0, len(data), 7))]


def _unpacked(numbers: Sequence[int]) -> bytes:
    return b"".join(n.to_bytes(7, "little") for n in numbers[1:])[: numbers[0]]


class Exchange:
    """Brings every rank's message to every rank of a mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh, self._view, self._device = mesh, as_mesh(mesh), device_of(mesh)
        self._apart, self._everywhere = (make_layout(mesh, [p] * mesh.ndim, 2, who="shard_batches") for p in (Shard(0), Replicate()))
        # On a stream of its own: reading the messages must not wait for the batch that is being computed.
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def start(self, message: Message) -> Callable[[], list[Message]]:
        """Sends this rank's message. What it returns waits for all messages, and gives them row-major over the mesh."""
        numbers = _encode(message)
        ahead = (numbers + [0] * _ROOM)[:_ROOM]
        arrived = self._gather(ahead)

        def finish() -> list[Message]:
            rows = arrived()
            longest = max(_HEAD + row[1] for row in rows)
            if longest > _ROOM:  # all ranks see this
                more = (numbers + [0] * longest)[_ROOM:longest]
                rows = [a + b for a, b in zip(rows, from_everyone(more, self._view, self._device), strict=True)]
            return [_decode(row) for row in rows]

        return finish

    def _gather(self, numbers: list[int]) -> Callable[[], list[list[int]]]:
        if self._stream is None:
            whole = self._moved(torch.tensor([numbers], device=self._device))
            return lambda: _C.local(whole).tolist()  # type: ignore[no-any-return]
        with torch.cuda.stream(self._stream):
            whole = self._moved(torch.tensor([numbers]).pin_memory().to(self._device, non_blocking=True))
            host = torch.empty(tuple(whole.shape), dtype=torch.int64, pin_memory=True)
            host.copy_(_C.local(whole), non_blocking=True)
            there = self._stream.record_event()

        def finish() -> list[list[int]]:
            there.synchronize()
            return host.tolist()  # type: ignore[no-any-return]

        return finish

    @torch.no_grad()
    def _moved(self, mine: torch.Tensor) -> torch.Tensor:
        sizes = [len(self._view.ranks), mine.size(1)]
        return _C.redistribute(_C.wrap(mine, self._apart, sizes, [sizes[1], 1]), self._everywhere, None, None, True)

    def from_one(self, data: bytes, source: list[int]) -> bytes:
        """The bytes of the rank at coordinate `source`, on all ranks."""
        mine = _packed(data)
        length = self._broadcast([len(mine)], source)[0]
        return _unpacked(self._broadcast((mine + [0] * length)[:length], source))

    def _broadcast(self, numbers: list[int], source: list[int]) -> list[int]:
        t = torch.tensor(numbers, device=self._device)
        for mesh_dim, coordinate in enumerate(source):
            _C.broadcast(t, self._view, mesh_dim, coordinate)
        return t.tolist()  # type: ignore[no-any-return]
