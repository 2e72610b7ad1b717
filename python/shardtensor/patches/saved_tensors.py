"""torch.autograd.graph: save_on_cpu and allow_mutation_on_saved_tensors for ShardTensors. All versions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import shardtensor._C as _C
from shardtensor.patches._patch import Patch
from shardtensor.tensor._tensor import ShardTensor


def _pieces_on_cpu(init: Callable[..., None]) -> Callable[..., None]:
    """save_on_cpu(pin_memory=True) copies into a plain tensor: here the piece is copied, and later wrapped again."""

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        pack, unpack = self.pack_hook, self.unpack_hook

        def pack_piece(t: torch.Tensor) -> Any:
            if not isinstance(t, ShardTensor):
                return None, pack(t)
            return (t._layout, list(t.shape), list(t.stride())), pack(t._local_tensor)

        def unpack_piece(packed: Any) -> torch.Tensor:
            described, saved = packed
            piece = unpack(saved)
            return piece if described is None else _C.wrap(piece, *described)

        self.pack_hook, self.unpack_hook = pack_piece, unpack_piece

    return wrapped


def _tid_of_piece(of_tensor: Callable[..., Any]) -> Callable[..., Any]:
    def get_tid(t: torch.Tensor) -> tuple[int, int, int]:
        return (id(t), t._local_tensor.data_ptr(), t._version) if isinstance(t, ShardTensor) else of_tensor(t)  # type: ignore[no-any-return]

    return get_tid


def _sid_of_piece(of_storage: Callable[..., Any]) -> Callable[..., Any]:
    def get_sid(t: torch.Tensor) -> tuple[int, int]:
        return (t._local_tensor.data_ptr(), t._version) if isinstance(t, ShardTensor) else of_storage(t)  # type: ignore[no-any-return]

    return get_sid


_IDENTITY = "allow_mutation_on_saved_tensors identifies tensors by their memory, which for a ShardTensor is its piece's."
_WITHOUT = "Do not use allow_mutation_on_saved_tensors with ShardTensors."
PATCHES = (
    Patch(
        "torch.autograd.graph", "_get_tid", _tid_of_piece, why=_IDENTITY, ask="an identity that subclasses may define", without=_WITHOUT
    ),
    Patch("torch.autograd.graph", "_get_sid", _sid_of_piece, why=_IDENTITY, ask="the same", without=_WITHOUT),
    Patch(
        "torch.autograd.graph",
        "save_on_cpu.__init__",
        _pieces_on_cpu,
        why="save_on_cpu(pin_memory=True) copies into a plain tensor of the whole's sizes.",
        ask="`torch.empty_like(t, device='cpu', pin_memory=True)`",
        without="Do not use save_on_cpu(pin_memory=True) with ShardTensors.",
    ),
)
