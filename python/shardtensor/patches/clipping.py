"""torch.nn.utils.clip_grad, and the foreach functions beneath it. All versions.

A norm over tensors that different mesh dims cut, or of several meshes, or also over plain tensors, is combined from one norm for each
kind; these are reduced together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad
from torch.utils._foreach_utils import _foreach_supported_types as _clipping_types

import shardtensor._C as _C
from shardtensor.patches._once import wrap_once
from shardtensor.tensor._layout import _SHARD, _UNCUT
from shardtensor.tensor._tensor import ShardTensor


def _home(t: torch.Tensor) -> Any:
    """What tensors have in common whose norms can be combined without moving: their mesh and the mesh dims that cut them; None for
    plain tensors."""
    if isinstance(t, ShardTensor):
        layout = t._layout
        return layout.mesh, tuple(n > 1 and kind == _SHARD for n, (kind, *_) in zip(layout.mesh.shape, layout.placements, strict=True))
    return t.device_mesh if isinstance(t, DTensor) else None


def _as_list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _everywhere(norms: list[torch.Tensor]) -> list[torch.Tensor]:
    """The norms on every rank of their meshes, reduced together."""
    at = [i for i, t in enumerate(norms) if isinstance(t, ShardTensor)]
    layouts = [_C.layout(norms[i]) for i in at]
    replicated = [_C.Layout(layout.mesh, [_UNCUT] * len(layout.placements)) for layout in layouts]
    for i, t in zip(at, _C.redistribute_all([norms[i] for i in at], replicated), strict=True):
        norms[i] = t
    return norms


def _whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def _require_member(tensors: list[torch.Tensor]) -> None:
    """A norm reaches the ranks of its mesh. The other ranks would clip what they hold by another norm."""
    for i, t in enumerate(tensors):
        if isinstance(t, ShardTensor) and t.device_mesh.get_coordinate() is None:
            raise RuntimeError(
                f"get_total_norm: tensor {i} is {t._layout}, a mesh that rank {dist.get_rank()} is not in, and others are on meshes that "
                "it is in: this rank cannot get the norm. Move it with redistribute(device_mesh, placements) to a mesh of all these ranks"
            )


def _total_norm_of_all(total_norm: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(total_norm)
    def run(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        tensors = _as_list(tensors)
        if is_compiling() or _C.cut_alike(tensors):
            return total_norm(tensors, norm_type, error_if_nonfinite, foreach)
        by_home: dict[Any, list[torch.Tensor]] = {}
        for t in tensors:
            by_home.setdefault(_home(t), []).append(t)
        if len(by_home) < 2 or not any(isinstance(t, ShardTensor) for t in tensors):
            return total_norm(tensors, norm_type, error_if_nonfinite, foreach)
        several_meshes = len({home[0] if isinstance(home, tuple) else home for home in by_home}) > 1
        if several_meshes:
            _require_member(tensors)
        parts = _everywhere([total_norm(part, norm_type, False, foreach) for part in by_home.values()])
        if several_meshes:
            parts = [_whole(part).to(tensors[0].device) for part in parts]
        # For order 0, torch counts the tensors that are not all zeros.
        total = torch.stack(parts).sum() if norm_type == 0 else torch.linalg.vector_norm(torch.stack(parts), float(norm_type))
        if error_if_nonfinite and not total.isfinite():
            total_norm(total, norm_type, True)  # it raises the error
        return total

    return run


def _clip_all(clip: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(clip)
    def run(parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None) -> None:
        parameters = _as_list(parameters)
        if not is_compiling() and isinstance(total_norm, ShardTensor) and not _C.gradients_on_mesh_of(total_norm, parameters):
            total_norm = total_norm.full_tensor()
        clip(parameters, max_norm, total_norm, foreach)

    return run


def install() -> None:
    """Wraps the clipping of gradients, and makes torch choose foreach as for plain tensors; once."""
    for wrap, name in ((_total_norm_of_all, "get_total_norm"), (_clip_all, "clip_grads_with_norm_")):
        wrap_once(clip_grad, f"_{name}", wrap)
        setattr(torch.nn.utils, name, getattr(clip_grad, f"_{name}"))
    if ShardTensor not in _clipping_types:
        _clipping_types.append(ShardTensor)  # type: ignore[arg-type]
