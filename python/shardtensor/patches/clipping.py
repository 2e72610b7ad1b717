"""torch.nn.utils.clip_grad, and the foreach functions beneath it. All versions.

A norm over tensors that different mesh dims cut, or of several meshes, or also over plain tensors, is combined from the norms of each
kind; these are reduced together. If copies differ that should be equal, their mean counts: all ranks get one number.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor

import shardtensor._C as _C
from shardtensor.patches._patch import Patch
from shardtensor.tensor._layout import _SHARD, _UNCUT
from shardtensor.tensor._tensor import ShardTensor

_log = logging.getLogger("shardtensor")


def _home(t: torch.Tensor) -> Any:
    """The mesh and the mesh dims that cut a tensor; None for a plain one. Norms of tensors that agree in these are combined
    without communication.
    """
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


def _joined(norms: torch.Tensor, order: float) -> torch.Tensor:
    """For order 0, torch counts the tensors that are not all zeros."""
    return norms.sum() if order == 0 else torch.linalg.vector_norm(norms, order)


def _summand(norms: dict[_C.Layout, list[torch.Tensor]], order: float) -> torch.Tensor:
    """This rank's share of the joint norm of norms of one mesh. If one norm is not reduced along a mesh dim while others are, its
    tensor has copies there, and the mean over the copies counts. A second number counts only the first copies: it differs from
    the first if copies differ.
    """
    mesh = next(iter(norms)).mesh
    joint = [next((p for p in column if p != _UNCUT), _UNCUT) for column in zip(*(lay.placements for lay in norms), strict=True)]
    means, firsts = [], []
    for layout, pieces in norms.items():
        piece = torch.stack(pieces).double()
        dims = [m for m, p in enumerate(layout.placements) if p == _UNCUT != joint[m]]
        means.append(piece * math.prod(mesh.shape[m] for m in dims) ** (-1 / order) if dims else piece)
        is_first = not any(mesh.coordinate[m] for m in dims)
        firsts.append(piece if is_first else torch.full_like(piece, 0 if order > 0 else math.inf))
    both = torch.stack([_joined(torch.cat(shares), order) for shares in (means, firsts)])
    return _C.wrap(both, _C.Layout(mesh, joint), [2], [1])


class _Apart:
    """Warns once if copies differ. That needs a number on the host, so on a GPU it is not checked at each step."""

    def __init__(self) -> None:
        self.looks, self.told = 0, False

    def look(self, both: torch.Tensor, mesh: _C.Mesh) -> None:
        if self.told or type(both) is not torch.Tensor or both.is_meta:
            return
        self.looks += 1
        if both.is_cuda and (self.looks & (self.looks - 1) or torch.cuda.is_current_stream_capturing()):
            return
        mean, first = both.tolist()
        if abs(first - mean) > 1e-3 * mean:  # more than a kernel's order of summation may change
            self.told = True
            if not any(mesh.coordinate):
                _log.warning(
                    "get_total_norm, clip_grad_norm_: a gradient that counts as equal on ranks of %s (Replicate() along a mesh dim that "
                    "cuts other gradients, or a plain tensor) differs between them. The norm takes the mean of the copies, so that all "
                    "ranks clip by one number; each scales its own copy. shardtensor.debug.check(full=True) finds the op after which "
                    "copies differ. (Said once.)",
                    mesh,
                )


_apart = _Apart()


def _require_member(tensors: list[torch.Tensor]) -> None:
    """Only the ranks of its mesh get a norm. Other ranks would clip their tensors by another norm."""
    for i, t in enumerate(tensors):
        if isinstance(t, ShardTensor) and t.device_mesh.get_coordinate() is None:
            raise RuntimeError(
                f"get_total_norm: tensor {i} is {t._layout}, a mesh that rank {dist.get_rank()} is not in, and others are on meshes that "
                "it is in: this rank cannot get the norm. Move it with redistribute(device_mesh, placements) to a mesh of all these ranks"
            )


@torch.no_grad()
def _norm_of_mixed(
    total_norm: Callable[..., torch.Tensor], by_home: dict[Any, list[torch.Tensor]], order: float, foreach: bool | None
) -> torch.Tensor:
    """One message for each mesh, as if its gradients were alike. Norms that are whole count as copies on the largest mesh."""
    by_mesh: dict[_C.Mesh, dict[_C.Layout, list[torch.Tensor]]] = {}
    others = []
    for home, part in by_home.items():
        if isinstance(home, tuple):
            for norm in torch._foreach_norm(part, order) if order else [total_norm(part, order, False, foreach)]:
                layout = _C.layout(norm)
                by_mesh.setdefault(layout.mesh, {}).setdefault(layout, []).append(norm.to_local())  # type: ignore[attr-defined]
        else:
            norm = total_norm(part, order, False, foreach)
            others.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    largest = max(by_mesh, key=lambda mesh: math.prod(mesh.shape))
    device = next(iter(by_mesh[largest].values()))[0].device
    for norm in others:
        by_mesh[largest].setdefault(_C.Layout(largest, [_UNCUT] * len(largest.shape)), []).append(norm.to(device))
    dtype = functools.reduce(torch.promote_types, {piece.dtype for norms in by_mesh.values() for pieces in norms.values() for piece in pieces})
    wholes = _everywhere([_summand(norms, order) for norms in by_mesh.values()])
    pairs = [whole.to_local() for whole in wholes]  # type: ignore[attr-defined]
    for mesh, both in zip(by_mesh, pairs, strict=True):
        _apart.look(both, mesh)
    if len(by_mesh) == 1 and not others:
        return wholes[0][0].to(dtype)
    device = next(iter(by_home.values()))[0].device
    return _joined(torch.stack([both[0].to(device) for both in pairs]), order).to(dtype)


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
        if len({home[0] if isinstance(home, tuple) else home for home in by_home}) > 1:
            _require_member(tensors)
        total = _norm_of_mixed(total_norm, by_home, float(norm_type), foreach)
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


def take_foreach(types: list[type]) -> list[type]:
    """Makes torch choose foreach as for plain tensors."""
    if ShardTensor not in types:
        types.append(ShardTensor)
    return types


PATCHES = (
    Patch(
        "torch.nn.utils.clip_grad",
        "_get_total_norm",
        _total_norm_of_all,
        why="torch stacks the norms of gradients, which is an error for tensors of several meshes, and one message each for several cuts.",
        ask="norms reduced per mesh, then combined",
        without="Clip the gradients of each mesh by themselves.",
        by_name=True,
    ),
    Patch(
        "torch.nn.utils.clip_grad",
        "_clip_grads_with_norm_",
        _clip_all,
        why="gradients of several meshes are scaled by one norm.",
        ask="a norm that is a number for each gradient's mesh",
        without="Clip the gradients of each mesh by themselves.",
        by_name=True,
    ),
    Patch(
        "torch.utils._foreach_utils",
        "_foreach_supported_types",
        take_foreach,
        why="torch uses its foreach functions only for types in this list.",
        ask="a public way to register a type",
        without="Clipping calls each op once per gradient.",
    ),
)
