"""Listeners for collectives, for redistributions that the user did not ask for, and for halos. C++ reports only to listeners."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

import shardtensor._C as _C

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """A collective that is about to be made on this rank."""

    kind: str
    bytes: int  # that this rank contributes
    mesh: _C.Mesh
    mesh_dim: int  # -1: between meshes


@dataclass(frozen=True)
class Move:
    """A redistribution that is about to happen because an op, or a gradient, needs it."""

    op: str
    argument: str
    why: str
    source: _C.Layout
    target: _C.Layout
    shape: tuple[int, ...]
    item: int  # bytes of an element
    communicates: bool

    def bytes(self) -> int:
        """Of the whole operand."""
        return math.prod(self.shape) * self.item

    def __str__(self) -> str:
        return (
            f"{self.op}, argument '{self.argument}': {self.source} -> {self.target}, shape {self.shape}, {self.bytes()} bytes in all, "
            f"on rank {self.source.mesh.rank}, because {self.why}"
        )


@dataclass(frozen=True)
class Halo:
    """A halo that an op is about to read: what this rank sends and receives for it."""

    op: str  # and the line of the script
    source: _C.Layout
    shape: tuple[int, ...]
    sent: Mapping[int, int]  # bytes, by global rank
    received: Mapping[int, int]

    def __str__(self) -> str:
        def listed(of: Mapping[int, int]) -> str:
            return ", ".join(f"{size} bytes {{}} rank {rank}" for rank, size in of.items() if size) or "nothing"

        return (
            f"{self.op}, {self.source}, shape {self.shape}: rank {self.source.mesh.rank} sends {listed(self.sent).replace('{}', 'to')}, "
            f"receives {listed(self.received).replace('{}', 'from')}"
        )


class Heard(Generic[T]):
    """The listeners to one kind of event. If a listener returns a text, it is raised as an error, and the event does not happen. C++
    reports while there are any.
    """

    def __init__(self, report: Callable[[Any], None], news: Callable[..., T]) -> None:
        self._report, self._news = report, news
        self._listeners: list[Callable[[T], str | None]] = []

    def _hear(self, *facts: Any) -> str | None:
        news = self._news(*facts)
        said = [answer for answer in [listener(news) for listener in tuple(self._listeners)] if answer]  # every listener is called
        return said[0] if said else None

    def listen(self, listener: Callable[[T], str | None]) -> None:
        self._listeners.append(listener)
        self._report(self._hear)

    def forget(self, listener: Callable[[T], str | None]) -> None:
        self._listeners.remove(listener)
        if not self._listeners:
            self._report(None)

    def __contains__(self, listener: object) -> bool:
        return listener in self._listeners


def _move(
    op: str, argument: str, why: str, source: _C.Layout, target: _C.Layout, shape: Sequence[int | torch.SymInt], item: int, communicates: bool
) -> Move:
    sizes = tuple(int(n.node.hint) if isinstance(n, torch.SymInt) else n for n in shape)  # type: ignore[arg-type]  # of this call, for a graph
    return Move(op, argument, why, source, target, sizes, item, communicates)


calls = Heard(_C.set_comm_listener, Call)
moves = Heard(_C.set_watcher, _move)
halos = Heard(_C.set_halo_watcher, lambda op, source, shape, *bytes_: Halo(op, source, tuple(shape), *bytes_))
