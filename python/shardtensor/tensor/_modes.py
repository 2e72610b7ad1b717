"""Modes: how to treat plain tensors among ShardTensors, ops without a rule, and sums of no dims."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.fx.node import has_side_effect

import shardtensor._C as _C
from shardtensor.tensor import _compile

Mode = Literal["error", "warn", "replicate"]
_MODES: tuple[Mode, ...] = ("error", "warn", "replicate")

_State = dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]
# {name: (how to read the mode, how to set it)}. A thread's own modes, which also hold in the autograd threads that run its
# backward; None if it has none.
_OWN: _State = {
    "own_promotion": (_C.own_promotion, _C.set_own_promotion),
    "plain_targets": (_C.plain_targets, _C.set_plain_targets),
}
# All modes, also those of the process.
_STATE: _State = {
    "promotion": (_C.common_promotion, _C.set_common_promotion),
    "strict": (_C.strict_mode, _C.set_strict_mode),
    **_OWN,
}


def _read(name: str) -> Any:
    """In a graph, this is a constant: graphs are guarded by the modes at their entry."""
    _compile.guard_graph()
    return _STATE[name][0]()


def _set(name: str, value: Any) -> None:
    """In a graph, this is a node: it sets the mode whenever the ops around it are traced, by dynamo or the backend."""
    read, write = _STATE[name]
    before = read()
    _compile.guard_graph()
    _compile.after_tracing(lambda: write(before))
    write(value)


_compile.constant_in_graph(_read)
_compile.in_graph(_set)
has_side_effect(_set)  # its result is not used


class _Entered:
    def __init__(self, before: Any) -> None:
        self.before = before  # the mode before; it is restored once this context and all later ones are left


_entered: dict[str, list[_Entered]] = {name: [] for name in _STATE}  # the oldest first
_entered_here = threading.local()


def _contexts(name: str) -> list[_Entered]:
    return vars(_entered_here).setdefault(name, []) if name in _OWN else _entered[name]


def _leave(name: str, context: _Entered) -> None:
    """Leaves a context. If a later one is still active (a generator's), that one will restore the mode that this one found."""
    contexts = _contexts(name)
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
    if torch.compiler.is_compiling():  # a graph leaves its contexts in order, and a checkpoint in it must not change a list
        try:
            yield
        finally:
            _set(name, context.before)
        return
    _contexts(name).append(context)
    try:
        yield
    finally:
        _leave(name, context)


def _index(mode: Mode, who: str) -> int:
    if mode not in _MODES:
        raise ValueError(f"{who}: argument 'mode' is {mode!r}; use one of {', '.join(_MODES)}")
    return _MODES.index(mode)


def get_promotion_mode() -> Mode:
    """What this thread does with plain tensors among ShardTensors: the mode of the innermost `promotion_mode` or
    `implicit_replication`, or else the one that `set_promotion_mode` has set. At first "error"."""
    own = _read("own_promotion")
    index: int = _read("promotion") if own is None else own
    return _MODES[index]


def set_promotion_mode(mode: Mode) -> None:
    """What to do with a plain tensor of one dim or more among ShardTensors: "error", "warn" (take it as replicated and
    warn once) or "replicate". For all threads except those inside a `promotion_mode`."""
    _set("promotion", _index(mode, "set_promotion_mode"))


@contextmanager
def promotion_mode(mode: Mode) -> Iterator[None]:
    """Inside, `set_promotion_mode` only for this thread and the autograd threads that run its backward."""
    with _within("own_promotion", _index(mode, "promotion_mode")):
        yield


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Inside, plain tensors among ShardTensors count as replicated."""
    with promotion_mode("replicate"):
        yield


def set_strict(strict: bool) -> None:
    """Whether an op that has no sharding rule, or needs whole inputs, raises instead of gathering its inputs on every rank."""
    _set("strict", strict)


def is_strict() -> bool:
    """Whether ops without a sharding rule raise."""
    return bool(_read("strict"))


@contextmanager
def strict_mode(strict: bool = True) -> Iterator[None]:
    """Inside, an op that would gather its inputs, because it has no sharding rule or needs them whole, raises. With
    strict=False such ops gather, also inside another `strict_mode`. For all threads."""
    with _within("strict", strict):
        yield


def set_reduce_ahead(on: bool) -> None:
    """Whether results of no dims that are sums over ranks, as losses are, start to be added up when they are made. Then one rank
    alone may read them: `if rank == 0: print(loss.item())`. It costs one small asynchronous all-reduce for each. At first True,
    or what the environment variable SHARDTENSOR_REDUCE_AHEAD (0 or 1) says. For all threads; call it on all ranks alike. Graphs
    of torch.compile do not do so, nor does CUDA, where nothing could notice that a rank makes one alone."""
    _C.set_reduces_ahead(on)


def set_reduce_once(on: bool) -> None:
    """Whether a `Partial` result that an op has added up to read it stays added up for later readers, until it is written. They
    communicate less, and read the same bits. It costs the sum's memory as long as the `Partial` tensor lives;
    `shardtensor.debug.kept` shows it. At first True, or what the environment variable SHARDTENSOR_REDUCE_ONCE (0 or 1) says. For
    all threads; call it on all ranks alike."""
    _C.set_reduces_once(on)


def set_fault_notice(on: bool, *, grace: float = 0.6, compare_every: float = 1.0) -> None:
    """Whether a rank on which an op, a move or a backward fails, or whose script ends, tells the others, so that they raise soon and
    need not wait for the time-out. A rank that goes on after an error of its own has `grace` seconds to come to the next collective.
    Every `compare_every` seconds a rank compares a hash of its collectives with the next rank's. At first True, or what the
    environment variable SHARDTENSOR_FAULT_NOTICE (0 or 1) says. For all threads; call it on all ranks alike. With Gloo;
    docs/reliability.md says what it does."""
    _C.set_fault_grace(grace)
    _C.set_fault_comparison(compare_every)
    _C.set_fault_notice(on)


def _asked(variable: str, default: str) -> bool:
    value = os.environ.get(variable, "") or default
    if value not in ("0", "1"):
        raise ValueError(f"shardtensor: the environment variable {variable} is {value!r}; use 0 or 1")
    return value == "1"


set_reduce_ahead(_asked("SHARDTENSOR_REDUCE_AHEAD", "1"))
set_reduce_once(_asked("SHARDTENSOR_REDUCE_ONCE", "1"))
set_fault_notice(_asked("SHARDTENSOR_FAULT_NOTICE", "1"))


@contextmanager
def plain_targets() -> Iterator[None]:
    """Inside, plain targets and weights of losses by class labels count as replicated (loss_parallel)."""
    with _within("plain_targets", 1):
        yield
