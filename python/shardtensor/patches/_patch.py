"""One change inside torch, and the one way in which changes are made."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, NamedTuple

import torch

from shardtensor._late import when_imported

_TORCH = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2])


class Patch(NamedTuple):
    """A change of one attribute of torch (or of Python).

    It is made when shardtensor is first used and the module has been imported, whichever comes later; with `at_import`, when
    shardtensor is imported.
    """

    module: str
    name: str  # the attribute in it, with dots; "": none is replaced, the module's tables get new entries
    wrap: Callable[[Any], Any]  # of torch's object: what takes its place. The same object: it has been added to
    why: str
    ask: str  # what torch would need, so that the change could go
    without: str = ""  # what happens if torch has no such attribute; "": the patch is required, which means that shardtensor raises
    turn_off: Callable[[str], None] | None = None  # makes what needs the attribute refuse with this text. None: a warning says it
    since: str = "2.11"  # the first version of torch that needs it
    until: str = ""  # the first version that does not need it any more
    by_name: bool = False  # also in modules that have imported the function by name
    at_import: bool = False

    @property
    def required(self) -> bool:
        return not self.without

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module

    @property
    def needed(self) -> bool:
        """By this version of torch."""
        return _number(self.since) <= _TORCH and not (self.until and _number(self.until) <= _TORCH)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in version.split("."))


class MissingError(RuntimeError):
    """torch has no attribute that a required patch replaces."""


_states: dict[Patch, str] = {}
# By the id of torch's object and the function that wrapped it: (torch's object, ours).
_replaced: dict[tuple[int, Any], tuple[Any, Any]] = {}
_by_name: dict[int, tuple[Any, Any]] = {}  # those to replace in importers too, by the id of torch's


def state(patch: Patch) -> str:
    """The state of the patch, in words."""
    if not patch.needed:
        return f"not needed before torch {patch.since}" if _number(patch.since) > _TORCH else f"not needed since torch {patch.until}"
    return _states.get(patch, "waits for the first use of shardtensor")


def make(patches: Iterable[Patch]) -> None:
    """Makes the patches; those of modules that have not been imported, after their import. Raises if a required one is missing."""
    for patch in patches:
        if patch.needed and patch not in _states:
            if patch.module not in sys.modules:
                _states[patch] = f"waits for the import of {patch.module}"
            when_imported(patch.module, functools.partial(_make, patch))


def _make(patch: Patch, module: Any) -> None:
    try:
        *path, last = patch.name.split(".")
        owner = functools.reduce(getattr, path, module)
        stock = getattr(owner, last) if patch.name else module
        ours = _replacement(patch, stock)
    except AttributeError as error:
        _miss(patch, error)
        return
    if ours is not stock:
        setattr(owner, last, ours)
        if patch.by_name:
            _by_name[id(stock)] = stock, ours
    _states[patch] = "made"


def _replacement(patch: Patch, stock: Any) -> Any:
    known = _replaced.get((id(stock), patch.wrap))
    if known is not None:
        return known[1]
    if any(stock is ours for _, ours in _replaced.values()):  # imported by name from a module that has it already
        return stock
    ours = patch.wrap(stock)
    if ours is not stock:
        function = ours.__func__ if isinstance(ours, staticmethod) else ours
        if isinstance(function, FunctionType) and not hasattr(function, "__wrapped__"):
            functools.update_wrapper(function, stock)
        _replaced[id(stock), patch.wrap] = stock, ours
    return ours


def _miss(patch: Patch, error: AttributeError) -> None:
    text = f"shardtensor: torch {torch.__version__} has no {patch.path}, which shardtensor replaces (docs/patches.md): {patch.why}"
    if patch.required:
        raise MissingError(f"{text} Use a version of torch with which this version of shardtensor was tested ({error})") from error
    _states[patch] = "missing"
    if patch.turn_off is None:
        warnings.warn(f"{text} {patch.without} ({error})", RuntimeWarning, stacklevel=2)
    else:
        patch.turn_off(f"{text} ({error})")


def replace_in_importers() -> None:
    """Replaces `by_name` functions in modules that have imported them so far. Modules that do so later get ours."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if type(names) is not dict or str(names.get("__name__", "")).startswith("shardtensor."):
            continue
        for name, value in list(names.items()):
            if id(value) in _by_name:
                setattr(module, name, _by_name[id(value)][1])
