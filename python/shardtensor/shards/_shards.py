"""ShardTensors whose piece is a LocalShardsWrapper. Its offsets, not the layout, say where values are.

A layout gives sizes per rank and cannot describe separate shards: here it only holds the mesh and the user's placements. When
values move, all ranks exchange the places of their shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

import shardtensor._C as _C
from shardtensor.shards._ops import is_in_place, is_on_lists, runs_shard_by_shard, sizes_meant, written
from shardtensor.tensor._from_local import _DTYPES, Shapes, check_same_arguments, coordinate_at, from_everyone
from shardtensor.tensor._layout import ShardingShapes, make_layout, target_layout
from shardtensor.tensor._mesh import as_device_mesh, as_mesh, device_of
from shardtensor.tensor._pieces import box_views, holds_shards
from shardtensor.tensor._tensor import ShardTensor

if TYPE_CHECKING:
    from shardtensor.shards._wrapper import LocalShardsWrapper

_Place = tuple[int, list[int], list[int]]  # rank, offsets, sizes
aten = torch.ops.aten


def wrapper_of(t: Any) -> LocalShardsWrapper | None:
    """The tensor's piece, if it is a wrapper."""
    if not isinstance(t, torch.Tensor) or not _C.is_shard_tensor(t) or not _C.is_traced(t):
        return None
    local = _C.local(t)
    if not holds_shards(local):
        return None
    from shardtensor.shards._wrapper import as_ours  # noqa: PLC0415  slow: torch's checkpoints

    return as_ours(local)


def rebuild(
    shards: list[torch.Tensor], offsets: Sequence[Sequence[int]], told: tuple[int, torch.dtype, torch.device | None] | None
) -> LocalShardsWrapper:
    from shardtensor.shards._wrapper import LocalShardsWrapper  # noqa: PLC0415  slow: torch's checkpoints

    if told is None:
        return LocalShardsWrapper(shards, offsets)
    ndim, dtype, device = told
    return LocalShardsWrapper([], [], ndim=ndim, dtype=dtype, device=device)


# ---- in ----


def from_shards(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    *,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    sharding_shapes: Shapes,
    run_check: bool,
    who: str,
) -> ShardTensor:
    """from_local of a wrapper. Without `shape`, all ranks' shards must have the same total sizes."""
    from shardtensor.shards._wrapper import LocalShardsWrapper, as_ours  # noqa: PLC0415  slow: torch's checkpoints

    wrapper, view = as_ours(local), as_mesh(mesh)
    if sharding_shapes is not None:
        raise ValueError(
            f"{who}: argument 'sharding_shapes' is given with a LocalShardsWrapper, whose offsets say where its shards are; pass "
            f"'shape' (rank {view.rank})"
        )
    none = not view.has_this_rank or not wrapper.local_shards()
    ndim = len(shape) if shape is not None and none else wrapper.ndim
    if run_check:
        like = wrapper.parts()[0].to(device_of(view)) if none else wrapper.local_shards()[0]
        ndim = check_same_arguments(like, view, placements, shape, who)
    if shape is not None and len(shape) != ndim:
        raise ValueError(f"{who}: argument 'shape' has {len(shape)} dims, the local tensor {ndim} (rank {view.rank})")
    device = device_of(view) if view.has_this_rank else wrapper.parts()[0].device
    if none and (wrapper.local_shards() or (wrapper.ndim, wrapper.device) != (ndim, device)):
        wrapper = LocalShardsWrapper([], [], ndim=ndim, dtype=wrapper.dtype, device=device)
    layout = make_layout(mesh, placements, ndim, who=who)
    if layout.has_partial:
        raise ValueError(f"{who}: argument 'placements': {layout} has summands, but shards at offsets hold values (rank {view.rank})")
    sizes = list(shape) if shape is not None else layout.sizes_of_equal_pieces(list(wrapper.shape))
    out = _C.from_local(wrapper, layout, sizes, list(stride) if stride is not None else None)
    mine = [(view.rank, list(c.offsets), list(c.sizes)) for c in wrapper.local_chunks]
    _check_inside(_places_of(out).held if run_check else mine, sizes, who)
    return out


def _check_inside(places: list[_Place], sizes: list[int], who: str) -> None:
    for rank, offsets, lengths in places:
        if any(o + n > size for o, n, size in zip(offsets, lengths, sizes, strict=True)):
            raise ValueError(
                f"{who}: argument 'local_tensor' has a shard of sizes {lengths} at {offsets} on rank {rank}, outside of a tensor of "
                f"sizes {sizes}; pass 'shape'"
            )


# ---- what each rank holds ----


class _Places(NamedTuple):
    sizes: list[int]
    dtype: torch.dtype
    held: list[_Place]


def _places_of(t: torch.Tensor) -> _Places:
    """The places of all boxes: from the layout or, for a tensor with wrappers, exchanged by the ranks of its mesh."""
    layout, wrapper = _C.layout(t), wrapper_of(t)
    if wrapper is None:
        return _Places(list(t.shape), t.dtype, _places_in(layout, list(t.shape)))
    mesh = layout.mesh
    boxes = [(list(c.offsets), list(c.sizes)) for c in wrapper.local_chunks if all(c.sizes)]
    mine = [_DTYPES.index(str(t.dtype)), len(boxes), t.ndim, *t.shape, *(n for box in boxes for part in box for n in part)]
    length = _C.max_over(mesh, len(mine))
    rows = from_everyone(mine + [0] * (length - len(mine)), mesh, t.device)
    told = dict(zip(mesh.ranks, rows, strict=True))
    holders = {rank: row for rank, row in told.items() if row[1]} or told
    (first_rank, first), *others = holders.items()
    ndim = first[2]
    for rank, row in others:
        if row[0] != first[0] or row[2 : 3 + ndim] != first[2 : 3 + ndim]:
            raise ValueError(
                f"a tensor of LocalShardsWrappers is {_DTYPES[first[0]]} of sizes {first[3 : 3 + ndim]} on rank {first_rank}, "
                f"{_DTYPES[row[0]]} of sizes {row[3 : 3 + row[2]]} on rank {rank}"
            )
    sizes = first[3 : 3 + ndim]
    held = [(rank, *box) for rank, row in holders.items() for box in _boxes_in(row, ndim)]
    return _Places(sizes, getattr(torch, _DTYPES[first[0]].removeprefix("torch.")), held)


def _boxes_in(row: list[int], ndim: int) -> Iterator[tuple[list[int], list[int]]]:
    start = 3 + ndim
    for _ in range(row[1]):
        yield row[start : start + ndim], row[start + ndim : start + 2 * ndim]
        start += 2 * ndim


def _places_in(layout: _C.Layout, sizes: list[int]) -> list[_Place]:
    out: list[_Place] = []
    for index, rank in enumerate(layout.mesh.ranks):
        boxes = layout.boxes(sizes, coordinate_at(layout.mesh, index))
        out += [(rank, list(offsets), list(lengths)) for offsets, lengths in boxes if all(lengths)]
    return out


def _pieces_of(t: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """This rank's boxes that have elements, as views."""
    wrapper = wrapper_of(t)
    layout = _C.layout(t)
    views = wrapper.local_shards() if wrapper is not None else [box for _, box in box_views(_C.local(t), layout, sizes)]
    return [view.detach() for view in views if view.numel()]


def as_shards(t: ShardTensor) -> LocalShardsWrapper:
    """This rank's piece as a wrapper of views of its boxes (several if placements are strided), with their offsets."""
    from shardtensor.shards._wrapper import LocalShardsWrapper  # noqa: PLC0415  slow: torch's checkpoints

    layout, wrapper = _C.layout(t), wrapper_of(t)
    if wrapper is not None:
        return wrapper.detach()  # type: ignore[return-value]
    if layout.has_partial:
        raise RuntimeError(f"local_shards: {layout} has summands, which are not shards; redistribute it first (rank {layout.mesh.rank})")
    boxes = [(start, box) for start, box in box_views(_C.local(t).detach(), layout, list(t.shape)) if box.numel()]
    return LocalShardsWrapper([box for _, box in boxes], [o for o, _ in boxes], ndim=t.ndim, dtype=t.dtype, device=t.device)


# ---- values that move ----


def _exchanged(
    t: torch.Tensor, places: _Places, wanted: list[_Place], dtype: torch.dtype, mesh: _C.Mesh
) -> list[torch.Tensor]:
    return _C.exchange_boxes(_pieces_of(t, places.sizes), places.held, wanted, mesh, dtype, t.device)


def _piece_in(layout: _C.Layout, sizes: list[int], parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """The piece made of `parts`, its boxes that have elements."""
    shape = layout.local_sizes(sizes) if layout.mesh.has_this_rank else [0]
    if len(parts) == 1 and list(parts[0].shape) == shape:
        return parts[0]
    piece = torch.empty(shape, dtype=like.dtype, device=like.device)
    for (_, view), part in zip(((o, v) for o, v in box_views(piece, layout, sizes) if v.numel()), parts, strict=True):
        view.copy_(part)
    return piece


def _refilled(wrapper: LocalShardsWrapper, parts: list[torch.Tensor]) -> LocalShardsWrapper:
    """A wrapper with the same places and other values: `parts` are those of the shards that have elements."""
    if not wrapper.local_shards():
        return wrapper.like(wrapper.parts())
    rest = iter(parts)
    return wrapper.like([next(rest) if shard.numel() else torch.empty_like(shard) for shard in wrapper.local_shards()])


class _Moved(torch.autograd.Function):
    """Moves to a layout; the gradient moves back to the shards' places."""

    @staticmethod
    def forward(
        ctx: Any, t: ShardTensor, target: _C.Layout, places: _Places, dtype: torch.dtype, backward_dtype: torch.dtype | None
    ) -> ShardTensor:
        ctx.of, ctx.target, ctx.places, ctx.dtype = t.detach(), target, places, backward_dtype
        parts = _exchanged(t, places, _places_in(target, places.sizes), dtype, _C.layout(t).mesh)
        local = _piece_in(target, places.sizes, parts, torch.empty(0, dtype=dtype, device=t.device))
        return _C.wrap(local, target, places.sizes, _C.strides_like(places.sizes, local))

    @staticmethod
    def backward(ctx: Any, grad: ShardTensor) -> Any:  # type: ignore[override]
        grad = _C.redistribute(grad, ctx.target, ctx.dtype)
        parts = _exchanged(grad, _places_of(grad), ctx.places.held, ctx.places.dtype, _C.layout(ctx.of).mesh)
        return _wrapped_like(ctx.of, _refilled(ctx.of._local_tensor, parts)), None, None, None, None


class _Taken(torch.autograd.Function):
    """Returns the wrapper itself; its gradient is a wrapper with the same places."""

    @staticmethod
    def forward(ctx: Any, t: ShardTensor) -> torch.Tensor:
        ctx.of = t.detach()
        return t._local_tensor.view_as(t._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> ShardTensor:  # type: ignore[override]
        return _wrapped_like(ctx.of, grad)


def to_local(t: ShardTensor) -> torch.Tensor:
    return _Taken.apply(t) if t.requires_grad and torch.is_grad_enabled() else t._local_tensor  # type: ignore[no-any-return, no-untyped-call]


def redistribute(
    t: ShardTensor,
    placements: Sequence[Placement],
    device_mesh: DeviceMesh | None,
    sharding_shapes: ShardingShapes | None,
    forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
    *,
    who: str,
) -> ShardTensor:
    """Moves the values from the wrappers' offsets to one piece per rank, under `placements`."""
    mesh = _C.layout(t).mesh
    if device_mesh is not None and not set(as_mesh(device_mesh).ranks) <= set(mesh.ranks):
        raise NotImplementedError(
            f"{who}: argument 'device_mesh' has ranks besides those of {mesh}, within which shards of LocalShardsWrappers move; "
            f"redistribute there first (rank {mesh.rank})"
        )
    places = _places_of(t)
    whole = make_layout(as_device_mesh(mesh), None, len(places.sizes), who=who)
    target = target_layout(whole, places.sizes, placements, device_mesh, sharding_shapes, who=who)
    return _Moved.apply(t, target, places, forward_dtype or places.dtype, backward_dtype)  # type: ignore[no-any-return, no-untyped-call]


def _copy(func: Any, to: Any, source: Any, non_blocking: bool = False) -> Any:
    """Copies shard by shard if all ranks have shards at the same places; otherwise moves each value to its place."""
    if not _C.is_shard_tensor(source) or not _C.is_shard_tensor(to):
        return _on_wrappers(func, (to, source, non_blocking), {})
    mesh, mine, other = _C.layout(to).mesh, wrapper_of(to), wrapper_of(source)
    if set(_C.layout(source).mesh.ranks) != set(mesh.ranks) or _C.layout(to).has_partial or _C.layout(source).has_partial:
        raise NotImplementedError(
            f"{func} of a tensor of LocalShardsWrappers works only between tensors on the same ranks and without summands, but these are "
            f"{_C.layout(to)} and {_C.layout(source)}"
        )
    if mine is not None and other is not None and not _C.max_over(mesh, int(mine.local_chunks != other.local_chunks)):
        return _on_wrappers(func, (to, source, non_blocking), {})
    from_, into = _places_of(source), _places_of(to)
    if from_.sizes != into.sizes:
        raise ValueError(f"{func}: a tensor of sizes {from_.sizes} does not fit into one of sizes {into.sizes} (rank {mesh.rank})")
    parts = _exchanged(source, from_, into.held, into.dtype, mesh)
    for view, part in zip(_pieces_of(to, into.sizes), parts, strict=True):
        view.copy_(part)
    return None


# ---- ops ----


def dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs an op with a tensor of wrappers among its arguments. Stock DTensors become ShardTensors, without a copy."""
    out = _run(func, *pytree.tree_map_only(DTensor, ShardTensor.from_dtensor, (args, kwargs)))
    return written(func, args, kwargs) if is_in_place(func) else out


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if func is aten.copy_.default:
        return _copy(func, *args, **kwargs)
    if func is aten.equal.default:
        return _equal(*args)
    if func is aten.view.default and sizes_meant(args[1], args[0].numel()) == list(args[0].shape):
        func, args = aten.alias.default, args[:1]
    if not runs_shard_by_shard(func):
        raise _refusal(func, args, kwargs)
    return _on_wrappers(func, args, kwargs)


def _refusal(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> NotImplementedError:
    t = next(t for t in pytree.tree_leaves((args, kwargs)) if wrapper_of(t) is not None)
    return NotImplementedError(
        f"{func}: a ShardTensor of sizes {list(t.shape)} whose piece is a LocalShardsWrapper (rank {_C.layout(t).mesh.rank}) "
        "does not have one dense piece per rank to compute on. Use to_local().local_shards(), or redistribute() it first, "
        "which makes dense pieces"
    )


def _on_wrappers(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    leaves = [t for t in pytree.tree_leaves((args, kwargs)) if wrapper_of(t) is not None]
    first = leaves[0]
    if not is_on_lists(func) and any(t.shape != first.shape for t in leaves):
        raise _refusal(func, args, kwargs)
    out = func(*pytree.tree_map(_inner, args), **pytree.tree_map(_inner, kwargs))
    if is_in_place(func):
        return None
    if isinstance(out, list):
        return [_wrapped_like(t, w) if wrapper_of(t) is not None else w for t, w in zip(args[0], out, strict=True)]
    return _wrapped_like(first, out) if holds_shards(out) else tuple(_wrapped_like(first, w) for w in out)


def _inner(value: Any) -> Any:
    """The operand for the wrappers' ops: a wrapper, or a value that is the same on all ranks."""
    if not isinstance(value, torch.Tensor) or not _C.is_shard_tensor(value):
        return value
    wrapper = wrapper_of(value)
    if wrapper is None and (value.ndim or not _C.layout(value).is_replicated):
        raise NotImplementedError(
            f"a ShardTensor whose piece is a LocalShardsWrapper meets one with {_C.layout(value)}, sizes {list(value.shape)} (rank "
            f"{_C.layout(value).mesh.rank}); redistribute() the first, or copy_() the second into one with wrappers"
        )
    return wrapper if wrapper is not None else _C.local(value)


def _wrapped_like(t: torch.Tensor, wrapper: torch.Tensor) -> ShardTensor:
    return _C.wrap(wrapper, _C.layout(t), list(t.shape), list(t.stride()))


def _equal(a: Any, b: Any) -> bool:
    """Compares all ranks' shards; the ranks agree on the answer."""
    mine, other = wrapper_of(a), wrapper_of(b)
    if mine is None or other is None or _C.layout(a).mesh != _C.layout(b).mesh:
        raise _refusal(aten.equal.default, (a, b), {})
    return not _C.max_over(_C.layout(a).mesh, int(not torch.equal(mine, other)))


def first_offsets(t: ShardTensor) -> tuple[int, ...]:
    """Per dim, where the first shard begins."""
    wrapper = wrapper_of(t)
    starts = wrapper.local_offsets() if wrapper is not None else []
    if not starts:
        raise ValueError(f"offsets: there is no shard on rank {_C.layout(t).mesh.rank}")
    return tuple(min(start[dim] for start in starts) for dim in range(t.ndim))


def in_places_of(wrapper: LocalShardsWrapper, whole: torch.Tensor) -> LocalShardsWrapper:
    """Views of the whole tensor at the places of the wrapper's shards."""
    if not wrapper.local_shards():
        return wrapper.like([torch.empty_like(part, dtype=whole.dtype, device=whole.device) for part in wrapper.parts()])
    return wrapper.like(
        [whole[tuple(slice(o, o + n) for o, n in zip(c.offsets, c.sizes, strict=True))] for c in wrapper.local_chunks]
    )
