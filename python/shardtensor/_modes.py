"""What happens to plain tensors among ShardTensors, and to ops without a rule."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from shardtensor import _C, _compile

Mode = Literal["error", "warn", "replicate"]
_MODES: tuple[Mode, ...] = ("error", "warn", "replicate")
_log = logging.getLogger("shardtensor")


def get_promotion_mode() -> Mode:
    return _MODES[_C.promotion_mode()]


def set_promotion_mode(mode: Mode) -> None:
    """What to do with a plain tensor of one dim or more among ShardTensors: "error", "warn" (take it as replicated and
    say so once) or "replicate". For all threads, autograd's too."""
    if mode not in _MODES:
        raise ValueError(f"set_promotion_mode: argument 'mode' is {mode!r}; use one of {', '.join(_MODES)}")
    _C.set_promotion_mode(_MODES.index(mode))


@contextmanager
def promotion_mode(mode: Mode) -> Iterator[None]:
    before = get_promotion_mode()
    set_promotion_mode(mode)
    try:
        yield
    finally:
        set_promotion_mode(before)


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Inside, plain tensors among ShardTensors are taken as replicated."""
    with promotion_mode("replicate"):
        yield


def set_strict(strict: bool) -> None:
    """Whether an op without a sharding rule raises, instead of gathering its inputs on every rank."""
    _C.set_strict_mode(strict)


def is_strict() -> bool:
    return _C.strict_mode()


@contextmanager
def strict_mode(strict: bool = True) -> Iterator[None]:
    before = is_strict()
    set_strict(strict)
    try:
        yield
    finally:
        set_strict(before)


def plain_targets() -> bool:
    return _C.plain_targets()


def set_plain_targets(allowed: bool) -> None:
    """Whether losses of class labels take plain targets and weights as replicated (loss_parallel)."""
    _C.set_plain_targets(allowed)


_compile.outside_graphs(
    "shardtensor's modes (implicit_replication, promotion_mode, strict_mode, loss_parallel) cannot be entered inside a compiled "
    "function. Enter them around the call: a graph is guarded on the modes that it is called under",
    get_promotion_mode,
    is_strict,
    plain_targets,
    set_plain_targets,
    set_promotion_mode,
    set_strict,
)


def _on_fallback(op: str, layouts: str) -> None:
    _log.info("%s has no sharding rule: its inputs are gathered (%s)", op, layouts)


_C.set_fallback_log(_on_fallback)
