"""ShardTensor: the Python side of the extension's tensor. Ops are in csrc/. `_methods.py` adds the methods of other folders."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch._guards import detect_fake_mode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, _StridedShard
from torch.utils._pytree import tree_leaves

import shardtensor._C as _C
from shardtensor.tensor import _compile, _handlers
from shardtensor.tensor._from_local import Shapes, coordinate_at, layout_for_local, layout_of_equal_pieces, one_of
from shardtensor.tensor._layout import (
    _PARTIALS,
    _REPLICATE,
    _SHARD,
    ShardingShapes,
    fitting_cuts,
    make_layout,
    moved_layout,
    placements_of,
    shapes_along,
    sharding_shapes_of,
    target_layout,
)
from shardtensor.tensor._mesh import as_device_mesh, at_home, given_mesh
from shardtensor.tensor._pieces import _nothing_of, has_shards, holds_shards

if TYPE_CHECKING:
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper


_WHOLE = (Replicate(),) * 16  # more mesh dims than any mesh has

# While torch.save runs: what it saves as pieces (patches/saving.py).
pieces_saved: ContextVar[list[str] | None] = ContextVar("pieces_saved", default=None)


@dataclass(eq=False)
class ShardTensorSpec(DTensorSpec):
    """A DTensorSpec with uneven cuts. It never equals a stock spec, so stock DTensor's caches never match a ShardTensor."""

    _layout: _C.Layout = None  # type: ignore[assignment]
    _offset: int | None = 0  # of the tensor in its storage

    def __post_init__(self) -> None:
        if isinstance(self.shard_order, _compile.ShardOrder):  # kept by dataclasses.replace, but wrong now
            self.shard_order = None  # type: ignore[assignment]
        super().__post_init__()
        # dataclasses.replace passes the old layout on, which is wrong for other placements.
        if self._layout is None or placements_of(self._layout) != self.placements:
            assert self.tensor_meta is not None
            self._layout = make_layout(self.mesh, self.placements, len(self.tensor_meta.shape), who="ShardTensorSpec")
        self.shard_order = _compile.ShardOrder(self.shard_order or (), self._layout, self._offset)

    def _check_equals(self, other: object, skip_shapes: bool = False) -> bool:
        """torch.compile's guard: `self` is the spec of the tensor in this call, `other` of the traced one."""
        if self is other:
            return True
        if not skip_shapes:
            return self == other
        return (
            isinstance(other, ShardTensorSpec)
            and self._layout.id == other._layout.id  # one layout may have several objects in Python
            and self._offset == other._offset
            and self.tensor_meta.dtype == other.tensor_meta.dtype  # type: ignore[union-attr]
        )

    def __deepcopy__(self, memo: Any) -> ShardTensorSpec:
        return self  # nothing in it changes

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ShardTensorSpec)
            and self._layout == other._layout
            and self.tensor_meta == other.tensor_meta
        )

    def __hash__(self) -> int:
        return hash((self._layout.id, self.tensor_meta))

    def __reduce__(self) -> Any:
        return _rebuild_spec, (self.mesh, self.placements, self.tensor_meta, self._layout.cuts)

    def sharding_shapes(self, mesh_dim: int | None = None) -> Any:
        """Every rank's shape along each mesh dim that shards: {mesh_dim: one shape per coordinate}; or those along one mesh dim."""
        assert self.tensor_meta is not None
        layout, sizes = self._layout, list(self.tensor_meta.shape)
        mine = layout.mesh.coordinate
        shapes = {m: tuple(shapes_along(layout, m, sizes, mine)) for m, (kind, *_) in enumerate(layout.placements) if kind == _SHARD}
        return shapes if mesh_dim is None else shapes[mesh_dim]

    @property
    def local_shape(self) -> torch.Size:
        """The shape of this rank's piece."""
        assert self.tensor_meta is not None
        return torch.Size(self._layout.local_sizes(list(self.tensor_meta.shape)))

    def offsets(self, mesh_dim: int | None = None) -> Any:
        """For each mesh dim, where this rank's piece begins along the tensor dim that it shards, or 0; or for one mesh dim."""
        assert self.tensor_meta is not None
        sizes = self.tensor_meta.shape
        starts = [self._layout.intervals(dim, sizes[dim])[0][0] if kind == _SHARD else 0 for kind, dim, *_ in self._layout.placements]
        return tuple(starts) if mesh_dim is None else starts[mesh_dim]


def _refuse_storage(name: str) -> Callable[..., Any]:
    def method(self: ShardTensor, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"ShardTensor.{name}: a ShardTensor has no memory of its own, its pieces do; "
            "use to_local() for this rank's piece or full_tensor() for the whole"
        )

    method.__name__ = name
    method.__doc__ = "Raises: a ShardTensor has no memory of its own."
    return method


class ShardTensor(DTensor):
    """One global tensor whose pieces live on many ranks, in any sizes.

    Made by :meth:`from_local`, :func:`distribute_tensor` or a factory such as :func:`zeros`. Works wherever a
    ``torch.distributed.tensor.DTensor`` does.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    # DTensor's slots are properties here, over what torch.utils.swap_tensors (Module.to) swaps anyway.
    __slotnames__: ClassVar[list[str]] = []

    def __new__(cls, *args: Any, **kwargs: Any) -> ShardTensor:
        """ShardTensor(local_tensor, spec, *, requires_grad), for torch's own tools. Use from_local instead."""
        if not args or not isinstance(args[0], torch.Tensor):
            raise TypeError("ShardTensor(): use ShardTensor.from_local, shardtensor.distribute_tensor or a factory")
        local, spec = args[0], args[1] if len(args) > 1 else kwargs["spec"]
        requires_grad = kwargs.get("requires_grad", False)
        layout = getattr(spec, "_layout", None) or make_layout(
            spec.mesh, spec.placements, len(spec.tensor_meta.shape), who="ShardTensor"
        )
        meta = spec.tensor_meta
        out = _C.wrap(local.detach(), layout, list(meta.shape), list(meta.stride))
        return out.requires_grad_(requires_grad)  # type: ignore[return-value]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    register_dispatch_handler = staticmethod(_handlers.register_dispatch_handler)
    register_function_handler = staticmethod(_handlers.register_function_handler)
    register_named_function_handler = staticmethod(_handlers.register_named_function_handler)
    unregister_handler = staticmethod(_handlers.unregister_handler)

    # ---- where the pieces are ----

    @property
    def _layout(self) -> _C.Layout:
        return _C.layout(self)

    if TYPE_CHECKING:  # in C, see csrc/bindings/properties.cpp: torch.compile reads them at every call
        _has_partial: bool
        _local_tensor: torch.Tensor
        _spec: ShardTensorSpec
        device_mesh: DeviceMesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        return placements_of(_C.layout(self))

    def offsets(self, mesh_dim: int | None = None) -> tuple[int, ...] | int:
        """Where this rank's piece begins in the global tensor: per tensor dim, or along the dim that `mesh_dim` shards."""
        layout = _C.layout(self)
        if has_shards(self):
            first = self._first_offsets_of_shards()
            return first if mesh_dim is None else first[layout.placements[mesh_dim][1]]
        if mesh_dim is None:
            return tuple(layout.intervals(d, n)[0][0] for d, n in enumerate(self.shape))
        kind, dim, *_ = layout.placements[mesh_dim]
        if kind != _SHARD:
            rank = layout.mesh.rank
            raise ValueError(f"offsets: argument 'mesh_dim': mesh dim {mesh_dim} of {layout} shards no dim (rank {rank})")
        return int(layout.intervals(dim, self.shape[dim])[0][0])

    def sharding_shapes(self) -> dict[int, list[torch.Size]]:
        """How the tensor is cut, as from_local, redistribute, distribute_tensor and the factories take it: for each mesh dim that
        shards, the shapes of the pieces of the ranks along it. Without communication.

        If several mesh dims cut one tensor dim, the shapes of an earlier one are those before the later ones cut, and a later one
        has a list of shapes for each coordinate of the earlier ones, one list after the other. Strided placements are left out.
        """
        who = "ShardTensor.sharding_shapes"
        return sharding_shapes_of(self._layout_of_pieces(who), list(self.shape), who=who)

    def local_sizes(self, rank: int | None = None) -> torch.Size:
        """The sizes of this rank's piece, or of the piece of `rank` (as torch.distributed numbers ranks), without communication."""
        who = "ShardTensor.local_sizes"
        layout = self._layout_of_pieces(who)
        mesh = layout.mesh
        if rank is None and not mesh.has_this_rank:
            return torch.Size([0])
        rank = mesh.rank if rank is None else rank
        if rank not in mesh.ranks:
            raise ValueError(f"{who}: argument 'rank' is {rank}, which {mesh} does not hold (rank {mesh.rank})")
        return torch.Size(layout.local_sizes(list(self.shape), coordinate_at(mesh, mesh.ranks.index(rank))))

    def _layout_of_pieces(self, who: str) -> _C.Layout:
        layout = _C.layout(self)
        if has_shards(self):
            raise NotImplementedError(
                f"{who}: the pieces are LocalShardsWrappers, whose offsets, not the layout, say where the shards are; "
                f"to_local().local_sizes() has this rank's (rank {layout.mesh.rank})"
            )
        return layout

    # ---- in and out ----

    @staticmethod
    def from_local(  # type: ignore[override]
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        sharding_shapes: Shapes = None,
        global_shape: Sequence[int] | None = None,
        *,
        run_check: bool = False,
        shape: torch.Size | None = None,
        stride: tuple[int, ...] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> ShardTensor:
        """A ShardTensor from this rank's piece.

        sharding_shapes gives the sizes of the other ranks' pieces. None: `shape` (if given) is cut as torch.chunk does, else
        all pieces have the size of this one. "chunk": torch.chunk's sizes of `shape`. "infer": the ranks exchange their sizes,
        once. {mesh_dim: one entry per rank along it}, an entry being a size along the dim that is cut, or a whole shape: trusted.
        With run_check the ranks compare their arguments and pieces.

        `global_shape` is PhysicsNeMo's name of `shape`. As there, it does not say how the tensor is cut: without sharding_shapes
        the ranks exchange their sizes.

        If the pieces are LocalShardsWrappers, their offsets, not the placements, say where the shards are.
        """
        who = "ShardTensor.from_local"
        if not isinstance(local_tensor, torch.Tensor):
            raise TypeError(f"{who}: argument 'local_tensor' is {type(local_tensor).__name__}, not a torch.Tensor")
        if isinstance(local_tensor, DTensor):
            raise RuntimeError(f"{who}: argument 'local_tensor' is a {type(local_tensor).__name__}; pass the rank's own piece")
        refuse_transformed(local_tensor, who)
        mesh = given_mesh(device_mesh, who)
        if global_shape is not None:
            shape = torch.Size(one_of(who, shape=shape, global_shape=global_shape))
            sharding_shapes = "infer" if sharding_shapes is None else sharding_shapes
        if type(local_tensor) is not torch.Tensor and holds_shards(local_tensor):
            return ShardTensor._from_shards(
                local_tensor, mesh, placements, shape=shape, stride=stride, sharding_shapes=sharding_shapes, run_check=run_check, who=who
            )
        if shape is None and sharding_shapes is None and not run_check:
            layout, sizes = layout_of_equal_pieces(local_tensor, mesh, placements, who=who), None
        else:
            layout, sizes = layout_for_local(
                local_tensor, mesh, placements, shape=shape, sharding_shapes=sharding_shapes, run_check=run_check, who=who
            )
        grad_layout = None
        if grad_placements is not None:
            grad_layout = _grad_layout(layout, grad_placements, local_tensor.ndim, who)
        if not layout.mesh.has_this_rank:  # as in torch: an empty piece, with the others' layout
            sizes = sizes or layout.sizes_of_equal_pieces(list(local_tensor.shape))
            stride = stride or tuple(_C.strides_like(sizes, local_tensor))
            local_tensor = _nothing_of(local_tensor)
        return _C.from_local(local_tensor, layout, sizes, stride, grad_layout)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's piece. Its gradient must have `grad_placements` (default: the tensor's own)."""
        if _C.is_traced(self) and holds_shards(_C.local(self)):
            return self._shards_as_local()
        if grad_placements is None:
            return _C.to_local(self, None)
        return _C.to_local(self, _grad_layout(self._layout, grad_placements, self.ndim, "ShardTensor.to_local"))

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor, on every rank of the mesh."""
        whole = self.redistribute(placements=_WHOLE[: len(self._layout.placements)])
        return whole.to_local(grad_placements=grad_placements)

    def redistribute(  # type: ignore[override]
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        sharding_shapes: ShardingShapes | None = None,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> ShardTensor:
        """The same tensor with its pieces in another layout; differentiable.

        sharding_shapes asks for uneven cuts, as in from_local. Without it, a mesh dim that still cuts the same tensor dim keeps
        its cut, and the others cut as torch.chunk does. With another `device_mesh`, all ranks of both meshes must call it; a
        rank outside the tensor's mesh has an empty piece.

        async_op returns before the last collective is done; the first use of the result's data waits for it. Sizes, layout and
        views that never copy need no wait. The gradient moves in the same way.
        """
        who = "ShardTensor.redistribute"
        if placements is None:
            raise RuntimeError(f"placements is needed for redistribute! {who}: argument 'placements' is None")
        if _C.is_traced(self) and holds_shards(_C.local(self)):
            return self._redistribute_shards(placements, device_mesh, sharding_shapes, forward_dtype, backward_dtype, who=who)
        if device_mesh is None and sharding_shapes is None:
            layout = moved_layout(self._layout, placements, self.ndim, who=who)
        else:
            layout = target_layout(self._layout, self.shape, placements, device_mesh, sharding_shapes, who=who)
        return _C.redistribute(self, layout, forward_dtype, backward_dtype, async_op)

    @staticmethod
    def from_dtensor(dtensor: DTensor) -> ShardTensor:
        """Converts a stock DTensor to a ShardTensor without a copy; differentiable. The gradient of a leaf arrives in the
        `.grad` of both."""
        if isinstance(dtensor, ShardTensor):
            return dtensor
        leaf = dtensor.is_leaf
        known = [Replicate() if isinstance(p, Partial) and type(p) not in _PARTIALS else p for p in dtensor.placements]
        if known != list(dtensor.placements):  # torch's masked summands: only torch can add them up
            dtensor = dtensor.redistribute(placements=known)
        if holds_shards(dtensor._local_tensor):
            return ShardTensor.from_local(
                dtensor._local_tensor, dtensor.device_mesh, known, shape=dtensor.shape, stride=dtensor.stride()
            ).requires_grad_(dtensor.requires_grad)  # type: ignore[return-value]
        layout = make_layout(dtensor.device_mesh, known, dtensor.ndim, who="ShardTensor.from_dtensor")
        local = dtensor.to_local() if dtensor.requires_grad else dtensor._local_tensor
        out = _C.from_local(local, layout, list(dtensor.shape), list(dtensor.stride()), None)
        if leaf and out.requires_grad and not _C.is_traced(out):
            out.retain_grad()
            # The two gradients do not share memory: either may be written.
            local.register_hook(torch.clone)  # type: ignore[no-untyped-call]
        return out  # type: ignore[return-value]

    def to_dtensor(self) -> DTensor:
        """A stock DTensor with the same pieces; raises if a DTensor cannot express the cuts."""
        if not self._layout.is_even:
            raise RuntimeError(
                f"ShardTensor.to_dtensor: {self._layout} has uneven cuts, which torch's DTensor cannot describe; "
                "redistribute to even ones first"
            )
        return DTensor.from_local(
            self.to_local(), self.device_mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride()
        )

    def backward(  # type: ignore[override]
        self,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """As torch.Tensor.backward; a Partial tensor is reduced first."""
        root = self
        if self._has_partial:
            whole = [Replicate() if isinstance(p, Partial) else p for p in self.placements]
            if torch.is_grad_enabled():
                root = self.redistribute(placements=whole)
            else:  # in an optimizer's step, which calls a closure
                with torch.enable_grad():
                    root = self.redistribute(placements=whole)
        if gradient is None and root.numel() == 1:
            gradient = torch.ones_like(root)
        torch.autograd.backward(root, gradient, retain_graph, create_graph, inputs=inputs)

    # ---- flatten protocol, traced tensors and those of LocalShardsWrappers ----

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        ours = [t for t in tree_leaves((args, kwargs)) if isinstance(t, ShardTensor)]
        if any(has_shards(t) for t in ours):
            return cls._dispatch_on_shards(func, args, kwargs)
        _compile.guard_graph()
        _compile.settle(ours)
        with detect_fake_mode([_C.local(t) for t in ours]) or nullcontext():  # tensors made inside are fake too
            out = _C.call(_handlers.overrides(_handlers.name_of(func)), func._schema.name, func._schema.overload_name, *args, **kwargs)
            for t in tree_leaves(out):
                if isinstance(t, ShardTensor):
                    _compile.keep_extents(t)
            return out

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return _compile.flatten(self)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], flatten_spec: Any, size: Any, stride: Any) -> ShardTensor:
        return _compile.unflatten(inner, flatten_spec, size, stride)  # type: ignore[return-value]

    def _is_view(self) -> bool:
        """torch.compile takes a view for a tensor of its own: torch would take the same view of a graph's input by as_strided, which may
        have another layout (`patches/runtime.py` checks writes)."""
        return super()._is_view() and not _compile.is_tracing()  # type: ignore[no-untyped-call]

    def _stable_hash_for_caching(self) -> str:
        return _compile.stable_hash(self)

    def __coerce_tangent_metadata__(self) -> ShardTensor:
        return _compile.tangent(self)  # type: ignore[no-any-return]

    def __coerce_same_metadata_as_tangent__(self, flatten_spec: Any, expected_type: Any = None) -> ShardTensor | None:
        return _compile.tangent_like(self, flatten_spec, expected_type)  # type: ignore[no-any-return]

    # ---- values ----

    def _readable(self, what: str) -> torch.Tensor:
        if self._layout.is_replicated and not has_shards(self):
            return self._local_tensor
        raise RuntimeError(
            f"ShardTensor.{what}: this rank holds a piece ({self._layout}); use full_tensor().{what}() for the whole "
            f"or to_local().{what}() for the piece"
        )

    def numpy(self, *, force: bool = False) -> Any:
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on a ShardTensor that requires grad. Use tensor.detach().numpy() instead.")
        return self._readable("numpy").detach().numpy(force=force)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        value = self.numpy()
        return value if dtype is None else value.astype(dtype)

    def tolist(self) -> Any:
        return self._readable("tolist").detach().tolist()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self._readable("__dlpack__").__dlpack__(*args, **kwargs)

    def __dlpack_device__(self) -> Any:
        return self._local_tensor.__dlpack_device__()

    data_ptr = _refuse_storage("data_ptr")
    share_memory_ = _refuse_storage("share_memory_")
    resize_ = _refuse_storage("resize_")
    resize_as_ = _refuse_storage("resize_as_")
    set_ = _refuse_storage("set_")
    pin_memory = _refuse_storage("pin_memory")
    to_mkldnn = _refuse_storage("to_mkldnn")

    def is_pinned(self, device: Any = None) -> bool:
        """Whether this rank's piece is; without communication."""
        return bool(self._local_tensor.is_pinned() if device is None else self._local_tensor.is_pinned(device))

    def __setitem__(self, index: Any, value: Any) -> None:
        """Replaces an int index on a sharded dim by a slice of length 1, which does not move."""
        try:
            _C.set_item(self, *_ints_as_slices(self, index, value))
        except RuntimeError as error:
            _name_value(error, value)
            raise

    def new_tensor(  # type: ignore[override]
        self, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        """Returns a plain tensor: `data` belongs to no mesh."""
        dtype, device = dtype or self.dtype, device or self.device
        return torch.tensor(data, dtype=dtype, device=device, requires_grad=requires_grad, **kwargs)

    def new(self, *args: Any, device: Any = None) -> torch.Tensor:  # type: ignore[override]
        """torch's old name: of sizes, `new_empty`; else as `new_tensor`, because data belongs to no mesh."""
        sizes = args[0] if len(args) == 1 and isinstance(args[0], torch.Size) else args
        if all(isinstance(n, int | torch.SymInt) for n in sizes):
            return self.new_empty(sizes if args else (0,), device=device)
        return torch.empty(0, dtype=self.dtype, device=device or self.device).new(*args)  # type: ignore[no-any-return]

    def is_shared(self) -> bool:
        return bool(self._local_tensor.is_shared())  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        layout = self._layout
        text = f"ShardTensor(local_tensor={_C.local(self).detach()}, shape={tuple(self.shape)}, layout={layout}"
        if self.grad_fn is not None:
            text += f", grad_fn=<{self.grad_fn.name()}>"
        elif self.requires_grad:
            text += ", requires_grad=True"
        return text + ")"

    def __format__(self, spec: str) -> str:
        if self.ndim == 0 and not isinstance(self, torch.nn.Parameter):
            return self.item().__format__(spec)
        return object.__format__(self, spec)

    # ---- copies and files ----

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensor:
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment."
            )
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        local = self._local_tensor.detach().clone()
        out = _as_leaf(
            _C.wrap(local, self._layout, list(self.shape), list(self.stride())),
            self.requires_grad,
            isinstance(self, torch.nn.Parameter),
        )
        memo[id(self)] = out
        if self.grad is not None:
            out.grad = copy.deepcopy(self.grad, memo)
        out.__dict__.update(copy.deepcopy(self._attributes(), memo))
        return out

    def _attributes(self) -> dict[str, Any]:
        """The attributes that users have set on the tensor."""
        return {k: v for k, v in self.__dict__.items() if k != "_is_param"}

    def __reduce_ex__(self, protocol: Any) -> Any:
        layout = self._layout
        saved = pieces_saved.get()
        if saved is not None and not layout.is_replicated:
            saved.append(f"shape {tuple(self.shape)}, {layout}")
        state = (
            self._local_tensor.detach(),
            self.device_mesh,
            self.placements,
            layout.cuts,
            tuple(self.shape),
            self.stride(),
            self.requires_grad,
            isinstance(self, torch.nn.Parameter),
            self._attributes(),
            (layout.mesh.rank, dist.get_world_size() if dist.is_initialized() else 0),
        )
        return _rebuild, state

    # ---- from other folders, added by `_methods.py` ----

    if TYPE_CHECKING:

        def explain(
            self,
            placements: Sequence[Placement],
            device_mesh: DeviceMesh | None = None,
            *,
            sharding_shapes: ShardingShapes | None = None,
        ) -> Any: ...

        def rebalance(
            self,
            *,
            costs: torch.Tensor | Sequence[float] | None = None,
            times: float | Sequence[float] | None = None,
            mesh_dim: int | None = None,
            tolerance: float = 0.02,
            multiple_of: int = 1,
        ) -> ShardTensor: ...

        def local_shards(self) -> LocalShardsWrapper: ...

        @staticmethod
        def from_sharded_tensor(
            sharded_tensor: Any,
            device_mesh: DeviceMesh | None = None,
            placements: Sequence[Placement] | None = None,
            *,
            sharding_shapes: ShardingShapes | None = None,
        ) -> ShardTensor: ...

        def to_sharded_tensor(self, sharding_spec: Any = None, *, process_group: Any = None) -> Any: ...

        # Replacements for the class's own methods if the piece is several shards.
        _from_shards: ClassVar[Callable[..., ShardTensor]]
        _shards_as_local: Callable[[], torch.Tensor]
        _redistribute_shards: Callable[..., ShardTensor]
        _first_offsets_of_shards: Callable[[], tuple[int, ...]]
        _dispatch_on_shards: ClassVar[Callable[..., Any]]
        _rebuilt_shards: ClassVar[Callable[..., torch.Tensor]]


def add_methods(**methods: Any) -> None:
    """Makes functions that build on the class its methods, under these names."""
    for name, method in methods.items():
        setattr(ShardTensor, name, method)


def _ints_as_slices(t: ShardTensor, index: Any, value: Any) -> tuple[Any, Any]:
    """The same assignment without ints on sharded dims: x[3] = v becomes x[3:4] = v. Only ints and slices change."""
    parts = list(index) if isinstance(index, tuple) else [index]
    basic = all(p is None or p is Ellipsis or isinstance(p, slice) or type(p) is int for p in parts)
    if not basic or not any(type(p) is int for p in parts) or parts.count(Ellipsis) > 1:
        return index, value
    missing = t.ndim - sum(p is not None and p is not Ellipsis for p in parts)
    if missing < 0:
        return index, value
    at = parts.index(Ellipsis) if Ellipsis in parts else len(parts)
    parts[at : at + 1] = [slice(None)] * missing
    sharded = {p.dim for p in t.placements if hasattr(p, "dim")}
    dim, behind = t.ndim - 1, 0  # `behind`: dims of the selected part to the right of this one
    for i in range(len(parts) - 1, -1, -1):
        part = parts[i]
        if type(part) is int and dim in sharded and -t.shape[dim] <= part < t.shape[dim]:
            part %= t.shape[dim]
            parts[i] = slice(part, part + 1)
            if isinstance(value, torch.Tensor) and value.ndim >= behind:
                value = value.unsqueeze(value.ndim - behind)
        behind += type(parts[i]) is not int
        dim -= part is not None
    return tuple(parts), value


def _name_value(error: RuntimeError, value: Any) -> None:
    """Makes an assignment's error name the user's value: the op got what torch had expanded it to."""
    named = re.match(r"aten::copy_: argument 'src' is a plain torch\.Tensor of sizes \[[^]]*\]", str(error))
    if named and isinstance(value, torch.Tensor):
        rest = str(error)[named.end() :]
        error.args = (f"ShardTensor.__setitem__: the value is a plain torch.Tensor of sizes {list(value.shape)}{rest}",)


def refuse_transformed(t: Any, who: str) -> None:
    """Raises inside torch.func's transforms: they wrap every tensor in one of their own, which has no pieces."""
    if isinstance(t, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(t):
        raise NotImplementedError(
            f"{who}: a tensor inside torch.func.grad, jvp or vmap cannot be distributed, moved or taken apart. Do that outside of "
            "the transform, or use torch.autograd.grad (torch.func.functional_call works with both)"
        )


def _grad_layout(layout: _C.Layout, grad_placements: Sequence[Placement], ndim: int, who: str) -> _C.Layout:
    mesh = as_device_mesh(layout.mesh)
    even = make_layout(mesh, grad_placements, ndim, who=f"{who}: grad_placements")
    return _C.Layout(layout.mesh, even.placements, fitting_cuts(layout, even.placements))


def _as_leaf(t: torch.Tensor, requires_grad: bool, is_parameter: bool) -> ShardTensor:
    if is_parameter:
        return torch.nn.Parameter(t, requires_grad)  # type: ignore[return-value]
    return t.requires_grad_(requires_grad)  # type: ignore[return-value]


def _rebuild(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    cuts: list[list[int] | None],
    shape: Sequence[int],
    stride: Sequence[int],
    requires_grad: bool,
    is_parameter: bool,
    attributes: dict[str, Any],
    saved_by: tuple[int, int] | None = None,
) -> ShardTensor:
    layout = make_layout(at_home(mesh), placements, len(shape), cuts, who="ShardTensor.__reduce_ex__")
    _check_piece(local, layout, list(shape), saved_by)
    out = _as_leaf(_C.wrap(local, layout, list(shape), list(stride)), requires_grad, is_parameter)
    out.__dict__.update(attributes)
    return out


def _check_piece(local: torch.Tensor, layout: _C.Layout, shape: list[int], saved_by: tuple[int, int] | None) -> None:
    """Refuses a piece that is not this rank's: a file of torch.save holds the piece of the rank that wrote it.

    saved_by: that rank, and the number of ranks then (0: no process group); files from before 2026-12 do not say it.
    """
    mesh = layout.mesh
    wrong = ""
    if saved_by is not None:
        rank, ranks = saved_by
        now = dist.get_world_size() if dist.is_initialized() else 0
        if ranks and now and ranks != now:
            wrong = f"one of {ranks} ranks saved it, and now there are {now}"
        elif rank != mesh.rank and _piece_at(layout, rank) != _piece_at(layout, mesh.rank):
            wrong = f"rank {rank} saved it"
    if not wrong and mesh.has_this_rank and not holds_shards(local):
        due = layout.local_sizes(shape)
        if list(local.shape) != due:
            wrong = f"it has sizes {list(local.shape)}, and this rank's piece has {due}"
    if wrong:
        raise ValueError(
            f"torch.load: a ShardTensor of sizes {shape}, {layout}: the file does not hold the piece of rank {mesh.rank}: {wrong}. torch.save writes "
            "the pieces of one rank: save on each rank to a file of its own and load that, save full_tensor(), or use torch.distributed.checkpoint, "
            "which loads into any layout on any number of ranks"
        )


def _piece_at(layout: _C.Layout, rank: int) -> Any:
    """What tells the piece of a rank from others': its coordinates where the layout does not replicate."""
    mesh = layout.mesh
    if rank not in mesh.ranks:
        return None
    at, out = mesh.ranks.index(rank), []
    for n, (kind, *_) in zip(reversed(mesh.shape), reversed(layout.placements), strict=True):
        at, coordinate = divmod(at, n)
        out.append(None if kind == _REPLICATE else coordinate)
    return out


def _rebuild_spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], tensor_meta: TensorMeta, cuts: list[list[int] | None]
) -> ShardTensorSpec:
    mesh = at_home(mesh)
    layout = make_layout(mesh, placements, len(tensor_meta.shape), cuts, who="ShardTensorSpec.__reduce__")
    return ShardTensorSpec(mesh, placements, tensor_meta=tensor_meta, _layout=layout)


def _rebuild_shards(*state: Any) -> torch.Tensor:
    """Loads a LocalShardsWrapper from a file. It is here so that torch.load finds it before the class is imported."""
    return ShardTensor._rebuilt_shards(*state)


def _take_functions(to_handlers: bool) -> None:
    """Sets whether Python-level functions of ShardTensors go to users' handlers."""
    function: Any = classmethod(_handlers.call) if to_handlers else torch._C._disabled_torch_function_impl
    ShardTensor.__torch_function__ = function  # type: ignore[method-assign]
    _C.set_python_class(ShardTensor, not to_handlers)


def _make_spec(t: ShardTensor) -> ShardTensorSpec:
    layout = _C.layout(t)
    return ShardTensorSpec(
        as_device_mesh(layout.mesh),
        placements_of(layout),
        tensor_meta=TensorMeta(t.shape, t.stride(), t.dtype),
        _layout=layout,
        _offset=_compile.offset_of(t),
    )


_C.install_properties(ShardTensor, _make_spec, as_device_mesh)
_compile.in_graph(ShardTensor.from_local, ShardTensor.from_dtensor)
_handlers.when_switched(_take_functions)
_C.install_getitem(ShardTensor)
_C.install_operators(ShardTensor)
torch.serialization.add_safe_globals(
    [ShardTensor, ShardTensorSpec, _NormPartial, _StridedShard, _rebuild, _rebuild_spec, _rebuild_shards]
)
