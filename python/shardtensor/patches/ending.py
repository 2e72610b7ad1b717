"""The end of a script, the end of process groups, and barriers: tells the other ranks why this one does not come. All versions.

A rank that waits for this one reads it in the store (csrc/comm/desync.h).
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
from shardtensor.patches._patch import Patch

_failed: list[BaseException] = []  # the error that ends the script


def _telling(show: Callable[..., None]) -> Callable[..., None]:
    """An error that ends the script is told at once: other threads may keep the process alive."""

    def tell_and_show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _failed.append(error)
        try:
            _C.failed_in_part("its script", f"{kind.__name__}: {error}")
        finally:
            show(kind, error, trace)

    return tell_and_show


def _tell_end(_: object = None) -> None:
    """At the end of the process, also of one that multiprocessing has started, which runs no atexit functions."""
    util.Finalize(None, _end, exitpriority=0)


def _telling_at_the_end(finalizers: Any) -> Any:
    _tell_end()
    util.register_after_fork(_tell_end, _tell_end)
    return finalizers


def _end() -> None:
    """Peers may still need messages of results that this rank has dropped; after an error they do not get them. They are told
    first: a rank that waits for this one in something else raises, and then this rank need not wait for it.
    """
    _C.ended("ended its script")
    _let_arrive()
    _C.stop_freeing_dropped()


def _let_arrive() -> None:
    """Waits a little for dropped results in flight. The groups of those that are still in flight then are never freed: that would
    wait for the time-out.
    """
    if not _failed and sys.exc_info()[0] is None:
        _C.drain_dropped()
    if _C.dropped_in_flight() and dist.is_initialized():
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


# Both have the functions under their names. A module that has imported one by name before shardtensor keeps torch's: changed at the first
# use, it would count barriers from then on, which need not be the same one on all ranks.
_MODULES = ("torch.distributed.distributed_c10d", "torch.distributed")
PATCHES = (
    Patch(
        "sys",
        "excepthook",
        _telling,
        why="an error that ends the script is told to the other ranks at once.",
        ask="nothing: it is Python's",
    ),
    Patch(
        "multiprocessing.util",
        "",
        _telling_at_the_end,
        why="at its end a process tells the other ranks, and waits for what it has sent.",
        ask="nothing: it is Python's",
    ),
    *(
        Patch(
            module,
            "barrier",
            _waits,
            why="ranks that wait in a barrier say so; they must count barriers alike, also before their first ShardTensors.",
            ask="a hook before and after each collective",
            at_import=True,
        )
        for module in _MODULES
    ),
    *(
        Patch(
            module,
            "destroy_process_group",
            _destroys,
            why="groups end after what has been sent over them has arrived; then barriers are counted from 0, on all ranks alike.",
            ask="a hook before the groups are destroyed",
            at_import=True,
        )
        for module in _MODULES
    ),
)
