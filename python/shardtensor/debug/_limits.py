"""Unwanted communication: raise, warn, or set a budget."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import ClassVar, Literal

from torch.distributed.tensor._utils import ExplicitRedistributionContext as _Stock

import shardtensor._C as _C
from shardtensor.debug import _watch

_log = logging.getLogger("shardtensor")


class ExplicitRedistributionContext(_Stock):
    """Inside, a redistribution that an op or a gradient needs raises (or warns), so that every move must be an explicit
    `redistribute()`. Without `strict`, only moves that communicate. If nested, the inner one decides; `enable=False` allows
    all.

    Also works in autograd's threads, and for stock DTensors."""

    _active: ClassVar[list[ExplicitRedistributionContext]] = []

    def __init__(self, enable: bool = True, strict: bool = False, mode: Literal["raise", "warn"] = "raise") -> None:
        super().__init__(enable, strict, mode)
        self._refuses = enable
        self._all = strict
        self._raises = mode == "raise"

    @classmethod
    def _hear(cls, move: _watch.Move) -> str | None:
        context = cls._active[-1]
        if not context._refuses or not (context._all or move.communicates):
            return None
        text = f"Implicit redistribution occurred for {move}, while ExplicitRedistributionContext was active"
        if context._raises:
            return f"{text}; call redistribute() on it first, or use operands whose layouts fit"
        _log.warning(text)
        return None

    def __enter__(self) -> ExplicitRedistributionContext:
        super().__enter__()  # type: ignore[no-untyped-call]
        if not self._active:
            _watch.moves.listen(self._hear)
        self._active.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._active.remove(self)
        if not self._active:
            _watch.moves.forget(self._hear)
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]


class comm_budget:
    """Inside, limits the bytes that a rank sends and the number of collectives: the op that would exceed a limit raises
    instead of communicating, on all ranks of its mesh alike. May be nested; `bytes` and `calls` are the totals so far.

    To decide alike, ranks first agree on the most that any has sent, with a small collective before each collective: use it for
    tests and debugging. Moves from one mesh to another are counted too, and checked at the next collective."""

    def __init__(self, *, bytes: int | None = None, calls: int | None = None) -> None:
        for name, limit in (("bytes", bytes), ("calls", calls)):
            if limit is not None and limit < 0:
                raise ValueError(f"comm_budget: argument '{name}' is {limit}; it must not be negative")
        self._limits = bytes, calls
        self.bytes = 0  # of the rank that sent most, if ranks agreed on it (a budget of bytes); else of this rank
        self.calls = 0
        self._own = 0

    def _hear(self, call: _watch.Call) -> str | None:
        most, times = self._limits
        own, calls = self._own + call.bytes, self.calls + 1
        judged = most is not None and call.mesh_dim >= 0
        spent = _C.max_over(call.mesh, own) if judged else max(self.bytes, own)
        what = f"comm_budget: a call of {call.kind} on rank {call.mesh.rank} would make it"
        if judged and most is not None and spent > most:
            return f"{what} {spent} bytes sent by a rank, but the budget is {most} bytes"
        if times is not None and calls > times:
            return f"{what} {calls} calls, but the budget is {times} calls"
        self._own, self.bytes, self.calls = own, spent, calls
        return None

    def __enter__(self) -> comm_budget:
        self.bytes = self.calls = self._own = 0
        _watch.calls.listen(self._hear)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _watch.calls.forget(self._hear)
