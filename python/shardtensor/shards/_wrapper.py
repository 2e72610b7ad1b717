"""LocalShardsWrapper: this rank's shards of a larger tensor as one tensor, for checkpoints and embedding tables.

It is a subclass of torch's class, so that isinstance checks succeed, but uses none of its code. Ops run shard by shard if that
gives the same result as on the larger tensor, and raise otherwise.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper as _Stock
from torch.utils import _pytree as pytree

import shardtensor._C as _C
from shardtensor._late import first_use
from shardtensor.shards._ops import is_in_place, is_on_lists, on_each, on_each_of_lists, runs_shard_by_shard, sizes_meant, written
from shardtensor.tensor._tensor import _rebuild_shards

aten = torch.ops.aten
functional = torch.ops._c10d_functional


class LocalShardsWrapper(_Stock):
    """Shards of one larger tensor, and the offset of each in it.

    For an empty list, `ndim`, `dtype` and `device` describe the other ranks' shards.
    """

    # Without shards: an empty tensor like the other ranks' shards, and whether its device was passed in.
    _nothing: torch.Tensor | None
    _is_told: bool

    @staticmethod
    def __new__(
        cls,
        local_shards: list[torch.Tensor],
        local_offsets: Sequence[Sequence[int]],
        *,
        ndim: int = 2,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> LocalShardsWrapper:
        first_use()
        _check(local_shards, local_offsets)
        nothing = None if local_shards else torch.empty([0] * ndim, dtype=dtype, device=device or "cpu")
        like = local_shards[0] if nothing is None else nothing
        chunks = [
            ChunkStorageMetadata(torch.Size(int(o) for o in offsets), shard.size())
            for shard, offsets in zip(local_shards, local_offsets, strict=True)
        ]
        size = torch.Size(_joint_sizes(chunks)) if chunks else like.size()
        out = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, size, strides=_C.strides_like(size, like), dtype=like.dtype, device=like.device
        )
        out._local_shards = local_shards
        out._storage_meta = TensorStorageMetadata(TensorProperties.create_from_tensor(like), size, chunks)
        out._nothing, out._is_told = nothing, device is not None
        return out  # type: ignore[no-any-return]

    # ---- the shards ----

    def local_shards(self) -> list[torch.Tensor]:
        """This rank's shards: the list that was passed in, not a copy."""
        return self._local_shards

    def local_sizes(self) -> list[torch.Size]:
        return [chunk.sizes for chunk in self._storage_meta.chunks]

    def local_offsets(self) -> list[torch.Size]:
        """Where each shard begins in the larger tensor."""
        return [chunk.offsets for chunk in self._storage_meta.chunks]

    @property
    def local_chunks(self) -> list[ChunkStorageMetadata]:
        """Offsets and sizes, per shard."""
        return self._storage_meta.chunks

    def storage_metadata(self) -> TensorStorageMetadata:
        return self._storage_meta

    def is_empty_shard(self) -> bool:
        """Whether this rank has no element."""
        return not any(shard.numel() for shard in self._local_shards)

    def like(self, shards: list[torch.Tensor]) -> LocalShardsWrapper:
        """A wrapper with other values at the same places. Without shards, the one tensor gives dtype and device."""
        if self._nothing is None:
            return LocalShardsWrapper(shards, self.local_offsets())
        (nothing,) = shards
        device = nothing.device if self._is_told or nothing.device != self._nothing.device else None
        return LocalShardsWrapper([], [], ndim=self.ndim, dtype=nothing.dtype, device=device)

    def parts(self) -> list[torch.Tensor]:
        """The shards; without shards, one empty tensor, on which ops behave as on shards."""
        return self._local_shards if self._nothing is None else [self._nothing]

    # ---- properties of a tensor ----

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The shards' device; without shards the one that was passed in, else meta."""
        known = self._nothing is None or self._is_told
        return self.parts()[0].device if known else torch.device("meta")

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return self.device.type == "meta"

    def is_pinned(self, device: Any = None) -> bool:  # type: ignore[override]
        return self._storage_meta.properties.pin_memory

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether autograd tracks the shards, or this tensor as the piece of a ShardTensor."""
        return self._storage_meta.properties.requires_grad or torch.Tensor.requires_grad.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    @property
    def data(self) -> LocalShardsWrapper:  # type: ignore[override]
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Module.to assigns `data` to change a parameter."""
        new = as_ours(value)
        torch.Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self._local_shards, self._storage_meta = new._local_shards, new._storage_meta
        self._nothing, self._is_told = new._nothing, new._is_told

    def requires_grad_(self, requires_grad: bool = True) -> LocalShardsWrapper:
        for shard in self._local_shards:
            shard.requires_grad_(requires_grad)
        self._storage_meta.properties.requires_grad = requires_grad
        return self

    def share_memory_(self) -> LocalShardsWrapper:  # type: ignore[override]
        for shard in self._local_shards:
            shard.share_memory_()  # type: ignore[no-untyped-call]
        return self

    def is_shared(self) -> bool:
        return all(shard.is_shared() for shard in self._local_shards)  # type: ignore[no-untyped-call]

    def _get_tensor_size_bytes(self) -> int:
        return sum(shard.nelement() * shard.element_size() for shard in self._local_shards)

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shards = ", ".join(f"{list(c.offsets)}: {s}" for s, c in zip(self._local_shards, self.local_chunks, strict=True))
        return f"LocalShardsWrapper({{{shards}}}, dtype={self.dtype}, device={self.device})"

    __str__ = __repr__

    # ---- copies and files ----

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalShardsWrapper:
        if id(self) not in memo:
            memo[id(self)] = self.like([copy.deepcopy(part, memo) for part in self.parts()])
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        told = (self.ndim, self.dtype, self.device if self._is_told else None) if self._nothing is not None else None
        return _rebuild_shards, (self._local_shards, [tuple(o) for o in self.local_offsets()], told)

    # ---- torch.distributed.checkpoint ----

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """One per shard; the file records the sizes of `object`: the DTensor around this wrapper, or this wrapper."""
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, self._storage_meta.properties, object.size()),
            )
            # An empty shard may have the offset of another rank's shard; torch's planner would keep only one of the two.
            for chunk in self.local_chunks
            if all(chunk.sizes) or not object.numel()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self.local_chunks

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        starts = self.local_offsets()
        if index.index is not None and index.index < len(starts) and starts[index.index] == index.offset:
            return self._local_shards[index.index]
        if index.offset in starts:
            return self._local_shards[starts.index(index.offset)]
        if self._nothing is not None:
            return torch.empty(0)
        raise ValueError(
            f"Could not find shard at '{index.offset}' for FQN: '{index.fqn}'; this rank's begin at {[list(s) for s in starts]}"
        )

    # ---- ops ----

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        our_args, our_kwargs = pytree.tree_map_only(_Stock, as_ours, (args, kwargs))
        if func in _OWN:
            return _OWN[func](*our_args, **our_kwargs)
        if not runs_shard_by_shard(func):
            raise NotImplementedError(
                f"{func} is not supported for LocalShardsWrapper! It would take the shards for one dense tensor; "
                "use local_shards(), one by one"
            )
        out = (on_each_of_lists if is_on_lists(func) else on_each)(func, our_args, our_kwargs)
        return written(func, args, kwargs) if is_in_place(func) else out


def as_ours(local: Any) -> LocalShardsWrapper:
    """Converts torch's class to this one: the same shards, no copy."""
    if isinstance(local, LocalShardsWrapper):
        return local
    shards = local.local_shards()
    return LocalShardsWrapper(shards, local.local_offsets() if shards else [])


def _check(shards: Sequence[torch.Tensor], offsets: Sequence[Sequence[int]]) -> None:
    who = "LocalShardsWrapper"
    if len(shards) != len(offsets):
        raise ValueError(f"{who}: argument 'local_offsets' has {len(offsets)} entries for {len(shards)} local_shards")
    for i, (shard, start) in enumerate(zip(shards, offsets, strict=True)):
        for what in ("device", "dtype", "ndim"):
            if getattr(shard, what) != getattr(shards[0], what):
                raise ValueError(
                    f"{who}: argument 'local_shards': {what} {getattr(shard, what)} of shard {i} differs from the first's, "
                    f"{getattr(shards[0], what)}"
                )
        if len(start) != shard.ndim or any(o < 0 for o in start):
            raise ValueError(
                f"{who}: argument 'local_offsets': {[int(o) for o in start]} is not a valid offset for shard {i}, of sizes {list(shard.shape)}"
            )


def _joint_sizes(chunks: list[ChunkStorageMetadata]) -> list[int]:
    """The sizes of all shards together.

    If the shards form rows, columns or a grid (all combinations of some ranges per dim), their ranges add up per dim.
    Otherwise, as in torch: the first shard's sizes, with all widths added up.
    """
    ndim = len(chunks[0].sizes)
    ranges = [{(c.offsets[d], c.sizes[d]) for c in chunks} for d in range(ndim)]
    places = {tuple(zip(c.offsets, c.sizes, strict=True)) for c in chunks}
    if len(places) == len(chunks) == math.prod(len(r) for r in ranges):
        return [sum(length for _, length in r) for r in ranges]
    sizes = list(chunks[0].sizes)
    along = min(1, ndim - 1)
    sizes[along] = sum(c.sizes[along] for c in chunks)
    return sizes


# ---- ops that do not run shard by shard ----


def _view(w: LocalShardsWrapper, size: Sequence[int]) -> LocalShardsWrapper:
    want = sizes_meant(size, w.numel())
    if want == list(w.shape):
        return w.like([aten.view.default(part, part.shape) for part in w.parts()])
    (shard, *more), starts = w.parts(), w.local_offsets()
    if more or any(any(start) for start in starts):
        raise NotImplementedError(
            f"aten.view.default to {want} is not supported for LocalShardsWrapper of {len(starts)} shards at "
            f"{[list(s) for s in starts]}: their offsets would be unknown; view local_shards(), one by one"
        )
    viewed = aten.view.default(shard, want)
    if not starts:
        return LocalShardsWrapper([], [], ndim=len(want), dtype=w.dtype, device=w._nothing.device if w._is_told else None)  # type: ignore[union-attr]
    return LocalShardsWrapper([viewed], [(0,) * len(want)])


def _equal(a: Any, b: Any) -> bool:
    """Whether both have the same shards at the same places in the same order."""
    if not isinstance(a, LocalShardsWrapper) or not isinstance(b, LocalShardsWrapper):
        raise NotImplementedError("aten.equal.default is not supported for LocalShardsWrapper and a tensor of another kind")
    alike = a.local_chunks == b.local_chunks and a.dtype == b.dtype
    return alike and all(torch.equal(x, y) for x, y in zip(a.local_shards(), b.local_shards(), strict=True))


def _new_empty(w: LocalShardsWrapper, size: Sequence[int], **kwargs: Any) -> LocalShardsWrapper:
    if list(size) != list(w.shape):
        raise NotImplementedError(
            f"aten.new_empty.default of sizes {list(size)} is not supported for LocalShardsWrapper of sizes {list(w.shape)}: "
            "the offsets of its shards would be unknown"
        )
    return w.like([torch.empty_like(part, **kwargs) for part in w.parts()])


def _all_gather(w: LocalShardsWrapper, *args: Any) -> torch.Tensor:
    """Gathers the shards, one below the other."""
    widths = {tuple(part.shape[1:]) for part in w.parts()}
    if len(widths) > 1:
        raise NotImplementedError(
            "_c10d_functional.all_gather_into_tensor.default is not supported for LocalShardsWrapper whose shards have unequal "
            f"sizes beyond the first dim: {[list(s) for s in w.local_sizes()]}"
        )
    return functional.all_gather_into_tensor.default(torch.cat(w.parts()), *args)  # type: ignore[no-any-return]


def _wait(w: LocalShardsWrapper) -> LocalShardsWrapper:
    for shard in w.local_shards():
        functional.wait_tensor.default(shard)
    return w


_OWN: dict[Any, Callable[..., Any]] = {
    aten.is_pinned.default: LocalShardsWrapper.is_pinned,
    aten.view.default: _view,
    aten.equal.default: _equal,
    aten.new_empty.default: _new_empty,
    functional.all_gather_into_tensor.default: _all_gather,
    functional.wait_tensor.default: _wait,
}
