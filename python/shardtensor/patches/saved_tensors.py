"""torch's tools that would take a ShardTensor for a plain tensor, told what it is."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd import graph
from torch.autograd.graph import save_on_cpu

from shardtensor import _C
from shardtensor._late import when_imported
from shardtensor.tensor._tensor import ShardTensor, ShardTensorSpec


def _pieces_on_cpu() -> None:
    """save_on_cpu(pin_memory=True) copies into a plain tensor: the piece goes there, and comes back as what it was."""
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


# torch itself calls neither op on CPU or CUDA tensors, so it has no formulas. Two products of the size of the forward's.


def _linear_backward_flops(
    x: torch.Size, gradient: torch.Size, weight: torch.Size, mask: list[bool], *args: Any, **kwargs: Any
) -> int:
    return 2 * gradient.numel() * weight[-1] * (bool(mask[0]) + bool(mask[1]))


def _matmul_backward_flops(
    gradient: torch.Size, left: torch.Size, right: torch.Size, mask: list[bool], *args: Any, **kwargs: Any
) -> int:
    return 2 * gradient.numel() * left[-1] * (bool(mask[0]) + bool(mask[1]))


def _count_products(module: Any) -> None:
    module.register_flop_formula(torch.ops.aten.linear_backward)(_linear_backward_flops)
    module.register_flop_formula(torch.ops.aten.matmul_backward)(_matmul_backward_flops)


def _know_cuts_under_ddp(module: Any) -> None:
    """DDP gets the pieces as plain parameters, and makes them whole again around each forward from what was noted of them."""
    flat, torchs = module._flatten_tensor, module._unflatten_tensor

    def flatten(t: torch.Tensor) -> Any:
        return (t._local_tensor.detach(), t._spec) if isinstance(t, ShardTensor) else flat(t)

    def unflatten(t: torch.Tensor, spec: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(spec, ShardTensorSpec):
            return torchs(t, spec, **kwargs)  # type: ignore[no-any-return]
        return _C.from_local(t, spec._layout, list(spec.shape), list(spec.stride), None)

    module._flatten_tensor, module._unflatten_tensor = flatten, unflatten


def _identify() -> None:
    """allow_mutation_on_saved_tensors knows tensors by their memory: here the piece's."""
    of_tensor, of_storage = graph._get_tid, graph._get_sid

    def get_tid(t: torch.Tensor) -> tuple[int, int, int]:
        return (id(t), t._local_tensor.data_ptr(), t._version) if isinstance(t, ShardTensor) else of_tensor(t)

    def get_sid(t: torch.Tensor) -> tuple[int, int]:
        return (t._local_tensor.data_ptr(), t._version) if isinstance(t, ShardTensor) else of_storage(t)

    graph._get_tid, graph._get_sid = get_tid, get_sid  # type: ignore[assignment]


def install() -> None:
    """Called once."""
    _identify()
    when_imported("torch.distributed.tensor.parallel.ddp", _know_cuts_under_ddp)
    _pieces_on_cpu()
    when_imported("torch.utils.flop_counter", _count_products)
