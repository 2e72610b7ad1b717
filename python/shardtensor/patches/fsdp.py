"""torch.distributed.fsdp's fully_shard over modules whose parameters are ShardTensors already (tensor parallelism), and the host
time of its hooks. All versions.

FSDP2 cuts each rank's piece of a parameter once more, as torch.chunk does, and describes the result by a stock spec, which
cannot say that the original pieces were uneven. Here it gets a spec that can. Padding: since torch 2.15.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

import shardtensor._C as _C
from shardtensor.patches._patch import Patch
from shardtensor.tensor._compile import outside_graphs
from shardtensor.tensor._layout import _SHARD, make_layout
from shardtensor.tensor._replaced import note_gone
from shardtensor.tensor._tensor import ShardTensor, ShardTensorSpec


def _chunk(size: int, pieces: int, index: int) -> int:
    full = -(-size // pieces)
    return max(0, min(full, size - full * index))


def _strided_cuts(inner: _C.Layout, dim: int, size: int, pieces: int) -> tuple[list[int], dict[int, list[int]]]:
    """Chunks each piece that `inner` cuts from the dim into `pieces`. Returns the sizes of the inner pieces, and for each
    inner mesh dim that cuts the dim, one row of sizes per index of the chunk and coordinate of the earlier inner mesh dims."""
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
    """Adds the cuts of `inner`, the original tensor's spec, to FSDP's spec of its pieces."""
    assert spec.tensor_meta is not None
    layout, shape = inner._layout, spec.tensor_meta.shape
    names = spec.mesh.mesh_dim_names or ()
    # The inner mesh dims come last, or are found by name if FSDP's own are among them.
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
    spec = getattr(param, "_unsharded_dtensor_spec", None) or getattr(param, "_tp_spec", None)  # depends on torch's version
    return spec if isinstance(spec, ShardTensorSpec) else None


def _other_layout(param: Any, grad: torch.Tensor | None) -> _C.Layout | None:
    """The layout to which a gradient has to move before FSDP reduces it; None if it need not."""
    inner = _inner_spec(param)
    if inner is None or not isinstance(grad, ShardTensor) or getattr(param.mesh_info, "is_spmd_mesh", False):  # FSDP does it
        return None
    return inner._layout if grad._layout != inner._layout else None


def _in_one_group(param: Any, at: Any) -> Any:
    """FSDP keeps a tied parameter tied inside one group. In a second group it becomes a parameter of its own, as of DTensors, whose
    ties parallelize_module has cut before."""
    if not isinstance(param, ShardTensor):
        return param
    here = f"'{at.param_name}' of a {type(at.module).__name__}"
    there = param.__dict__.setdefault("_shardtensor_fsdp_group", here)
    if there is here:  # the first call
        return param
    warnings.warn(
        f"fully_shard: {here} is tied to {there}, which an earlier call of fully_shard has sharded. They are two parameters from now on, "
        f"of the same values. To keep them tied, shard both modules in one call: fully_shard([module_a, module_b])",
        stacklevel=2,
    )
    return torch.nn.Parameter(param.detach().clone(), param.requires_grad)


# ---- uneven dims other than the first, and pieces without elements ----


class _Padded:
    """A parameter that FSDP should cut unevenly along a dim other than the first, which FSDP refuses, or whose piece is empty,
    which FSDP can neither describe nor reduce. FSDP sees a padded parameter, which is cut evenly and has elements. Users of its
    shard, its gradient or the whole get views without the padding."""

    def __init__(self, param: Any, data: torch.Tensor, dim: int) -> None:
        ranks = getattr(param.mesh_info, "shard_mesh_size", 1)
        self.sizes = data.size()
        self.mine = list(self.sizes)
        self.mine[dim] = _chunk(self.sizes[dim], ranks, getattr(param.mesh_info, "shard_mesh_rank", 0))
        self.padded = [max(n, 1) for n in self.sizes]
        if dim > 0:
            self.padded[dim] = -(-self.padded[dim] // ranks) * ranks

    @staticmethod
    def needed(param: Any, data: torch.Tensor, dim: int) -> bool:
        if not 0 <= dim < data.ndim or param.post_forward_mesh_info not in (None, param.mesh_info):
            return False  # in the second case torch cuts along the first dim
        uneven = dim > 0 and data.size(dim) % getattr(param.mesh_info, "shard_mesh_size", 1) != 0
        return uneven or data.numel() == 0

    def shard(self, padded: torch.Tensor) -> torch.Tensor:
        for dim, n in enumerate(self.mine):
            padded = padded.narrow(dim, 0, n) if padded.size(dim) != n else padded
        return padded

    def whole(self, t: torch.Tensor) -> torch.Tensor:
        missing = [want - n for want, n in zip(self.padded, t.size(), strict=True)]
        return torch.nn.functional.pad(t, [n for more in reversed(missing) for n in (0, more)])

    def take_over(self, param: Any, shard: torch.nn.Parameter) -> None:
        """Copies a new local tensor (from a state dict, or on another device) into padded memory."""
        local = shard._local_tensor  # type: ignore[attr-defined]
        memory = local.untyped_storage().data_ptr()
        if local.is_meta or (memory and memory == param._sharded_param_data.untyped_storage().data_ptr()):
            return
        padded = local.new_zeros(param.padded_sharded_param_size)
        padded = padded.cpu().pin_memory() if param.pin_memory else padded
        self.shard(padded).copy_(local)
        param._sharded_param_data = padded.view(-1)
        shard._local_tensor = self.shard(padded)  # type: ignore[attr-defined]


# What torch lacks of what is changed here: then fully_shard refuses ShardTensors.
_refused: list[str] = []


def _taking_ours(init: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, given: Any, module_info: Any, *args: Any, **kwargs: Any) -> None:
        if _refused and isinstance(given, ShardTensor):
            raise RuntimeError(f"fully_shard: parameter '{module_info.param_name}' is a ShardTensor. {_refused[0]}")
        init(self, _in_one_group(given, module_info), module_info, *args, **kwargs)
        if isinstance(self.sharded_param, ShardTensor):
            note_gone([given])  # an optimizer that has been built may hold it

    return __init__


def _with_layout(to_sharded: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def to_sharded_dtensor(self: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Called for the shard, and in each step for its gradient. The first call decides about layout and class."""
        known = self.__dict__.get("_shardtensor_made")
        if known is None or known[0] is not self._sharding_spec or tensor.shape != self.sharded_size:
            out = first_sharded(self, tensor)
            if type(out) is ShardTensor and not hasattr(self, "_shardtensor_padded"):
                self._shardtensor_made = self._sharding_spec, _C.layout(out), list(out.shape), list(out.stride())
            return out
        _, layout, shape, stride = known
        return _C.wrap(tensor.detach(), layout, shape, stride).requires_grad_(tensor.requires_grad)

    def first_sharded(self: Any, tensor: torch.Tensor) -> torch.Tensor:
        inner = _inner_spec(self)
        if inner is not None and not isinstance(self._sharding_spec, ShardTensorSpec):
            self._sharding_spec = _with_cuts(self._sharding_spec, inner)
        padded: _Padded | None = getattr(self, "_shardtensor_padded", None)
        if padded is None:
            return to_sharded(self, tensor)
        tensor, whole = padded.shard(tensor), self.sharded_size
        self.sharded_size = tensor.size()
        try:
            return to_sharded(self, tensor)
        finally:
            self.sharded_size = whole

    return to_sharded_dtensor


def _moved_and_padded(grad_inner: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def get_grad_inner_tensor(self: Any, grad: torch.Tensor) -> torch.Tensor:
        wanted = _other_layout(self, grad)
        if wanted is not None:  # alone in its group, or accumulated; else _move_together() was there
            grad = _C.redistribute(grad, wanted, None, None, False)
        grad = grad_inner(self, grad)
        padded: _Padded | None = getattr(self, "_shardtensor_padded", None)
        return grad if padded is None else padded.whole(grad)

    return get_grad_inner_tensor


def _padding(init_spec: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def init_sharding_spec(self: Any, given: Any, placement: Any, dim: int) -> torch.Tensor:
        data = init_spec(self, given, placement, dim)
        if not _Padded.needed(self, data, dim):
            return data
        self._shardtensor_padded = padded = _Padded(self, data, dim)
        return padded.whole(data)

    return init_sharding_spec


def _seen_without_padding(init_sharded: Callable[..., None]) -> Callable[..., None]:
    def init_sharded_param(self: Any, *args: Any, **kwargs: Any) -> None:
        init_sharded(self, *args, **kwargs)
        if hasattr(self, "_shardtensor_padded"):  # a view of the gathered memory without the padding
            self._orig_size = self._shardtensor_padded.sizes

    return init_sharded_param


def _padding_again(reset: Callable[..., None]) -> Callable[..., None]:
    def reset_sharded_param(self: Any) -> None:
        if hasattr(self, "_shardtensor_padded"):
            self._shardtensor_padded.take_over(self, getattr(self._module_info.module, self._module_info.param_name))
        reset(self)

    return reset_sharded_param


# ---- hooks ----


def _disabled_once(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook after torch._dynamo.disable, which is called at the first use, because importing dynamo is slow."""
    made: list[Callable[..., Any]] = []

    @functools.wraps(hook)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not made:
            skipped = torch._dynamo.disable(hook, recursive=True, reason="skipping FSDP hooks")  # type: ignore[no-untyped-call]
            made.append(skipped)
        return made[0](*args, **kwargs)

    outside_graphs("skipping FSDP hooks", call)
    return call


def _disable_hooks_once(cls: Any) -> Any:
    """torch makes a new function that dynamo skips in each call of a hook, which costs more than what many hooks do."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common  # noqa: PLC0415  slow

    disable = getattr(_fsdp_common, "_dynamo_disable", None)
    if disable is not None:  # not in all versions
        code = disable(_disable_hooks_once).__code__
        for name, hook in list(vars(cls).items()):
            if getattr(hook, "__code__", None) is code:
                setattr(cls, name, _disabled_once(hook.__wrapped__))
    return cls


def _move_together(post_backward: Callable[..., None]) -> Callable[..., None]:
    """The gradients of a group that are summands over the inner mesh, such as those of norms between pieces of a sequence, are added
    up together before FSDP takes them."""

    @functools.wraps(post_backward)
    def hook(self: Any, *unused: Any) -> None:
        moving: list[tuple[Any, _C.Layout]] = []
        for param in self.fsdp_params if self.reduce_grads else ():
            leaf = getattr(param, "_unsharded_param", None)
            layout = None if leaf is None else _other_layout(param, leaf.grad)
            if layout is not None:
                moving.append((leaf, layout))
        if len(moving) > 1:
            moved = _C.redistribute_all([leaf.grad for leaf, _ in moving], [layout for _, layout in moving])
            for (leaf, _), grad in zip(moving, moved, strict=True):
                leaf.grad = grad
        post_backward(self, *unused)

    return _disabled_once(hook)


_FSDP = "torch.distributed.fsdp._fully_shard."
_SLOW_HOOKS = "torch makes a new function that dynamo skips in each call of a hook, which costs more than the hook."
_HOOKS_ONCE = "`torch._dynamo.disable` applied once per hook"


def _of_param(name: str, wrap: Callable[..., Any], why: str, ask: str, since: str = "2.11") -> Patch:
    return Patch(
        f"{_FSDP}_fsdp_param",
        f"FSDPParam.{name}",
        wrap,
        why,
        ask,
        without="" if name == "__init__" else "fully_shard refuses ShardTensors.",
        turn_off=None if name == "__init__" else _refused.append,
        since=since,
    )


PATCHES = (
    _of_param("__init__", _taking_ours, "a tied parameter in a second group becomes one of its own.", "an error or a warning for it"),
    _of_param(
        "to_sharded_dtensor",
        _with_layout,
        "FSDP describes a shard by a stock spec, which cannot say how the parameter was cut before.",
        "the shard's spec made by the parameter's (a method of DTensorSpec that cuts once more)",
    ),
    _of_param(
        "_get_grad_inner_tensor",
        _moved_and_padded,
        "a gradient may have another layout than its parameter, and needs the parameter's padding.",
        "gradients moved to the parameter's placements, as with `is_spmd_mesh`",
    ),
    _of_param(
        "_init_sharding_spec",
        _padding,
        "FSDP refuses to cut dims other than the first unevenly, and cannot handle pieces without elements; here they are padded.",
        "padding along any dim",
        since="2.15",
    ),
    _of_param("_init_sharded_param", _seen_without_padding, "the gathered parameter is seen without the padding.", "the same", since="2.15"),
    _of_param("reset_sharded_param", _padding_again, "a new local tensor gets the padding.", "the same", since="2.15"),
    *(
        Patch(f"{_FSDP}{file}", name, _disable_hooks_once, _SLOW_HOOKS, _HOOKS_ONCE, without="FSDP's hooks take longer on the host.")
        for file, name in (("_fsdp_state", "FSDPState"), ("_fsdp_param_group", "FSDPParamGroup"))
    ),
    Patch(
        f"{_FSDP}_fsdp_param_group",
        "FSDPParamGroup.post_backward",
        _move_together,
        why="gradients that are summands over the inner mesh are added up together.",
        ask="a hook before a group's gradients are reduced",
        without="Such gradients are added up one at a time.",
    ),
)
