"""Delays work, so that `import shardtensor` is quick and changes nothing in torch: names that import their module when they are read, and
functions that are called after the import of a slow module of torch, or when shardtensor is first used."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# ---- names ----


def names(package: str, where: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`. `where`: the module that defines each name; "" if the name is a submodule of the package."""

    def __getattr__(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not where[name]:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(where[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *where})

    return __getattr__, __dir__


# ---- after the import of a module ----

_waiting: dict[str, list[Callable[[Any], None]]] = {}


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in _waiting else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader  # a loader object of this module alone
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _call_waiting(name, module)

        loader.exec_module = exec_module
        return spec


def when_imported(name: str, then: Callable[[Any], None]) -> None:
    """Calls `then` with the module: now if it is already imported, else right after its import."""
    _waiting.setdefault(name, []).append(then)  # first, so that an import that another thread begins now sees it
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    if name in sys.modules:
        _call_waiting(name, importlib.import_module(name))  # if another thread is importing it, waits for the end of that


def _call_waiting(name: str, module: Any) -> None:
    calls = _waiting.get(name, [])
    while calls:
        then = calls.pop(0)
        try:
            then(module)
        except BaseException:  # it is called again next time
            calls.insert(0, then)
            raise


# ---- the first use ----

_at_first_use: list[Callable[[], None]] = []
_used = False
_lock = threading.RLock()


def at_first_use(then: Callable[[], None]) -> None:
    """Calls `then` in the first call of first_use()."""
    _at_first_use.append(then)


def first_use() -> None:
    """The process is about to have a ShardTensor, or something else that torch's own functions would treat wrongly.

    Everything that may be first calls it: init_device_mesh(), a mesh of the extension, a ShardedTensor, a LocalShardsWrapper,
    replace_dtensor(). A function that raises is called again next time.
    """
    global _used
    if _used:
        return
    with _lock:
        while _at_first_use:
            then = _at_first_use.pop(0)
            try:
                then()
            except BaseException:
                _at_first_use.insert(0, then)
                raise
        _used = True
