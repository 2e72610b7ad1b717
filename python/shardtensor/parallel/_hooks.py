"""loss_parallel and input_reshard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Replicate, Shard

from shardtensor.tensor import _compile
from shardtensor.tensor._modes import plain_targets
from shardtensor.tensor._tensor import ShardTensor


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Inside, `cross_entropy` and `nll_loss` of ShardTensors take plain targets and weights as replicated.

    Logits that are sharded by class are never gathered, even without loss_parallel: also not for label smoothing, weights and
    meshes of any number of dims.
    """
    with plain_targets():
        yield


_NO_GRAPHS = (
    "input_reshard cuts what a module saves for its backward. A compiled graph saves pieces, which input_reshard would "
    "mistake for whole tensors, so such a module cannot be inside a compiled function or contain one"
)


def input_reshard(module: nn.Module, tp_device_mesh: DeviceMesh, input_reshard_dim: int | None = None) -> nn.Module:
    """Keeps in pieces, cut along `input_reshard_dim`, the tensors that the module saves for its backward and that are the same
    on every rank."""
    if input_reshard_dim is None:
        return module
    dim = input_reshard_dim
    entered: list[torch.autograd.graph.saved_tensors_hooks] = []

    def pack(t: torch.Tensor) -> Any:
        if isinstance(t, nn.Parameter) or not -t.ndim <= dim < t.ndim or t.numel() < tp_device_mesh.size():
            return t
        whole = t.detach()
        if not isinstance(whole, ShardTensor):
            return _Piece(ShardTensor.from_local(whole, tp_device_mesh, (Replicate(),), run_check=False), dim, plain=True)
        if whole.device_mesh != tp_device_mesh or whole.placements != (Replicate(),):
            return t
        return _Piece(whole, dim, plain=False)

    def unpack(kept: Any) -> torch.Tensor:
        whole: torch.Tensor = kept.whole() if isinstance(kept, _Piece) else kept
        return whole

    def before(m: nn.Module, inputs: Any) -> None:
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        hooks.__enter__()
        entered.append(hooks)
        _compile.graphs_refused.append(_NO_GRAPHS)

    def after(m: nn.Module, inputs: Any, output: Any) -> None:
        entered.pop().__exit__()
        _compile.graphs_refused.pop()

    _compile.outside_graphs(_NO_GRAPHS, before, after)
    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)
    return module


class _Piece:
    def __init__(self, whole: ShardTensor, dim: int, plain: bool):
        self.tensor = whole.redistribute(placements=(Shard(dim),))
        self.plain = plain

    def whole(self) -> torch.Tensor:
        whole = self.tensor.redistribute(placements=(Replicate(),))
        return whole.to_local() if self.plain else whole
