"""Users' handlers: they replace an op's rule, a Python function, or a custom op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

import shardtensor._C as _C

KEY = "PrivateUse2"
AUTOGRAD_KEY = "AutogradPrivateUse2"

_libraries: dict[str, tuple[torch.library.Library, Callable[..., Any]]] = {}  # and the handler in it
_functions: dict[Callable[..., Any], Callable[..., Any]] = {}
_named: dict[str, Callable[..., Any]] = {}  # as "namespace.op.overload"
_version = 0
_take_functions: Callable[[bool], None]  # when_switched() sets it


def version() -> int:
    """Changes with every change of the handlers: graphs are guarded by the handlers that they were traced with."""
    return _version


def any_registered() -> bool:
    return bool(_libraries or _functions or _named)


def overrides(name: str) -> bool:
    """Whether a user's handler replaces the op."""
    return name in _libraries


def _changed() -> None:
    global _version
    _version += 1


def _override(qualified: str, handler: Callable[..., Any]) -> None:
    # One library per op: dropping it restores the previous kernel.
    namespace, _, name = qualified.partition("::")
    if not name:
        raise ValueError(
            f"register_named_function_handler: argument 'name' is {qualified!r}; use 'namespace::op' or 'namespace::op.overload', or "
            "'namespace.op.default' for a handler above autograd"
        )
    _libraries.pop(qualified, None)
    library = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
    library.impl(name, _outside_inference(qualified, handler), KEY, allow_override=True)  # type: ignore[no-untyped-call]
    # Our own kernel may make the op of others above autograd. The handler comes before that, too.
    if is_composite(qualified) and torch._C._dispatch_has_kernel_for_dispatch_key(qualified, AUTOGRAD_KEY):
        library.impl(name, torch.library.fallthrough_kernel, AUTOGRAD_KEY, allow_override=True)  # type: ignore[no-untyped-call]
    _libraries[qualified] = (library, handler)
    _changed()


def is_composite(qualified: str) -> bool:
    """Whether torch makes other ops of the op, and differentiates those."""
    known = torch._C._dispatch_has_kernel(qualified)
    composite = known and torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CompositeImplicitAutograd")
    return composite and qualified.removeprefix("aten::") not in _C.rules()


def _is_view(qualified: str) -> bool:
    name, _, overload = qualified.partition(".")
    returns = torch._C._get_schema(name, overload).returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _outside_inference(qualified: str, handler: Callable[..., Any]) -> Callable[..., Any]:
    """In inference mode a view of a tensor from outside is a usual tensor too. What the handler makes would not be."""

    def call_handler(*args: Any, **kwargs: Any) -> Any:
        usual = torch.is_inference_mode_enabled() and isinstance(args[0], torch.Tensor) and not args[0].is_inference()
        if not usual or not _is_view(qualified):
            return handler(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            return handler(*args, **kwargs)

    return call_handler


def register_below(qualified: str, register: Callable[[], None]) -> None:
    """Calls `register`, which registers a kernel for our key. The user's handler of the op, if any, still comes before it."""
    held = _libraries.pop(qualified, None)
    if held:
        held[0]._destroy()  # type: ignore[no-untyped-call]
    register()
    if held:
        _override(qualified, held[1])


def name_of(op: OpOverload) -> str:
    return str(op._schema.name) + ("." + op._schema.overload_name if op._schema.overload_name else "")


def _name_of(op: Any) -> str:
    if not isinstance(op, OpOverload):
        raise TypeError(
            f"register_dispatch_handler: argument 'op' is {op!r}; use an overload such as torch.ops.aten.convolution.default"
        )
    return name_of(op)


def register_dispatch_handler(op: OpOverload, handler: Callable[..., Any]) -> None:
    """From now on handler(*args, **kwargs) runs the op on ShardTensors, below autograd, instead of its rule. An op that torch makes
    of others, and has no derivative of (cross_entropy_loss), is called above autograd: what the handler calls is differentiated."""
    _override(_name_of(op), handler)


def register_named_function_handler(name: str, handler: Callable[..., Any]) -> None:
    """The same for an op of torch.library by name ("mylib::op"), even before it is defined.

    With dots ("mylib.op.default"), as register_function_handler: above autograd, handler(func, types, args, kwargs).
    """
    if "::" not in name and name.count(".") in (1, 2):
        _named[name.removesuffix(".default")] = handler
        _switch()
    else:
        _override(name, handler)


def register_function_handler(func: Callable[..., Any], handler: Callable[..., Any]) -> None:
    """From now on handler(func, types, args, kwargs) runs a Python-level function (torch.nn.functional.x, torch.Tensor.x) on
    ShardTensors, above autograd. The first such handler switches __torch_function__ on."""
    _functions[func] = handler
    _switch()


def unregister_handler(target: Any) -> None:
    """Removes the handler of an op overload, an op's name, or a function."""
    _changed()
    if isinstance(target, str):
        _libraries.pop(target, None)
        if _named.pop(target.removesuffix(".default"), None):
            _switch()
    elif isinstance(target, OpOverload):
        _libraries.pop(_name_of(target), None)
    else:
        _functions.pop(target, None)
        _switch()


def call(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    handler = _functions.get(func)
    if handler is None and _named and isinstance(func, (OpOverload, OpOverloadPacket)):
        handler = _named.get(str(func).removesuffix(".default"))
    with torch._C.DisableTorchFunctionSubclass():
        if handler is None:
            return func(*args, **(kwargs or {}))
        return handler(func, types, args, kwargs or {})


def when_switched(take_functions: Callable[[bool], None]) -> None:
    """Calls `take_functions` with whether Python-level functions have handlers: now, and whenever that may have changed."""
    global _take_functions
    _take_functions = take_functions
    take_functions(bool(_functions or _named))


def _switch() -> None:
    _changed()
    _take_functions(bool(_functions or _named))
