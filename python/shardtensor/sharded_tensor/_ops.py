"""Which torch functions take ShardedTensors: users' own, one table, and functions that consist of element-wise ops."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _rank_not_in_group
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardtensor.sharded_tensor import _check, _convert, _random
from shardtensor.sharded_tensor._move import anywhere
from shardtensor.sharded_tensor._spec import ShardingSpec
from shardtensor.sharded_tensor._tensor import ShardedTensor, set_call

Op = Callable[..., Any]
_CUSTOM_SHARDED_OPS: dict[Op, Op] = {}
_SHARDED_OPS: dict[Op, Op] = {}
_SPEC_OPS: dict[tuple[type, Op], Op] = {}  # that a kind of spec does its own way


# ---- the decorators ----


def register(wrapped_func: Op, op: Op, table: dict[Any, Op], key: Any = None) -> Op:
    """Adds a function of (types, args, kwargs, process_group) to the table, after the checks that all ops share."""
    if len(inspect.signature(wrapped_func).parameters) != 4:
        raise TypeError(
            "Custom sharded op function expects signature: (types, args, kwargs, process_group), but received "
            f"signature: {inspect.signature(wrapped_func)}"
        )

    @functools.wraps(wrapped_func)
    def checked(types: Any, args: Any, kwargs: Any, process_group: ProcessGroup) -> Any:
        groups = {id(t._process_group) for t in sharded_among(args, kwargs)}
        if len(groups) > 1:
            raise RuntimeError("All distributed tensors should use the same ProcessGroup if used together in an op.")
        return wrapped_func(types, args, kwargs, process_group)

    table[op if key is None else key] = checked
    return checked


def custom_sharded_op_impl(func: Op) -> Callable[[Op], Op]:
    """Decorator: a function of (types, args, kwargs, process_group) implements `func` for ShardedTensors, before our own."""
    return functools.partial(register, op=func, table=_CUSTOM_SHARDED_OPS)


def _sharded_op_impl(func: Op) -> Callable[[Op], Op]:
    """As custom_sharded_op_impl, but after users' functions and those of sharding specs."""
    return functools.partial(register, op=func, table=_SHARDED_OPS)


def custom_sharding_spec_op(sharding_spec_class: type, func: Op) -> Callable[[Op], Op]:
    """Decorator: a function of (types, args, kwargs, process_group) implements `func` for specs of that class."""
    return functools.partial(register, op=func, table=_SPEC_OPS, key=(sharding_spec_class, func))


def spec_op(spec: ShardingSpec, func: Op) -> Op | None:
    return next((_SPEC_OPS[c, func] for c in type(spec).__mro__ if (c, func) in _SPEC_OPS), None)


def _has_custom_op(sharding_spec: ShardingSpec, op: Op) -> bool:
    """Whether a function that custom_sharding_spec_op has registered implements `op` for the spec."""
    return spec_op(sharding_spec, op) is not None


def _dispatch_custom_op(sharding_spec: ShardingSpec, op: Op, types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
    """Calls that function."""
    func = spec_op(sharding_spec, op)
    if func is None:
        raise RuntimeError(f"Custom op: {op} not registered for {type(sharding_spec).__qualname__}")
    return func(types, args, kwargs, process_group)


def sharded_among(*values: Any) -> list[ShardedTensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, ShardedTensor)]


def call(func: Op, types: Any, args: Any, kwargs: Any) -> Any:
    kwargs = kwargs or {}
    found = sharded_among(args, kwargs)
    if not found:
        raise _unsupported(func, args, kwargs, "none of them is a ShardedTensor")
    first = found[0]
    own = _CUSTOM_SHARDED_OPS.get(func) or spec_op(first._sharding_spec, func) or _SHARDED_OPS.get(func)
    if own is not None:
        return own(types, args, kwargs, first._process_group)
    return _elementwise(func, args, kwargs, found)


set_call(call)


def _unsupported(func: Op, args: Any, kwargs: Any, why: str) -> RuntimeError:
    """torch's text, which users match; the reason is a note below it."""
    name = getattr(func, "__name__", func)
    error = RuntimeError(f"torch function '{name}', with args: {args} and kwargs: {kwargs or None} not supported for ShardedTensor!")
    error.add_note(why)
    return error


# ---- properties of torch.Tensor that need no data ----


def _by_wrapper(op: Op) -> None:
    @_sharded_op_impl(op)
    def ask(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return op(*args, **kwargs)


_T: Any = torch.Tensor
for _property in ("dtype", "grad", "grad_fn", "is_leaf", "layout", "ndim", "requires_grad", "shape"):
    _by_wrapper(getattr(_T, _property).__get__)
for _method in (
    "contiguous", "dim", "element_size", "is_complex", "is_contiguous", "is_floating_point", "ndimension", "nelement", "numel", "size",
    "stride",
):  # fmt: skip
    _by_wrapper(getattr(_T, _method))
for _function in (torch.is_complex, torch.is_floating_point, torch.numel):
    _by_wrapper(_function)


def _method_of_shards(op: Op) -> Callable[[Callable[..., Any]], Any]:
    """Registers a function of the ShardedTensor and the op's other arguments."""

    def decorate(function: Callable[..., Any]) -> Any:
        @_sharded_op_impl(op)
        def run(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
            return function(*args, **kwargs)

        return function

    return decorate


@_method_of_shards(_T.device.__get__)
def _device(t: ShardedTensor) -> torch.device:
    """The device of this rank's shards; without shards, that of its process group."""
    if t._local_shards:
        return t._local_shards[0].tensor.device
    types = {s.placement.device().type for s in t._metadata.shards_metadata if s.placement is not None}
    kind = next(iter(types)) if len(types) == 1 else "cpu"
    return torch.device(kind) if kind in ("cpu", "meta") else torch.device(kind, torch.accelerator.current_device_index())


@_method_of_shards(_T.is_meta.__get__)
def _is_meta(t: ShardedTensor) -> bool:
    return bool(_device(t).type == "meta")


@_method_of_shards(torch._has_compatible_shallow_copy_type)
def _shallow(t: ShardedTensor, other: Any) -> bool:
    """Makes Module.to and similar functions replace old parameters by new ones."""
    return False


# ---- copies ----


@_method_of_shards(_T.clone)
@_method_of_shards(torch.clone)
def _clone(t: ShardedTensor, *, memory_format: torch.memory_format | None = None) -> ShardedTensor:
    if memory_format not in (None, torch.preserve_format):
        raise RuntimeError("Only support torch.preserve_format for ShardedTensor!")
    return t._alike([shard.tensor.clone() for shard in t._local_shards])


@_method_of_shards(_T.detach)
@_method_of_shards(torch.detach)
def _detach(t: ShardedTensor) -> ShardedTensor:
    return t._alike([shard.tensor.detach() for shard in t._local_shards], requires_grad=False)


@_method_of_shards(_T.requires_grad_)
def _requires_grad(t: ShardedTensor, requires_grad: bool = True) -> ShardedTensor:
    for shard in t._local_shards:
        shard.tensor.requires_grad_(requires_grad)
    with torch._C.DisableTorchFunctionSubclass():
        _T.requires_grad_(t, requires_grad)
    t._metadata = _check.with_properties(t._metadata, requires_grad=requires_grad)
    return t


@_sharded_op_impl(_T.requires_grad.__set__)
def _set_requires_grad(types: Any, args: Any, kwargs: Any, process_group: Any) -> None:
    raise _unsupported(_T.requires_grad.__set__, args, kwargs, "use requires_grad_(), which sets it on the shards too")


@_method_of_shards(_T.type_as)
def _type_as(t: ShardedTensor, *other: Any) -> ShardedTensor:
    if not other:
        raise ValueError("Needs to give a tensor to cast type as!")
    if not isinstance(other[0], torch.Tensor):
        raise ValueError("Needs to give a Tensor or ShardedTensor to cast type as!")
    return t.to(other[0].dtype)


@_method_of_shards(_T.copy_)
def _copy(t: ShardedTensor, other: Any, non_blocking: bool = False) -> ShardedTensor:
    if not isinstance(other, ShardedTensor) or t._metadata.shards_metadata != other._metadata.shards_metadata:
        raise RuntimeError("inplace copy can only happen between two ShardedTensor with same metadata!")
    for mine, theirs in zip(t._pieces(), other._pieces(), strict=True):
        mine.copy_(theirs, non_blocking)
    return t


# ---- the whole tensors, compared ----


def _compare(compare: Op) -> None:
    @_sharded_op_impl(compare)
    def same(types: Any, args: Any, kwargs: Any, process_group: ProcessGroup) -> bool:
        if len(args) != 2:
            raise ValueError(f"Expected two arguments for torch.{compare.__name__}")
        if not all(isinstance(x, ShardedTensor) for x in args):
            raise TypeError(f"Both arguments to torch.{compare.__name__} need to be of type ShardedTensor")
        return _same(args[0], args[1], lambda a, b: compare(a, b, **kwargs))


def _same(a: ShardedTensor, b: ShardedTensor, compare: Op) -> bool:
    """Whether the metadata are equal and every rank's shards compare."""
    if a._process_group != b._process_group:
        return False
    if _rank_not_in_group(a._process_group):
        return True
    equal = a.metadata() == b.metadata() and all(compare(x, y) for x, y in zip(a._pieces(), b._pieces(), strict=True))
    return not anywhere(not equal, a._process_group)


_compare(torch.equal)
_compare(torch.allclose)


@_method_of_shards(_T.any)
def _any(t: ShardedTensor) -> torch.Tensor:
    """The same result on every rank; nn.init.trunc_normal_ needs it."""
    mine = any(bool(shard.tensor.any()) for shard in t._local_shards)
    return torch.tensor(anywhere(mine, t._process_group), device=_device(t))


@_method_of_shards(nn.functional.embedding)
def _embedding(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _convert.embedding(*args, **kwargs)


# ---- values ----


def _likes(**factories: Op) -> None:
    """torch.<name>_like of a ShardedTensor, for each factory by its name."""

    def register_like(op: Op, make: Op) -> None:
        @_method_of_shards(op)
        def like(t: ShardedTensor, *args: Any, **kwargs: Any) -> ShardedTensor:
            options = dict(dtype=t.dtype, process_group=t._process_group) | {k: v for k, v in kwargs.items() if v is not None}
            return make(t.sharding_spec(), t.size(), *args, **options)  # type: ignore[no-any-return]

    for name, make in factories.items():
        register_like(getattr(torch, f"{name}_like"), make)


@_method_of_shards(_T.new_tensor)
def _new_tensor(t: ShardedTensor, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> torch.Tensor:
    """A plain tensor."""
    return torch.tensor(data, dtype=dtype or t.dtype, device=device or t.device, requires_grad=requires_grad)


def _draws(draw: Op) -> None:
    @_method_of_shards(draw)
    def fill(t: ShardedTensor, *args: Any, **kwargs: Any) -> ShardedTensor:
        return _random.fill(draw, t, *args, **kwargs)


for _name in ("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"):
    _draws(getattr(_T, _name))


def _given(**values: Any) -> None:
    for name, value in values.items():
        if value is None:
            raise ValueError(f"param: {name} shouldn't be None!")


@_method_of_shards(nn.init.uniform_)
def _init_uniform(tensor: ShardedTensor, a: float = 0.0, b: float = 1.0, generator: torch.Generator | None = None) -> ShardedTensor:
    _given(a=a, b=b)
    return _random.fill(_T.uniform_, tensor, a, b, generator=generator)


@_method_of_shards(nn.init.normal_)
def _init_normal(tensor: ShardedTensor, mean: float = 0.0, std: float = 1.0, generator: torch.Generator | None = None) -> ShardedTensor:
    _given(mean=mean, std=std)
    return _random.fill(_T.normal_, tensor, mean, std, generator=generator)


@_method_of_shards(nn.init.kaiming_uniform_)
def _init_kaiming_uniform(
    tensor: ShardedTensor,
    a: float = 0,
    mode: Any = "fan_in",
    nonlinearity: Any = "leaky_relu",
    generator: torch.Generator | None = None,
) -> ShardedTensor:
    """With the fan of the whole tensor, not of a shard."""
    _given(a=a, mode=mode, nonlinearity=nonlinearity)
    fan = nn.init._calculate_correct_fan(tensor, mode)  # type: ignore[no-untyped-call]
    bound = math.sqrt(3.0) * nn.init.calculate_gain(nonlinearity, a) / math.sqrt(fan)
    return _random.fill(_T.uniform_, tensor, -bound, bound, generator=generator)


@_method_of_shards(nn.init.constant_)
def _init_constant(tensor: ShardedTensor, val: float) -> ShardedTensor:
    _given(val=val)
    for shard in tensor._local_shards:
        shard.tensor.detach().fill_(val)
    return tensor


# ---- everything element-wise ----

_aten = torch.ops.aten
_AS_GOOD_AS_POINTWISE = {
    _aten._to_copy.default, _aten.clone.default, _aten.copy_.default, _aten.detach.default, _aten.fill_.Scalar, _aten.fill_.Tensor,
    _aten.zero_.default,
}  # fmt: skip


class _ElementwiseOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True imports torch._dynamo at the first op, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        elementwise = torch.Tag.pointwise in func.tags or func in _AS_GOOD_AS_POINTWISE
        if not elementwise or torch.Tag.nondeterministic_seeded in func.tags:
            raise NotImplementedError(f"{func} is not element-wise")
        return func(*args, **(kwargs or {}))


def _elementwise(func: Op, args: Any, kwargs: Any, found: list[ShardedTensor]) -> Any:
    """Runs shard by shard. A run on tensors of one element first tells every rank alike whether that is correct."""
    first = found[0]
    leaves, tree = pytree.tree_flatten((args, kwargs))
    if any(isinstance(x, torch.Tensor) and not isinstance(x, ShardedTensor) and x.numel() != 1 for x in leaves):
        raise _unsupported(func, args, kwargs, "a plain tensor of more than one element has no shards")
    if any(t._metadata.shards_metadata != first._metadata.shards_metadata or t._process_group != first._process_group for t in found):
        raise _unsupported(func, args, kwargs, "the ShardedTensors are not cut alike; reshard one")
    # Not on the meta device, whose kernels import torch._dynamo.
    samples = {id(t): torch.ones([1] * t.dim(), dtype=t.dtype, requires_grad=t.requires_grad) for t in found}

    def run(choose: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        chosen = [choose(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        chosen_args, chosen_kwargs = pytree.tree_unflatten(chosen, tree)
        return func(*chosen_args, **chosen_kwargs)

    try:
        with _ElementwiseOnly():  # type: ignore[no-untyped-call]
            like = run(lambda x: samples[id(x)] if isinstance(x, ShardedTensor) else x.cpu())
    except NotImplementedError as error:
        raise _unsupported(func, args, kwargs, str(error)) from error
    if not isinstance(like, torch.Tensor) or like.shape != samples[id(first)].shape:
        raise _unsupported(func, args, kwargs, "the result is not one tensor of the same sizes")
    pieces = {id(t): t._tensors_of([shard.metadata for shard in first._local_shards]) for t in found}

    def piece(i: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: pieces[id(x)][i] if isinstance(x, ShardedTensor) else x

    mine = [run(piece(i)) for i in range(len(first._local_shards))]
    in_place = [t for t in found if samples[id(t)] is like]
    return in_place[0] if in_place else first._alike(mine, dtype=like.dtype, requires_grad=like.requires_grad)
