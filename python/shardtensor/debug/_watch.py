"""Listeners for collectives, for redistributions that the user did not ask for, and for halos. C++ reports only to listeners."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shardtensor import _C


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
    """What an op is about to read of other ranks' pieces through its windows, as this rank sends and receives it."""

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


# If a listener returns a text, the call is not made and raises that text.
CallListener = Callable[[Call], str | None]
MoveListener = Callable[[Move], str | None]
_calls: list[CallListener] = []
_moves: list[MoveListener] = []
HaloListener = Callable[[Halo], None]
_halos: list[HaloListener] = []


def _on_call(kind: str, size: int, mesh: _C.Mesh, mesh_dim: int) -> str | None:
    call = Call(kind, size, mesh, mesh_dim)
    return _first(listener(call) for listener in tuple(_calls))


def _on_move(
    op: str, argument: str, why: str, source: _C.Layout, target: _C.Layout, shape: Sequence[int | torch.SymInt], item: int, communicates: bool
) -> str | None:
    sizes = tuple(int(n.node.hint) if isinstance(n, torch.SymInt) else n for n in shape)  # type: ignore[arg-type]  # of this call, for a graph
    move = Move(op, argument, why, source, target, sizes, item, communicates)
    return _first(listener(move) for listener in tuple(_moves))


def _on_halo(op: str, source: _C.Layout, shape: Sequence[int], sent: Mapping[int, int], received: Mapping[int, int]) -> None:
    halo = Halo(op, source, tuple(shape), sent, received)
    for listener in tuple(_halos):
        listener(halo)


def _first(answers: object) -> str | None:
    said = [answer for answer in answers if answer]  # type: ignore[attr-defined]  # all listeners hear of it
    return said[0] if said else None


def listen_to_calls(listener: CallListener) -> None:
    _calls.append(listener)
    _C.set_comm_listener(_on_call)


def forget_calls(listener: CallListener) -> None:
    _calls.remove(listener)
    if not _calls:
        _C.set_comm_listener(None)


def listen_to_moves(listener: MoveListener) -> None:
    _moves.append(listener)
    _C.set_watcher(_on_move)


def forget_moves(listener: MoveListener) -> None:
    _moves.remove(listener)
    if not _moves:
        _C.set_watcher(None)


def listen_to_halos(listener: HaloListener) -> None:
    _halos.append(listener)
    _C.set_halo_watcher(_on_halo)


def forget_halos(listener: HaloListener) -> None:
    _halos.remove(listener)
    if not _halos:
        _C.set_halo_watcher(None)
