"""Wraps a function of torch at most once."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any


def wrap_once(module: ModuleType | type, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    function = getattr(module, name)
    if not hasattr(function, "_shardtensor"):
        wrapped: Any = wrap(function)
        wrapped._shardtensor = True
        setattr(module, name, wrapped)
