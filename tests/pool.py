"""Ranks for tests: a pool of processes per world size, started once for the whole run.

`on_ranks` makes a test of a function that every rank runs. A test that needs the ranks' results, or calls several functions, takes
a pool from the fixture `pools` and calls `run`, which returns the list of results. If a rank raises, the call raises here with that
rank's traceback. If a rank does not answer in time, the call fails. After either, the pool is started anew for the next test.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import inspect
import math
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

# Tests import from tests of other folders, here and on the ranks.
_HERE = Path(__file__).absolute().parent
sys.path[:0] = [p for p in (str(_HERE), *sorted({str(test.parent) for test in _HERE.glob("*/test_*.py")})) if p not in sys.path]
# What takes ranks long to import, the same for all of them. Inductor before shardtensor: as in scripts that have imported it by then.
_PRELOAD = [
    "torch.distributed.tensor", "torch._dynamo", "torch._inductor.compile_fx", "torch.testing._internal.common_methods_invocations",
    "shardtensor",
]  # fmt: skip


# The cases gather thousands of times. Ranks and other programs of the tests inherit this.
os.environ.setdefault("SHARDTENSOR_GATHERS", "off")

# There are more ranks than cores. By default, a process that receives a message preempts the running one. This one may hold a lock
# of Gloo's, and then the other spins on it: with two ranks on two cores, that took two fifths of the time. Children inherit this.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# Gloo has a thread for each process group, which wakes 100 times a second. So ranks with more groups than this are started anew.
_MOST_GROUPS = 16


def _context() -> Any:
    """Ranks are forked off one process that has imported torch. Not with a GPU: what has asked for its GPUs must not fork."""
    import torch

    if torch.cuda.is_available():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def seed_what_is_there() -> None:
    """torch.manual_seed() keeps the stack, as text, for each kind of device that is not there: 3 ms a call."""
    import torch

    for kind in (torch.cuda, torch.xpu, torch.mtia):
        if not kind.is_available():
            kind.manual_seed_all = lambda seed: None


# For a shared machine, or a build that is not optimized: a factor on all time limits of ranks. One of several workers has half
# the cores.
_PATIENCE = float(os.environ.get("SHARDTENSOR_TEST_PATIENCE", "2" if "PYTEST_XDIST_WORKER" in os.environ else "1"))


def _end_with_parent() -> None:
    """If the test run is killed, ranks that spin in a collective would otherwise go on for minutes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG


class RankError(AssertionError):
    """What went wrong on the ranks of one call."""


def _serve(rank: int, world: int, backend: str, store: str, pipe: Any) -> None:
    _end_with_parent()
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    seed_what_is_there()
    try:
        if backend.endswith("_like"):
            importlib.import_module("nccl_like").register()
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=40 * _PATIENCE)
        )
        import shardtensor

        shardtensor.set_reduce_ahead(False)  # tests count what each op sends; test_eager_scalar_reduce.py switches it on
        pipe.send(("ready", None))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        return
    gc.freeze()  # what has been imported stays
    gc.set_threshold(20_000, 20, 20)  # compiling makes many objects, few of them garbage
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return
        if message is None:
            dist.destroy_process_group()
            return
        module, name, args, kwargs = message
        torch.manual_seed(0)
        try:
            function = getattr(importlib.import_module(module), name)
            result = getattr(function, "body", function)(*args, **kwargs)
            pipe.send(("ok" if len(dist.distributed_c10d._world.pg_map) <= _MOST_GROUPS else "many groups", result))
        except pytest.skip.Exception as skip:
            pipe.send(("skipped", str(skip)))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))


def parse_mesh(text: str) -> tuple[int, ...]:
    """A mesh's shape as the command lines take it: 2x2."""
    return tuple(int(n) for n in text.split("x"))


class Pool:
    def __init__(self, world: int, backend: str = "gloo") -> None:
        self.world = world
        self.backend = backend
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def _start(self) -> None:
        context = _context()
        handle, store = tempfile.mkstemp(prefix="shardtensor-test-")
        os.close(handle)
        os.unlink(store)
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world, self.backend, store, theirs), daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(ours)
        self._collect(120)

    def _collect(self, seconds: float) -> list[Any]:
        __tracebackhide__ = True
        end = time.monotonic() + seconds * _PATIENCE
        answers: list[tuple[str, Any]] = [("error", "no answer")] * self.world
        waiting = dict(enumerate(self._pipes))
        while waiting and time.monotonic() < end:
            for pipe in wait(list(waiting.values()), timeout=max(0.0, end - time.monotonic())):
                rank = self._pipes.index(pipe)
                del waiting[rank]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[attr-defined]
                except (EOFError, ConnectionError):
                    answers[rank] = ("error", "died")
                if answers[rank][0] == "error":  # the others may be waiting for it
                    end = min(end, time.monotonic() + 3)
        skips = [text for kind, text in answers if kind == "skipped"]
        if len(skips) == self.world:
            pytest.skip(skips[0])
        errors = [
            f"--- rank {r} ---\n{'skips, others do not: ' * (kind == 'skipped')}{text}"
            for r, (kind, text) in enumerate(answers)
            if kind in ("error", "skipped")
        ]
        if errors:
            self.stop()  # the ranks may be out of step, and a group that timed out cannot be used any more
            raise RankError("\n".join(errors))
        if any(kind == "many groups" for kind, _ in answers):
            self.stop()
        return [value for _, value in answers]

    def run(self, function: Callable[..., Any] | str, /, *args: Any, seconds: float = 60, **kwargs: Any) -> list[Any]:
        """Calls a module's function, or what `module:name` names, on every rank and returns the ranks' results."""
        __tracebackhide__ = True
        module, name = function.split(":") if isinstance(function, str) else (function.__module__, function.__name__)
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((module, name, args, kwargs))
        return self._collect(seconds)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []


Size = int | Sequence[int]  # how many ranks, or the shape of a mesh of all of them


def on_ranks(*sizes: Size, of: str | Callable[..., Size] | None = None, seconds: float = 60) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turns a function that runs on every rank into a test.

    `@on_ranks(2)` runs it on two ranks. `@on_ranks(2, 3)` makes two tests. The function gets the size as `world`, or a mesh's shape
    as `shape`, if it takes that. Without sizes, the test's argument `of` ("world", if nothing is said) is the size, or `of` is a
    function that tells it from the arguments that it takes. Other marks and fixtures work as for any test; the ranks get what they
    give, pickled.
    """
    name = of if isinstance(of, str) else "shape" if any(not isinstance(size, int) for size in sizes) else "world"
    asked = list(inspect.signature(of).parameters) if callable(of) else [name]

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in inspect.signature(body).parameters.values()]
        takes = {p.name for p in own}

        @functools.wraps(body)
        def test(*, pools: Callable[[int], Pool], **arguments: Any) -> None:
            __tracebackhide__ = True
            if len(sizes) == 1:
                arguments[name] = sizes[0]
            size = of(*(arguments[n] for n in asked)) if callable(of) else arguments[name]
            world = size if isinstance(size, int) else math.prod(size)
            pools(world).run(test, seconds=seconds, **{n: a for n, a in arguments.items() if n in takes})

        parameters = {"pools": inspect.Parameter("pools", inspect.Parameter.KEYWORD_ONLY)}
        parameters |= {n: inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in asked} | {p.name: p for p in own}
        if len(sizes) == 1:
            del parameters[name]
        test.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
        test.body = body  # type: ignore[attr-defined]
        return pytest.mark.parametrize(name, sizes, ids=size_id)(test) if len(sizes) > 1 else test

    return decorate


def size_id(size: Size) -> str:
    return str(size) if isinstance(size, int) else "x".join(map(str, size))
