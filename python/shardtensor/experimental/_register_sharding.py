"""A user's own sharding rule for an op, written with placements, as in torch.distributed.tensor.experimental."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._ops import OpOverload
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

import shardtensor._C as _C
from shardtensor.tensor._handlers import is_composite, name_of, register_dispatch_handler
from shardtensor.tensor._layout import make_layout
from shardtensor.tensor._mesh import as_device_mesh, told_apart
from shardtensor.tensor._modes import get_promotion_mode
from shardtensor.tensor._tensor import ShardTensor

# For one mesh dim: the placements of the results, and of the arguments (None for arguments that are not tensors).
Acceptable = tuple[Sequence[Placement], Sequence[Placement | None]]
Rule = Callable[..., Sequence[Acceptable]]


def register_sharding(op: OpOverload | list[OpOverload]) -> Callable[[Rule], Rule]:
    """Decorates a function that takes the op's arguments, with a spec (`.shape`, `.ndim`, `.placements`, `.mesh`) for each
    tensor, and returns the acceptable shardings for one mesh dim: pairs of the results' placements and the arguments' (None
    for arguments that are not tensors). Each mesh dim takes the one that moves the fewest bytes. The function replaces the
    op's rule, if it has one; `ShardTensor.unregister_handler(op)` removes it.

    Pieces may have any sizes: arguments that are sharded together get the same cut, and so do results of the same length.
    """

    def register(rule: Rule) -> Rule:
        for overload in op if isinstance(op, list) else [op]:
            if isinstance(overload, OpOverload) and overload._schema.is_mutable:
                raise NotImplementedError(f"register_sharding: argument 'op': {overload} writes its arguments; only ops without writes can be registered")
            register_dispatch_handler(overload, _Sharded(overload, rule))
        return rule

    return register


@dataclass(frozen=True)
class _Solution:
    arguments: tuple[_C.Layout, ...]  # per tensor
    results: tuple[tuple[_C.Layout, list[int], list[int]] | None, ...]  # layout, sizes, strides


class _Sharded:
    """The handler: called below autograd, with the op's arguments."""

    def __init__(self, op: OpOverload, rule: Rule) -> None:
        self._op, self._rule = op, rule
        self._known: dict[Any, _Solution] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, ShardTensor)]
        self._check_plain(leaves)
        self._check_gradient(leaves)
        if any(_is_symbolic(leaf) for leaf in leaves):
            solution = self._solve(leaves, places, tree)  # a graph needs the guards of each call
        else:
            key = (str(tree), *(_key(leaf) for leaf in leaves))
            known = self._known.get(key)
            solution = self._known[key] = known or self._solve(leaves, places, tree)
        with torch.no_grad():
            for i, layout in zip(places, solution.arguments, strict=True):
                leaves[i] = _C.local(_C.redistribute(leaves[i], layout))
        args, kwargs = pytree.tree_unflatten(leaves, tree)
        return self._wrapped(self._op(*args, **kwargs), solution)

    def _check_plain(self, leaves: list[Any]) -> None:
        for leaf in leaves:
            plain = isinstance(leaf, torch.Tensor) and not isinstance(leaf, ShardTensor)
            if plain and leaf.ndim and get_promotion_mode() == "error":
                raise RuntimeError(
                    f"{self._op}: an argument is a plain torch.Tensor of shape {tuple(leaf.shape)} among ShardTensors: got mixed "
                    "torch.Tensor and DTensor; distribute it, or use shardtensor.implicit_replication()"
                )

    def _check_gradient(self, leaves: list[Any]) -> None:
        """Refuses composites: autograd differentiates the ops that they consist of, and would not see what a handler computes on
        the pieces.
        """
        needed = torch.is_grad_enabled() and any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
        if needed and is_composite(name_of(self._op)):
            raise NotImplementedError(
                f"{self._op}: register_sharding: torch has no derivative of this op, only of those that it is made of, and an argument "
                "requires a gradient. Register shardings of those ops, or a handler that calls them (ShardTensor.register_dispatch_handler)."
            )

    def _wrapped(self, out: Any, solution: _Solution) -> Any:
        single = isinstance(out, torch.Tensor)
        wrapped = [self._wrap(t, result) for t, result in zip([out] if single else out, solution.results, strict=True)]
        return wrapped[0] if single else type(out)(wrapped)

    def _wrap(self, local: Any, result: tuple[_C.Layout, list[int], list[int]] | None) -> Any:
        if result is None:
            return local
        layout, sizes, strides = result
        if _hints(local.shape) != layout.local_sizes(_hints(sizes)):
            raise RuntimeError(
                f"{self._op}: register_sharding: the result on rank {layout.mesh.rank} has shape {tuple(local.shape)}, but under "
                f"{layout} a tensor of shape {tuple(sizes)} has {tuple(layout.local_sizes(sizes))} there; the sharding does not match this result"
            )
        return _C.wrap(local, layout, sizes, strides)

    def _solve(self, leaves: list[Any], places: list[int], tree: Any) -> _Solution:
        tensors: list[ShardTensor] = [leaves[i] for i in places]
        mesh = _C.layout(tensors[0]).mesh
        for t in tensors:
            if _C.layout(t).mesh != mesh:
                one, other = told_apart(_C.layout(tensors[0]), _C.layout(t))
                raise RuntimeError(f"{self._op}: its arguments are on different meshes: {one} and {other}; redistribute one of them first")
        args, kwargs = pytree.tree_unflatten([t._spec if isinstance(t, ShardTensor) else t for t in leaves], tree)
        acceptable = [(list(out), [p for p in into if p is not None]) for out, into in self._rule(*args, **kwargs)]
        outputs = self._on_meta(leaves, tree)
        for out, into in acceptable:
            if len(into) != len(tensors) or len(out) != len(outputs):
                raise ValueError(
                    f"{self._op}: register_sharding: a sharding has placements for {len(out)} results and {len(into)} tensors; "
                    f"the call has {len(outputs)} and {len(tensors)}"
                )
        best: tuple[float, _Solution] | None = None
        for choice in itertools.product(acceptable, repeat=len(mesh.shape)):
            solution = _laid_out(choice, tensors, outputs, mesh)
            cost = sum(map(_cost, tensors, solution.arguments))
            if cost < (best[0] if best else math.inf):
                best = cost, solution
        if best is None:
            raise RuntimeError(
                f"{self._op}: register_sharding: no acceptable sharding for {', '.join(str(_C.layout(t)) for t in tensors)}; "
                "add one with every placement Replicate(), which always works"
            )
        return best[1]

    def _on_meta(self, leaves: list[Any], tree: Any) -> list[Any]:
        metas = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") if isinstance(t, torch.Tensor) else t
            for t in leaves
        ]
        args, kwargs = pytree.tree_unflatten(metas, tree)
        try:
            out = self._op(*args, **kwargs)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"{self._op}: register_sharding needs to know its results' sizes: give it a fake implementation (torch.library.register_fake)"
            ) from error
        return [out] if isinstance(out, torch.Tensor) else list(out)


def _key(leaf: Any) -> Any:
    if isinstance(leaf, ShardTensor):
        return _C.layout(leaf), tuple(leaf.shape), leaf.stride(), leaf.dtype
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype
    return type(leaf), leaf


def _is_symbolic(leaf: Any) -> bool:
    return isinstance(leaf, torch.SymInt) or (isinstance(leaf, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in leaf.shape))


def _hints(sizes: Sequence[Any]) -> list[int]:
    """The numbers for which a graph is traced, without a guard: the same on all ranks."""
    return [int(n.node.hint) if isinstance(n, torch.SymInt) and n.node.hint is not None else int(n) for n in sizes]


def _cost(tensor: ShardTensor, target: _C.Layout) -> float:
    source = _C.layout(tensor)
    for before, after in zip(source.placements, target.placements, strict=True):
        if after[0] == 2 and after != before:
            return math.inf  # a value is never turned into summands
    return _C.plan(source, target, float(math.prod(_hints(tensor.shape)) * tensor.element_size()))[1]


def _laid_out(choice: Sequence[Any], tensors: list[ShardTensor], outputs: list[Any], mesh: _C.Mesh) -> _Solution:
    """One acceptable sharding per mesh dim, with cuts."""
    cuts = [_common_cut(m, choice, tensors) for m in range(len(choice))]

    def layout_of(placements: list[Placement], shape: Sequence[int]) -> _C.Layout:
        own = [
            cut if isinstance(p, Shard) and shape[p.dim] == size and _alone(p, placements) else None
            for p, (cut, size) in zip(placements, cuts, strict=True)
        ]
        return make_layout(as_device_mesh(mesh), placements, len(shape), own if any(own) else (), who="register_sharding")

    arguments = tuple(layout_of([into[i] for _, into in choice], t.shape) for i, t in enumerate(tensors))
    results = tuple(
        (layout_of([out[i] for out, _ in choice], t.shape), list(t.shape), list(t.stride())) if isinstance(t, torch.Tensor) else None
        for i, t in enumerate(outputs)
    )
    return _Solution(arguments, results)


def _alone(placement: Shard, placements: Sequence[Placement]) -> bool:
    return sum(isinstance(p, (Shard, _StridedShard)) and p.dim == placement.dim for p in placements) == 1


def _common_cut(m: int, choice: Sequence[Any], tensors: list[ShardTensor]) -> tuple[list[int] | None, int]:
    """The cut of everything that mesh dim `m` shards, and the size that it cuts: the cut of the first argument that already
    has the chosen placement; even, if there is none or the sizes differ."""
    sharded = [(t, p) for t, p in zip(tensors, choice[m][1], strict=True) if isinstance(p, Shard)]
    sizes = [t.shape[p.dim] for t, p in sharded]
    if not sizes or any(n != sizes[0] for n in sizes):
        return None, -1
    for t, p in sharded:
        layout, dim = _C.layout(t), p.dim % t.ndim
        along = [k for k, (kind, d, *_) in enumerate(layout.placements) if kind == 1 and d == dim]
        if along == [m] and layout.placements[m][2] == 1:
            if layout.follows_sizes or layout.has_symbols:
                layout = layout.settled(list(map(int, t.shape)))
            return layout.cuts[m], t.shape[dim]
    return None, -1
