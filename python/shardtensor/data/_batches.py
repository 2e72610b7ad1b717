"""The batches of each rank's loader as ShardTensors.

Before a batch is handed out, the next one is taken from the loader and described to the other ranks. So the ranks' messages
travel while the batch is computed, and all ranks know alike whether to go on, whether to raise, and all pieces' sizes.
"""

from __future__ import annotations

import itertools
import pickle
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard
from torch.utils.data import DistributedSampler

import shardtensor._C as _C
from shardtensor.data._messages import ENDED, FAILED, LIVE, About, Exchange, Message, about
from shardtensor.data._structure import put_together, replaced, take_apart, without_rows
from shardtensor.data._where import check_placements, dim_of_rows
from shardtensor.tensor._from_local import _layout_from_shapes, coordinate_at
from shardtensor.tensor._layout import make_layout
from shardtensor.tensor._mesh import as_mesh, device_of

_WHO = "shard_batches"


def shard_batches(loader: Iterable[Any], mesh: DeviceMesh, placements: Sequence[Placement] | None = None) -> Iterable[Any]:
    """The batches of all ranks' loaders, joined: each tensor of a batch becomes a ShardTensor whose piece is this rank's batch.

    The pieces may have any sizes. A rank whose loader has ended gets empty pieces until all have ended, so all ranks make the
    same number of steps, and the mean over a batch is the mean over the rows of all ranks. Each `for` over the result is an
    epoch. All ranks of the mesh must take the same number of batches.

    A batch is a tensor, or tuples, lists, dicts and dataclasses with tensors in them, of the same structure on all ranks; sizes
    other than those of the rows must agree. Tensors move to the mesh's device. Other values, and tensors without dims, stay as
    they are; a rank that has ended gets those of the first rank that has not, with lists of one entry per row empty.

    placements: one per mesh dim. Shard(0), the default on a mesh of one dim, joins the rows of the ranks along it. Ranks along
    Replicate() must see the same batches; the first ones of each epoch are compared. After the first, a Shard of another dim
    joins along that dim (sequences cut over ranks), and tensors that lack the dim count as the same on these ranks.
    """
    return _Batches(loader, mesh, check_placements(mesh, placements, _WHO))


class _Taken(NamedTuple):
    """The batch that a rank has taken from its loader."""

    message: Message
    frame: Any = None
    paths: Sequence[str] = ()
    tensors: Sequence[torch.Tensor] = ()
    error: Exception | None = None


class _Joined(NamedTuple):
    """How the pieces of one tensor lie on the ranks."""

    layout: _C.Layout
    sizes: list[int]
    strides: list[int]
    empty: About  # an empty piece, for a rank that has ended


class _Batches:
    def __init__(self, loader: Iterable[Any], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
        self._loader, self._mesh, self._placements = loader, mesh, placements
        self._view, self._device, self._rows = as_mesh(mesh), device_of(mesh), dim_of_rows(placements)
        cuts_rows = [isinstance(p, Shard) and p.dim == self._rows for p in placements]
        self._together = [m for m, cuts in enumerate(cuts_rows) if not cuts and self._view.shape[m] > 1]  # ranks along them end together
        _warn_of_repeats(loader)

    def __iter__(self) -> Iterator[Any]:
        exchange, source = Exchange(self._mesh), iter(self._loader)
        taken = self._take(source, first=True)
        arrive = exchange.start(taken.message)
        before: tuple[list[Message], list[_Joined]] = [], []
        while True:
            told = arrive()
            self._raise_failures(taken, told)
            live = [i for i, one in enumerate(told) if one.state == LIVE]
            if not live:
                return
            self._check_alike(told, live, taken)
            if before[0] != told:
                before = told, [self._join(told, live, i, taken.paths) for i in range(len(told[live[0]].tensors))]
            batch = self._batch(exchange, taken, told, live, before[1])
            taken = self._take(source, first=False) if taken.message.state == LIVE else taken
            arrive = exchange.start(taken.message)
            yield batch

    # ---- this rank's batch ----

    def _take(self, source: Iterator[Any], *, first: bool) -> _Taken:
        try:
            batch = next(source)
        except StopIteration:
            return _Taken(Message(ENDED))
        except Exception as error:
            return _failed(error)
        try:
            frame, paths, tensors = take_apart(batch)
            for path, t in zip(paths, tensors, strict=True):
                self._check_tensor(path, t)
            digest = zlib.crc32(repr((self._placements, paths)).encode())
            compare = first and bool(self._together)
            return _Taken(Message(LIVE, digest, tuple(about(t, compare) for t in tensors)), frame, paths, tensors)
        except Exception as error:
            return _failed(error)

    def _check_tensor(self, path: str, t: torch.Tensor) -> None:
        if isinstance(t, DTensor):
            raise TypeError(f"{_WHO}: {_named(path)} is a {type(t).__name__} already; give the rank's own rows (rank {self._view.rank})")
        if t.layout != torch.strided or t.is_nested:
            raise NotImplementedError(f"{_WHO}: {_named(path)} is {t.layout}, not a dense tensor (rank {self._view.rank})")
        if self._rows is not None and t.ndim <= self._rows:
            raise ValueError(f"{_WHO}: {_named(path)} has sizes {list(t.shape)}, but its rows should be along dim {self._rows} (rank {self._view.rank})")

    # ---- what all ranks decide alike, from all messages ----

    def _raise_failures(self, taken: _Taken, told: list[Message]) -> None:
        if taken.error is not None:
            raise taken.error
        for index, one in enumerate(told):
            if one.state == FAILED:
                raise RuntimeError(f"{_WHO}: the loader of rank {self._view.ranks[index]} raised {one.error} (reported by rank {self._view.rank})")

    def _check_alike(self, told: list[Message], live: list[int], taken: _Taken) -> None:
        ranks, rank = self._view.ranks, self._view.rank
        first = told[live[0]]
        for index in live:
            if told[index].digest != first.digest:
                here = f"tensors {list(taken.paths)}, placements {self._placements}"
                raise ValueError(
                    f"{_WHO}: the batches, or the argument 'placements', have another structure on rank {ranks[index]} than on rank "
                    f"{ranks[live[0]]} (rank {rank}: {here})"
                )
        for m, (index, one) in itertools.product(self._together, enumerate(told)):
            beside = self._beside(index, m)
            if one.state != told[beside].state:
                ended, going = (index, beside) if one.state == ENDED else (beside, index)
                raise ValueError(
                    f"{_WHO}: the loader of rank {ranks[ended]} has ended, the one of rank {ranks[going]} has not, but mesh dim {m} does not "
                    f"split the rows: {_ALONG} (rank {rank})"
                )

    def _beside(self, index: int, mesh_dim: int) -> int:
        """The index in the mesh of the first rank along `mesh_dim` from the rank at `index`."""
        coordinate = coordinate_at(self._view, index)
        coordinate[mesh_dim] = 0
        return self._index(coordinate)

    def _index(self, coordinate: Sequence[int]) -> int:
        index = 0
        for c, n in zip(coordinate, self._view.shape, strict=True):
            index = index * n + c
        return index

    def _join(self, told: list[Message], live: list[int], i: int, paths: Sequence[str]) -> _Joined:
        """The layout of the i-th tensor of the batch."""
        first = told[live[0]].tensors[i]
        ndim, name = len(first.shape), _named(paths[i]) if paths else f"tensor {i} of the batch"
        placements = [p if isinstance(p, Shard) and p.dim < ndim else Replicate() for p in self._placements]
        held = {index: told[index].tensors[i] for index in live}
        self._check_kinds(held, name)
        self._check_replicas(held, name, [m for m, p in enumerate(placements) if isinstance(p, Replicate)])
        self._check_sizes(held, name, {p.dim for p in placements if isinstance(p, Shard)})
        shapes = [list(one.tensors[i].shape) if one.state == LIVE else self._empty(told, live, i, at) for at, one in enumerate(told)]
        layout, sizes = _layout_from_shapes(shapes, make_layout(self._mesh, placements, ndim, who=_WHO), self._mesh, placements, _WHO)
        like = torch.empty_strided([2] * ndim, first.order, device="meta")
        mine = self._index(self._view.coordinate)
        empty = About(first.dtype, first.records, 0, tuple(shapes[mine]), first.order)
        return _Joined(layout, sizes, _C.strides_like(sizes, like), empty)

    # Their `held` is one tensor's description, by the index of each rank that has a batch.

    def _check_kinds(self, held: dict[int, About], name: str) -> None:
        first = next(iter(held.values()))
        for index, one in held.items():
            for what, a, b in ((name, one.dtype, first.dtype), (f"requires_grad of {name}", one.records, first.records)):
                if a != b:
                    raise ValueError(f"{_WHO}: {what} is {a} {self._where(index, held, b)}")

    def _check_replicas(self, held: dict[int, About], name: str, mesh_dims: list[int]) -> None:
        for m, (index, one) in itertools.product(mesh_dims, held.items()):
            beside = self._beside(index, m)
            other = held[beside]
            if one.shape != other.shape or one.values != other.values:
                what = "values" if one.shape == other.shape else "sizes"
                raise ValueError(
                    f"{_WHO}: {name} has other {what} on rank {self._view.ranks[index]} than on rank {self._view.ranks[beside]}, but is "
                    f"replicated along mesh dim {m}: {_ALONG} (rank {self._view.rank})"
                )

    def _check_sizes(self, held: dict[int, About], name: str, cut: set[int]) -> None:
        first = next(iter(held.values()))
        for index, one in held.items():
            whole = [[n for d, n in enumerate(t.shape) if d not in cut] for t in (one, first)]
            if len(one.shape) != len(first.shape) or whole[0] != whole[1]:
                raise ValueError(
                    f"{_WHO}: {name} has sizes {list(one.shape)} {self._where(index, held, list(first.shape))}; sizes along dims that "
                    "are not cut must agree: where a loader pads, let it pad to the same length on all ranks"
                )

    def _where(self, index: int, held: dict[int, About], of_first: object) -> str:
        ranks = self._view.ranks
        return f"on rank {ranks[index]}, {of_first} on rank {ranks[next(iter(held))]} (reported by rank {self._view.rank})"

    def _empty(self, told: list[Message], live: list[int], i: int, index: int) -> list[int]:
        """The shape of an empty piece on the rank at `index`: no rows; other cut dims have the sizes of a rank in line with it."""
        shape = list(told[live[0]].tensors[i].shape)
        at = coordinate_at(self._view, index)
        for dim in {p.dim for p in self._placements if isinstance(p, Shard) and p.dim < len(shape)} - {self._rows}:
            axes = [m for m, p in enumerate(self._placements) if isinstance(p, Shard) and p.dim == dim]
            for other in live:
                coordinate = coordinate_at(self._view, other)
                if all(coordinate[m] == at[m] for m in axes):
                    shape[dim] = told[other].tensors[i].shape[dim]
                    break
        if self._rows is not None:
            shape[self._rows] = 0
        return shape

    # ---- the batch of all ranks ----

    def _batch(self, exchange: Exchange, taken: _Taken, told: list[Message], live: list[int], joined: list[_Joined]) -> Any:
        frame, tensors = taken.frame, taken.tensors
        if len(live) < len(told):  # the others need a frame
            sent = self._send_frame(exchange, taken, told, live[0])
            if taken.message.state != LIVE:
                frame = sent
                tensors = [_empty_piece(how.empty, self._device) for how in joined]
        pieces = [self._piece(t, how) for t, how in zip(tensors, joined, strict=True)]
        frame = replaced(lambda _, t: t.to(self._device, non_blocking=True) if isinstance(t, torch.Tensor) else t, frame)
        return put_together(frame, pieces)

    def _piece(self, t: torch.Tensor, how: _Joined) -> torch.Tensor:
        t = t.to(self._device, non_blocking=True)
        if tuple(_C.strides_like([2] * t.ndim, t)) != how.empty.order:
            inner = sorted(range(t.ndim), key=lambda d: -how.empty.order[d])
            t = t.permute(inner).contiguous().permute([inner.index(d) for d in range(t.ndim)])
        return _C.from_local(t, how.layout, how.sizes, how.strides)

    def _send_frame(self, exchange: Exchange, taken: _Taken, told: list[Message], source: int) -> Any:
        """From the first rank that has a batch, to those that have none."""
        data = b""
        if self._view.coordinate == coordinate_at(self._view, source):
            rows = taken.tensors[0].size(self._rows or 0) if taken.tensors else -1
            frame = replaced(lambda _, t: t.cpu() if isinstance(t, torch.Tensor) else t, without_rows(taken.frame, rows))
            try:
                data = pickle.dumps(frame)
            except Exception as error:
                data = pickle.dumps(_Unsendable(repr(error)))
        frame = pickle.loads(exchange.from_one(data, coordinate_at(self._view, source)))
        if isinstance(frame, _Unsendable):
            ended = [self._view.ranks[i] for i, one in enumerate(told) if one.state == ENDED]
            raise RuntimeError(
                f"{_WHO}: ranks {ended} have ended and need what is not a tensor in the batch of rank {self._view.ranks[source]}, but it cannot "
                f"be pickled: {frame.why} (rank {self._view.rank})"
            )
        return frame


class _Unsendable(NamedTuple):
    why: str


_ALONG = "ranks along it must see the same rows; ShardSampler(mesh=..., placements=...) gives them the same samples"


def _named(path: str) -> str:
    return f"tensor '{path}' of the batch" if path else "the batch"


def _failed(error: Exception) -> _Taken:
    return _Taken(Message(FAILED, error=f"{type(error).__name__}: {error}"[:500]), error=error)


def _empty_piece(like: About, device: torch.device) -> torch.Tensor:
    inner = sorted(range(len(like.shape)), key=lambda d: -like.order[d])
    t = torch.empty([like.shape[d] for d in inner], dtype=getattr(torch, like.dtype.removeprefix("torch.")), device=device)
    return t.permute([inner.index(d) for d in range(len(inner))]).requires_grad_(like.records)


def _warn_of_repeats(loader: Any) -> None:
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler) and sampler.total_size > len(sampler.dataset):  # type: ignore[arg-type]
        warnings.warn(
            f"{_WHO}: the loader's DistributedSampler repeats {sampler.total_size - len(sampler.dataset)} samples to make the ranks' parts "  # type: ignore[arg-type]
            "equal, and a mean counts them twice; shardtensor.data.ShardSampler repeats none",
            stacklevel=3,
        )
