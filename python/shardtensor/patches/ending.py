"""The end of a script, the end of process groups, and barriers: what tells the other ranks why this one does not come. All versions.

A rank that waits for this one reads it in the store (csrc/comm/faults.h).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from multiprocessing import util
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.compiler import is_compiling

import shardtensor._C as _C

_failed: list[BaseException] = []  # the error that ends the script


def _tell_error() -> None:
    """An error that ends the script is told at once: other threads may keep the process alive."""
    show = sys.excepthook

    def tell_and_show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _failed.append(error)
        try:
            _C.failed_in_part("its script", f"{kind.__name__}: {error}")
        finally:
            show(kind, error, trace)

    sys.excepthook = tell_and_show


def _tell_end(_: object = None) -> None:
    """At the end of the process, also of one that multiprocessing has started, which runs no atexit functions."""
    util.Finalize(None, _end, exitpriority=0)


def _end() -> None:
    """Peers may still need what this rank has sent and dropped; after an error they do not get it. They are told first: one that waits
    for this rank in something else raises, and then this rank need not wait for it."""
    _C.ended("ended its script")
    _let_arrive()
    _C.keep_what_is_left()


def _let_arrive() -> None:
    """Waits a little for what was dropped in flight. The groups of what is still in flight then stay for ever: to free one would wait
    until its time-out."""
    if not _failed and sys.exc_info()[0] is None:
        _C.let_arrive()
    if _C.left_in_flight() and dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):
            _C.keep_for_ever(group)


def _destroys(destroy: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(destroy)
    def run(group: Any = None) -> None:
        if group is None or group == dist.GroupMember.WORLD:
            _C.destroyed_groups()
        _let_arrive()
        destroy(group)

    return run


def _waits(barrier: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(barrier)
    def run(group: Any = None, async_op: bool = False, *args: Any, **kwargs: Any) -> Any:
        of = group or dist.GroupMember.WORLD
        if is_compiling() or not isinstance(of, dist.ProcessGroup):
            return barrier(group, async_op, *args, **kwargs)
        if async_op:
            _C.begin_barrier(of.group_name)
            return barrier(group, async_op, *args, **kwargs)
        wait = _C.InBarrier(of.group_name)
        try:
            return barrier(group, async_op, *args, **kwargs)
        finally:
            wait.leave()

    return run


def install() -> None:
    _tell_error()
    _tell_end()
    util.register_after_fork(_tell_end, _tell_end)
    for name, wrap in (("destroy_process_group", _destroys), ("barrier", _waits)):
        wrapped = wrap(getattr(dist, name))
        setattr(dist, name, wrapped)
        setattr(dist.distributed_c10d, name, wrapped)
