"""FSDP2 over modules whose parameters are ShardTensors already (tensor parallelism).

FSDP2 cuts each rank's piece of a parameter once more, as torch.chunk does, and describes the result by a stock spec, which
cannot say that the pieces it began with were cut unevenly. Here it gets a spec that can, and with it ShardTensors.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

from shardtensor import _C
from shardtensor._late import when_imported
from shardtensor._layout import _SHARD, make_layout
from shardtensor._tensor import ShardTensor, ShardTensorSpec


def _chunk(size: int, pieces: int, index: int) -> int:
    full = -(-size // pieces)
    return max(0, min(full, size - full * index))


def _strided_cuts(inner: _C.Layout, dim: int, size: int, pieces: int) -> tuple[list[int], dict[int, list[int]]]:
    """Each piece that `inner` makes of the dim is chunked into `pieces`: the sizes of the inner pieces, and per inner mesh dim
    that cuts it, one row of sizes per index of the chunk and coordinate of the earlier inner mesh dims."""
    cutting = [m for m, (kind, d, *_) in enumerate(inner.placements) if kind == _SHARD and d == dim]

    def length(at: tuple[int, ...]) -> int:
        coordinate = [0] * len(inner.placements)
        for m, c in zip(cutting, at, strict=True):
            coordinate[m] = c
        return inner.local_sizes([0] * dim + [size], coordinate)[dim]

    places = [range(inner.mesh.shape[m]) for m in cutting]
    chunks = [length(at) for at in itertools.product(*places)]
    rows = {
        m: [
            sum(_chunk(length(before + behind), pieces, index) for behind in itertools.product(*places[k + 1 :]))
            for index in range(pieces)
            for before in itertools.product(*places[: k + 1])
        ]
        for k, m in enumerate(cutting)
    }
    return chunks, rows


def _with_cuts(spec: DTensorSpec, inner: ShardTensorSpec) -> ShardTensorSpec:
    """FSDP's spec of its pieces of a tensor that lay as `inner` says."""
    assert spec.tensor_meta is not None
    layout, shape = inner._layout, spec.tensor_meta.shape
    names = spec.mesh.mesh_dim_names or ()
    # The inner mesh dims come last, or are found by name where FSDP's own are among them.
    last = spec.mesh.ndim - len(layout.placements)
    own = layout.mesh.dim_names or [""] * len(layout.placements)
    at = [names.index(name) if name in names else last + m for m, name in enumerate(own)]
    cuts: list[list[int] | None] = [None] * spec.mesh.ndim
    for m, cut in enumerate(layout.cuts):
        if cut is not None:
            cuts[at[m]] = cut
    before = {at[m] for m, (kind, *_) in enumerate(layout.placements) if kind == _SHARD}
    for m, placement in enumerate(spec.placements):
        if isinstance(placement, _StridedShard) and m not in before and not layout.is_even:
            cuts[m], rows = _strided_cuts(layout, placement.dim, shape[placement.dim], spec.mesh.size(m))
            if any(at[k] < m for k in rows):
                raise NotImplementedError(f"fully_shard: {layout} is cut unevenly by mesh dims on both sides of {spec.mesh}'s dim {m}")
            for k, row in rows.items():
                cuts[at[k]] = row
    known = make_layout(spec.mesh, spec.placements, len(shape), cuts, who="fully_shard")
    return ShardTensorSpec(spec.mesh, spec.placements, tensor_meta=spec.tensor_meta, _layout=known)


def _inner_spec(param: Any) -> ShardTensorSpec | None:
    spec = getattr(param, "_unsharded_dtensor_spec", None) or getattr(param, "_tp_spec", None)  # by torch's version
    return spec if isinstance(spec, ShardTensorSpec) else None


def _wrap(module: Any) -> None:
    param = module.FSDPParam
    to_sharded, grad_inner = param.to_sharded_dtensor, param._get_grad_inner_tensor

    def to_sharded_dtensor(self: Any, tensor: torch.Tensor) -> torch.Tensor:
        inner = _inner_spec(self)
        if inner is not None and not isinstance(self._sharding_spec, ShardTensorSpec):
            self._sharding_spec = _with_cuts(self._sharding_spec, inner)
        return to_sharded(self, tensor)  # type: ignore[no-any-return]

    def get_grad_inner_tensor(self: Any, grad: torch.Tensor) -> torch.Tensor:
        inner = _inner_spec(self)
        own_mesh = getattr(self.mesh_info, "is_spmd_mesh", False)  # then FSDP itself reduces what are summands
        if inner is not None and isinstance(grad, ShardTensor) and grad._layout != inner._layout and not own_mesh:
            grad = _C.redistribute(grad, inner._layout, None, None, False)
        return grad_inner(self, grad)  # type: ignore[no-any-return]

    param.to_sharded_dtensor, param._get_grad_inner_tensor = to_sharded_dtensor, get_grad_inner_tensor


def install() -> None:
    """Wraps FSDP2's parameters; once."""
    when_imported("torch.distributed.fsdp._fully_shard._fsdp_param", _wrap)
