"""distribute_tensor, distribute_module and the factories, with the signatures of torch.distributed.tensor."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._prims_common import make_contiguous_strides_for
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import shardtensor._C as _C
from shardtensor.tensor import _compile
from shardtensor.tensor._from_local import _MOST_DIMS, coordinate_at, one_of
from shardtensor.tensor._layout import _PARTIAL, _SHARD, ShardingShapes, check_cuts, cuts_from_shapes, make_layout, upto
from shardtensor.tensor._mesh import as_mesh, device_of, given_mesh, told_apart
from shardtensor.tensor._pieces import _piece
from shardtensor.tensor._replaced import note_replaced
from shardtensor.tensor._tensor import ShardTensor
from shardtensor.tensor._ties import places, ties_kept


def _full_layout(
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    sizes: Sequence[int],
    sharding_shapes: ShardingShapes | None,
    who: str,
    partial: tuple[str, ...] = (),
) -> _C.Layout:
    """The requested layout, after checks. `partial`: the reductions that are allowed."""
    layout = make_layout(mesh, placements, len(sizes), who=who)
    if sharding_shapes is not None:
        cuts = cuts_from_shapes(layout, sharding_shapes, len(sizes), who=who)
        layout = make_layout(mesh, placements, len(sizes), cuts, who=who)
        check_cuts(layout, cuts, sizes, who=who)
    if any(kind == _PARTIAL and reduce not in partial for kind, _, _, reduce, _ in layout.placements):
        allowed = f" and Partial of {' or '.join(partial)}" if partial else ""
        raise RuntimeError(
            f"{who}: argument 'placements' {tuple(placements or ())}: use Shard, Replicate{allowed} "
            f"(rank {layout.mesh.rank})"
        )
    return layout


def _summand(whole: torch.Tensor, layout: _C.Layout) -> torch.Tensor:
    """For Partial("sum"), the first rank along the mesh dim keeps the tensor and the others hold zeros."""
    for mesh_dim, (kind, _, _, reduce, _) in enumerate(layout.placements):
        if kind == _PARTIAL and reduce == "sum" and layout.mesh.coordinate[mesh_dim] != 0:
            return torch.zeros_like(whole)
    return whole


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
    sharding_shapes: ShardingShapes | None = None,
) -> ShardTensor:
    """Cuts a tensor that every rank holds into a ShardTensor, with the values of `src_data_rank` along each mesh dim.

    src_data_rank=None uses each rank's own values, without communication. For uneven cuts, pass sharding_shapes:
    {mesh_dim: one size along the cut dim, or one shape, per rank along it}.
    """
    who = "distribute_tensor"
    mesh = given_mesh(device_mesh, who)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{who}: argument 'tensor' is a {type(tensor).__name__}, not a torch.Tensor; pass torch.as_tensor(...) of it")
    if isinstance(tensor, DTensor):
        ours = ShardTensor.from_dtensor(tensor)
        layout = _full_layout(mesh, placements, tensor.shape, sharding_shapes, who, partial=("sum", "avg"))
        if layout.mesh != ours._layout.mesh or layout.placements != ours._layout.placements:
            there, here = told_apart(ours._layout, layout)
            differ = "device mesh" if layout.mesh != ours._layout.mesh else "placements"
            raise ValueError(
                f"Cannot distribute a DTensor with {differ} {there} to a different {differ} {here}. do you want to call `redistribute` "
                f"instead? {who}: argument 'tensor' (rank {layout.mesh.rank})"
            )
        return ours if sharding_shapes is None else ours.redistribute(placements=placements, sharding_shapes=sharding_shapes)
    if not tensor.is_leaf:
        raise RuntimeError("`distribute_tensor` should be used to distribute leaf tensors! but found non-leaf tensor!")
    layout = _full_layout(mesh, placements, tensor.shape, sharding_shapes, who, partial=("sum", "avg"))
    if src_data_rank is not None and not 0 <= src_data_rank < min(layout.mesh.shape):
        raise ValueError(
            f"{who}: argument 'src_data_rank' is {src_data_rank}, a coordinate that {layout.mesh} does not have along every mesh "
            f"dim (rank {layout.mesh.rank})"
        )
    local = tensor.detach()
    if not layout.mesh.has_this_rank:
        nothing = torch.empty(0, dtype=tensor.dtype, device=tensor.device if tensor.is_meta else device_of(mesh))
        return _C.wrap(nothing, layout, list(tensor.shape), _C.strides_like(list(tensor.shape), tensor)).requires_grad_(tensor.requires_grad)  # type: ignore[return-value]
    if not tensor.is_meta:
        local = local.to(device_of(mesh))
        if src_data_rank is not None:
            local = local.clone(memory_format=torch.contiguous_format)
            for part in _parts(local):
                whole = part.contiguous()
                for mesh_dim in range(len(layout.mesh.shape)):
                    _C.broadcast(whole, layout.mesh, mesh_dim, src_data_rank)
                if whole is not part:
                    part.copy_(whole)
    piece = _piece(_summand(local, layout), layout)
    if src_data_rank is None or piece is not local:  # never alias the user's tensor, nor keep the whole alive
        piece = piece.clone()
    strides = _C.strides_like(list(tensor.shape), tensor)
    out = _C.wrap(_C.laid(piece, strides), layout, list(tensor.shape), strides)
    return out.requires_grad_(tensor.requires_grad)  # type: ignore[return-value]


def _parts(t: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with memory in a wrapper tensor (a quantized one, for example); of others, the tensor itself."""
    if not is_traceable_wrapper_subclass(t):
        return [t]
    return [part for name in t.__tensor_flatten__()[0] for part in _parts(getattr(t, name))]


def scatter_tensor(
    tensor: torch.Tensor | None,
    global_src: int,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    global_shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    *,
    mesh: DeviceMesh | None = None,
    shape: Sequence[int] | None = None,
    sharding_shapes: ShardingShapes | None = None,
) -> ShardTensor:
    """Cuts a tensor that only the rank `global_src` holds. The others pass None: they receive its shape and dtype, and compare
    them with the arguments, if given. `mesh` and `global_shape`, PhysicsNeMo's names, are `device_mesh` and `shape`."""
    who = "scatter_tensor"
    mesh = given_mesh(one_of(who, device_mesh=device_mesh, mesh=mesh), who)
    shape = one_of(who, shape=shape, global_shape=global_shape)
    view = as_mesh(mesh)
    if global_src not in view.ranks:
        raise ValueError(f"{who}: argument 'global_src' is rank {global_src}, which {view} does not hold (rank {view.rank})")
    if not view.has_this_rank:
        raise ValueError(f"{who}: argument 'device_mesh' ({view}) does not hold rank {view.rank}")
    source = view.rank == global_src
    coordinate = coordinate_at(view, view.ranks.index(global_src))
    device = device_of(mesh)
    names = sorted({str(d) for d in vars(torch).values() if isinstance(d, torch.dtype)})
    told = torch.zeros(3 + _MOST_DIMS, dtype=torch.int64, device=device)  # whether there is a tensor, its dtype, its sizes
    if source and tensor is not None:
        told[: 3 + tensor.ndim] = torch.tensor([1, names.index(str(tensor.dtype)), tensor.ndim, *tensor.shape])
    for mesh_dim in range(len(view.shape)):
        _C.broadcast(told, view, mesh_dim, coordinate[mesh_dim])
    there, index, ndim, *sizes = told.tolist()
    sizes = sizes[:ndim]
    kind = getattr(torch, names[index].removeprefix("torch."))
    if not there:
        raise ValueError(f"{who}: argument 'tensor' is None on the source, rank {global_src} (reported by rank {view.rank})")
    if shape is not None and list(shape) != sizes:
        raise ValueError(f"{who}: argument 'shape' is {tuple(shape)} on rank {view.rank}, rank {global_src} has {tuple(sizes)}")
    if dtype is not None and dtype != kind:
        raise ValueError(f"{who}: argument 'dtype' is {dtype} on rank {view.rank}, rank {global_src} has {kind}")
    layout = _full_layout(mesh, placements, sizes, sharding_shapes, who, partial=("sum", "avg"))
    # Mesh dim by mesh dim: the ranks that have a block cut it for the next dim's ranks.
    block = tensor.detach().to(device) if source and tensor is not None else None
    for mesh_dim in range(len(view.shape)):
        mine = all(view.coordinate[m] == coordinate[m] for m in range(mesh_dim + 1, len(view.shape)))
        if not mine:
            continue
        block = _scatter_along(block, sizes, kind, device, layout, mesh_dim, coordinate)
    assert block is not None
    block = _summand(block, layout).contiguous()  # the others do not know its strides
    out = _C.wrap(block, layout, sizes, make_contiguous_strides_for(sizes))
    return out.requires_grad_(requires_grad)  # type: ignore[return-value]


def _scatter_along(
    block: torch.Tensor | None,
    sizes: list[int],
    dtype: torch.dtype,
    device: torch.device,
    layout: _C.Layout,
    mesh_dim: int,
    source: list[int],
) -> torch.Tensor:
    """The ranks in the source's slice send to each coordinate of the mesh dim the block for it and for the mesh dims after."""
    view = layout.mesh
    kind, dim, *_ = layout.placements[mesh_dim]
    before, after = upto(layout, mesh_dim), upto(layout, mesh_dim + 1)
    if kind != _SHARD:
        if block is None:
            block = torch.empty(before.local_sizes(sizes), dtype=dtype, device=device)
        block = block.contiguous()
        _C.broadcast(block, view, mesh_dim, source[mesh_dim])
        return block
    pieces = []
    if block is not None:
        held = [i for start, n in before.intervals(dim, sizes[dim]) for i in range(start, start + n)]
        place = {i: k for k, i in enumerate(held)} if held else {}
        for c in range(view.shape[mesh_dim]):
            at = [*view.coordinate[:mesh_dim], c, *view.coordinate[mesh_dim + 1 :]]
            parts = [block.narrow(dim, place.get(start, 0), n) for start, n in after.intervals(dim, sizes[dim], at)]
            pieces.append(parts[0] if len(parts) == 1 else torch.cat(parts, dim))
    mine = torch.empty(after.local_sizes(sizes), dtype=dtype, device=device)
    _C.scatter(mine, pieces, view, mesh_dim, source[mesh_dim])
    return mine


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[[nn.Module, Any, DeviceMesh], Any] | None = None,
    output_fn: Callable[[nn.Module, Any, DeviceMesh], Any] | None = None,
) -> nn.Module:
    """Makes a module's parameters ShardTensors: by `partition_fn`; parameters that it leaves plain become replicated. A parameter
    that several submodules hold stays one parameter: `partition_fn` may place it in any of them, but not differently in two.

    input_fn and output_fn convert the inputs and outputs of the whole module, once per call.
    """
    if getattr(module, "_distribute_module_applied", False):
        raise RuntimeError("distribute_module: argument 'module' has been distributed already; it can be done once")
    mesh = given_mesh(device_mesh, "distribute_module")
    before = list(module.parameters())
    with ties_kept(module, "distribute_module"):
        for name, submodule in module.named_modules():
            if partition_fn is not None:
                partition_fn(name, submodule, mesh)
    for held in places(module):
        parameter = held[0].parameter
        if parameter is not None and not isinstance(parameter, DTensor):
            spread = distribute_tensor(parameter.data, mesh, [Replicate()] * mesh.ndim)
            replicated = nn.Parameter(spread, parameter.requires_grad)
            for place in held:
                place.module.register_parameter(place.key, replicated)
    for submodule in module.modules():
        for key, buffer in submodule._buffers.items():
            if buffer is not None and not isinstance(buffer, DTensor):
                submodule._buffers[key] = distribute_tensor(buffer, mesh, [Replicate()] * mesh.ndim)
    note_replaced(before, module)
    if input_fn is not None:
        prepare = _with_module(input_fn, "input_fn")
        module.register_forward_pre_hook(lambda m, inputs: prepare(m, inputs, mesh))
    if output_fn is not None:
        finish = _with_module(output_fn, "output_fn")
        module.register_forward_hook(lambda m, inputs, outputs: finish(m, outputs, mesh))
    module._distribute_module_applied = True  # type: ignore[assignment]
    return module


def _with_module(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Also accepts torch's older form, without the module."""
    count = len(inspect.signature(function).parameters)
    if count == 3:
        return function
    if count != 2:
        raise ValueError(f"distribute_module: argument '{name}' takes {count} arguments, not (module, values, device_mesh)")
    warnings.warn(
        f"distribute_module: argument '{name}' without the module is deprecated; take (module, values, device_mesh)",
        FutureWarning,
        stacklevel=3,
    )
    return lambda module, values, mesh: function(values, mesh)


def _sizes(size: Sequence[Any]) -> list[int]:
    if len(size) == 1 and isinstance(size[0], (list, tuple, torch.Size)):
        size = size[0]
    return [int(n) for n in size]


def _make(
    who: str,
    fill: Callable[..., torch.Tensor],
    sizes: list[int],
    dtype: torch.dtype | None,
    layout: torch.layout,
    requires_grad: bool,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    sharding_shapes: ShardingShapes | None,
) -> ShardTensor:
    if layout != torch.strided:
        raise ValueError(f"{who}: argument 'layout' is {layout}; only torch.strided is supported")
    mesh = given_mesh(device_mesh, who)
    where = _full_layout(mesh, placements, sizes, sharding_shapes, who)
    local = fill(where.local_sizes(sizes), dtype=dtype, device=device_of(mesh))
    out = _C.wrap(local, where, sizes, _C.strides_like(sizes, local))
    return out.requires_grad_(requires_grad)  # type: ignore[return-value]


def zeros(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    sharding_shapes: ShardingShapes | None = None,
) -> ShardTensor:
    """A ShardTensor of zeros. Each rank makes only its piece; `placements` default to Replicate.

    sharding_shapes asks for uneven cuts: {mesh_dim: one shape per rank along it}. The other factories take it too.
    """
    return _make("zeros", torch.zeros, _sizes(size), dtype, layout, requires_grad, device_mesh, placements, sharding_shapes)


def ones(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    sharding_shapes: ShardingShapes | None = None,
) -> ShardTensor:
    """A ShardTensor of ones. Each rank makes only its piece; `placements` default to Replicate."""
    return _make("ones", torch.ones, _sizes(size), dtype, layout, requires_grad, device_mesh, placements, sharding_shapes)


def empty(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    sharding_shapes: ShardingShapes | None = None,
) -> ShardTensor:
    """A ShardTensor whose values are not set. Each rank makes only its piece; `placements` default to Replicate."""
    return _make("empty", torch.empty, _sizes(size), dtype, layout, requires_grad, device_mesh, placements, sharding_shapes)


def full(
    size: Any,
    fill_value: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    sharding_shapes: ShardingShapes | None = None,
) -> ShardTensor:
    """A ShardTensor filled with one value. Each rank makes only its piece; `placements` default to Replicate."""
    def fill(sizes: list[int], **kwargs: Any) -> torch.Tensor:
        return torch.full(sizes, fill_value, **kwargs)

    return _make("full", fill, _sizes((size,)), dtype, layout, requires_grad, device_mesh, placements, sharding_shapes)


def _spaced(who: str, whole: torch.Tensor, layout: torch.layout, requires_grad: bool, device_mesh: DeviceMesh | None,
            placements: Sequence[Placement] | None, sharding_shapes: ShardingShapes | None) -> ShardTensor:
    sizes = [whole.numel()]
    mesh = given_mesh(device_mesh, who)
    where = _full_layout(mesh, placements, sizes, sharding_shapes, who)

    def fill(local_sizes: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if not where.mesh.has_this_rank:
            return torch.empty(local_sizes, dtype=dtype, device=device)
        return _piece(whole, where).to(device=device).clone()

    return _make(who, fill, sizes, whole.dtype, layout, requires_grad, mesh, placements, sharding_shapes)


def linspace(
    start: Any,
    end: Any,
    steps: int,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    sharding_shapes: ShardingShapes | None = None,
) -> ShardTensor:
    """torch.linspace as a ShardTensor. Each rank computes the whole and keeps its piece; `placements` default to Replicate."""
    whole = torch.linspace(start, end, steps, dtype=dtype)
    return _spaced("linspace", whole, layout, requires_grad, device_mesh, placements, sharding_shapes)


def logspace(
    start: Any,
    end: Any,
    steps: int,
    base: float = 10.0,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    sharding_shapes: ShardingShapes | None = None,
) -> ShardTensor:
    """torch.logspace as a ShardTensor. Each rank computes the whole and keeps its piece; `placements` default to Replicate."""
    whole = torch.logspace(start, end, steps, base=base, dtype=dtype)
    return _spaced("logspace", whole, layout, requires_grad, device_mesh, placements, sharding_shapes)


def rand(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    sharding_shapes: ShardingShapes | None = None,
) -> ShardTensor:
    """Uniform in [0, 1). The values depend only on the seed and the global index, not on the placements or the ranks."""
    out = empty(*size, dtype=dtype, layout=layout, device_mesh=device_mesh, placements=placements, sharding_shapes=sharding_shapes)
    return out.uniform_().requires_grad_(requires_grad)  # type: ignore[return-value]


def randn(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    sharding_shapes: ShardingShapes | None = None,
) -> ShardTensor:
    """Standard normal. The values depend only on the seed and the global index, not on the placements or the ranks."""
    out = empty(*size, dtype=dtype, layout=layout, device_mesh=device_mesh, placements=placements, sharding_shapes=sharding_shapes)
    return out.normal_().requires_grad_(requires_grad)  # type: ignore[return-value]


_compile.in_graph(distribute_tensor, empty, full, linspace, logspace, ones, rand, randn, scatter_tensor, zeros)
