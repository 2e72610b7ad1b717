"""torch.autograd.graph: save_on_cpu and allow_mutation_on_saved_tensors for ShardTensors. All versions."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd import graph
from torch.autograd.graph import save_on_cpu

import shardtensor._C as _C
from shardtensor.tensor._tensor import ShardTensor


def _pieces_on_cpu() -> None:
    """save_on_cpu(pin_memory=True) copies into a plain tensor: here the piece is copied, and later wrapped again."""
    init: Any = save_on_cpu.__init__

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

    save_on_cpu.__init__ = wrapped  # type: ignore[method-assign]


def _identify() -> None:
    """allow_mutation_on_saved_tensors identifies tensors by their memory: for ShardTensors, the piece's."""
    of_tensor, of_storage = graph._get_tid, graph._get_sid

    def get_tid(t: torch.Tensor) -> tuple[int, int, int]:
        return (id(t), t._local_tensor.data_ptr(), t._version) if isinstance(t, ShardTensor) else of_tensor(t)

    def get_sid(t: torch.Tensor) -> tuple[int, int]:
        return (t._local_tensor.data_ptr(), t._version) if isinstance(t, ShardTensor) else of_storage(t)

    graph._get_tid, graph._get_sid = get_tid, get_sid  # type: ignore[assignment]


def install() -> None:
    """Called once."""
    _identify()
    _pieces_on_cpu()
