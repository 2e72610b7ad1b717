"""Users' handlers: they replace an op's rule, a Python function, or a custom op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

KEY = "PrivateUse2"

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
    library.impl(name, handler, KEY, allow_override=True)  # type: ignore[no-untyped-call]
    _libraries[qualified] = (library, handler)
    _changed()


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
    """From now on handler(*args, **kwargs) runs the op on ShardTensors, below autograd, instead of its rule."""
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
