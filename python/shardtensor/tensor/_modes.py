"""What happens to plain tensors among ShardTensors, and to ops without a rule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.fx.node import has_side_effect

from shardtensor import _C
from shardtensor.tensor import _compile

Mode = Literal["error", "warn", "replicate"]
_MODES: tuple[Mode, ...] = ("error", "warn", "replicate")
_log = logging.getLogger("shardtensor")

# By name: how to read a mode of the process, and how to set it.
_STATE: dict[str, tuple[Callable[[], int], Callable[[Any], None]]] = {
    "promotion": (_C.promotion_mode, _C.set_promotion_mode),
    "strict": (_C.strict_mode, _C.set_strict_mode),
    "plain_targets": (_C.plain_targets, _C.set_plain_targets),
}


def _read(name: str) -> int:
    """In a graph, a constant: graphs are guarded on the modes that they are entered under."""
    _compile.guard_graph()
    return _STATE[name][0]()


def _set(name: str, value: int) -> None:
    """In a graph, a node: it sets the mode whenever the ops around it are traced, by dynamo and again by the backend."""
    read, write = _STATE[name]
    before = read()
    _compile.guard_graph()
    _compile.after_tracing(lambda: write(before))
    write(value)


_compile.constant_in_graph(_read)
_compile.in_graph(_set)
has_side_effect(_set)  # nobody reads what it returns


class _Entered:
    def __init__(self, before: int) -> None:
        self.before = before  # what the mode was, and will be once this context and those entered later are left


_entered: dict[str, list[_Entered]] = {name: [] for name in _STATE}  # the oldest first


def _leave(name: str, context: _Entered) -> None:
    """One that was entered later may still be in force (a generator's, another thread's): it restores what this one found."""
    contexts = _entered[name]
    later = contexts[contexts.index(context) + 1 :]
    contexts.remove(context)
    if later:
        later[0].before = context.before
    else:
        _set(name, context.before)


@contextmanager
def _within(name: str, value: int) -> Iterator[None]:
    context = _Entered(_read(name))
    _set(name, value)
    if torch.compiler.is_compiling():  # a graph's contexts are left in order, and a checkpoint in it may change no list
        try:
            yield
        finally:
            _set(name, context.before)
        return
    _entered[name].append(context)
    try:
        yield
    finally:
        _leave(name, context)


def _index(mode: Mode, who: str) -> int:
    if mode not in _MODES:
        raise ValueError(f"{who}: argument 'mode' is {mode!r}; use one of {', '.join(_MODES)}")
    return _MODES.index(mode)


def get_promotion_mode() -> Mode:
    return _MODES[_read("promotion")]


def set_promotion_mode(mode: Mode) -> None:
    """What to do with a plain tensor of one dim or more among ShardTensors: "error", "warn" (take it as replicated and
    say so once) or "replicate". For all threads, autograd's too."""
    _set("promotion", _index(mode, "set_promotion_mode"))


@contextmanager
def promotion_mode(mode: Mode) -> Iterator[None]:
    with _within("promotion", _index(mode, "promotion_mode")):
        yield


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Inside, plain tensors among ShardTensors are taken as replicated."""
    with promotion_mode("replicate"):
        yield


def set_strict(strict: bool) -> None:
    """Whether an op without a sharding rule raises, instead of gathering its inputs on every rank."""
    _set("strict", strict)


def is_strict() -> bool:
    return bool(_read("strict"))


@contextmanager
def strict_mode(strict: bool = True) -> Iterator[None]:
    with _within("strict", strict):
        yield


@contextmanager
def plain_targets() -> Iterator[None]:
    """Inside, losses of class labels take plain targets and weights as replicated (loss_parallel)."""
    with _within("plain_targets", True):
        yield


def _on_fallback(op: str, why: str, layouts: str) -> None:
    _log.info("%s %s: its inputs are gathered (%s)", op, why, layouts)


_C.set_fallback_log(_on_fallback)
