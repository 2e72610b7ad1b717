"""A function of plain tensors, applied to this rank's pieces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

import shardtensor._C as _C
from shardtensor.tensor import _compile
from shardtensor.tensor._from_local import Shapes
from shardtensor.tensor._tensor import ShardTensor

Placements = Sequence[Placement] | None
_WHO = "local_map"


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Placements | tuple[Placements, ...] = None,
    in_placements: tuple[Placements, ...] | None = None,
    in_grad_placements: tuple[Placements, ...] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
    spmd_types: bool = False,
    sharding_shapes: Shapes = None,
) -> Callable[..., Any]:
    """Turns `func`, a function of plain tensors, into a function of ShardTensors: `func` gets their pieces, and its results
    become the pieces of ShardTensors under `out_placements`. Without `func`, it is a decorator.

    If some input is cut unevenly, the ranks exchange the sizes of the results' pieces, unless `sharding_shapes` gives them, as
    in ShardTensor.from_local. If all inputs are even, every rank's result must have the size of this one's. In a compiled
    function ranks cannot exchange sizes: results that are cut then need `sharding_shapes`; others have the same size on every
    rank.
    """
    if spmd_types:
        raise NotImplementedError("local_map: argument 'spmd_types': types of the package spmd_types are not supported; omit it")
    if func is None:
        return functools.partial(
            local_map,
            out_placements=out_placements,
            in_placements=in_placements,
            in_grad_placements=in_grad_placements,
            device_mesh=device_mesh,
            redistribute_inputs=redistribute_inputs,
            sharding_shapes=sharding_shapes,
        )

    @functools.wraps(func)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = pytree.tree_flatten(args)
        for name, given in (("in_placements", in_placements), ("in_grad_placements", in_grad_placements)):
            if given is not None and len(given) != len(leaves):
                raise AssertionError(f"{_WHO}: argument '{name}' is for {len(given)} inputs, the call has {len(leaves)}")
        mesh, entered = device_mesh, []
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, DTensor):
                x = _entering(leaf, i, in_placements, redistribute_inputs)
                mesh = x.device_mesh if mesh is None else mesh
                entered.append(x)
                leaves[i] = x.to_local(grad_placements=in_grad_placements[i] if in_grad_placements else None)
        out = func(*pytree.tree_unflatten(leaves, tree), **kwargs)
        if not any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves(args)):
            return out
        assert mesh is not None
        return _leaving(out, out_placements, mesh, sharding_shapes, entered)

    return mapped


def _has_equal_pieces(x: ShardTensor) -> bool:
    return all(len(set(shapes)) == 1 for shapes in x._spec.sharding_shapes().values())


def _entering(leaf: DTensor, i: int, placements: tuple[Placements, ...] | None, redistribute: bool) -> ShardTensor:
    x = ShardTensor.from_dtensor(leaf)
    if placements is None:
        return x
    want = placements[i]
    if want is None:
        raise AssertionError(f"{_WHO}: argument 'in_placements' is None for input {i}, which is a ShardTensor ({x._layout})")
    moved = x.redistribute(placements=want)
    if moved.placements == x.placements:
        return x
    if not redistribute:
        raise ValueError(
            f"{_WHO}: input {i} has placements {x.placements}, 'in_placements' asks for {tuple(want)}; pass "
            "redistribute_inputs=True to move it"
        )
    return moved


def _as_pieces(local: torch.Tensor, mesh: DeviceMesh, placements: Any, shapes: Shapes, inputs: list[ShardTensor]) -> ShardTensor:
    """If an input's pieces differ and `shapes` is missing, the ranks exchange the results' sizes. Ranks that trace a graph
    cannot communicate, and need not for a result that is not cut: it has the same size on every rank."""
    uneven = [x for x in inputs if not _has_equal_pieces(x)]
    uncut = all(p.is_replicate() or p.is_partial() for p in placements)
    if shapes is None and uneven and not (uncut and _C.is_traced(uneven[0])):
        shapes = "infer"
    return ShardTensor.from_local(local, mesh, placements, run_check=False, sharding_shapes=shapes)


_compile.in_graph(_as_pieces)


def _leaving(out: Any, placements: Any, mesh: DeviceMesh, shapes: Shapes, inputs: list[ShardTensor]) -> Any:
    leaves, tree = pytree.tree_flatten(out)
    each = placements if isinstance(placements, tuple) and not _is_placements(placements) else (placements,)
    if len(each) != len(leaves):
        raise AssertionError(f"{_WHO}: argument 'out_placements' is for {len(each)} outputs, the function returns {len(leaves)}")
    for i, (leaf, want) in enumerate(zip(leaves, each, strict=True)):
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor):
            if want is None:
                raise AssertionError(f"{_WHO}: argument 'out_placements' is None for output {i}, which is a tensor")
            leaves[i] = _as_pieces(leaf, mesh, want, shapes, inputs)
        elif want is not None:
            raise AssertionError(
                f"{_WHO}: argument 'out_placements' is {tuple(want)} for output {i}, which is {type(leaf).__name__}, not a tensor"
            )
    return pytree.tree_unflatten(leaves, tree)


def _is_placements(value: tuple[Any, ...]) -> bool:
    return all(isinstance(p, Placement) for p in value)
