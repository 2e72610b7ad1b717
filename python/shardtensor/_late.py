"""Callbacks that run after a slow module of torch has been imported, so that importing shardtensor need not import it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_waiting: dict[str, list[Callable[[Any], None]]] = {}


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        waiting = _waiting.pop(name, [])
        spec = PathFinder.find_spec(name, path, target) if waiting else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader  # made only for this module
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            for then in waiting:
                then(module)

        loader.exec_module = exec_module
        return spec


def when_imported(name: str, then: Callable[[Any], None]) -> None:
    """Calls `then` with the module: now if it is already imported, else right after its import."""
    if name in sys.modules:
        then(sys.modules[name])
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _waiting.setdefault(name, []).append(then)
