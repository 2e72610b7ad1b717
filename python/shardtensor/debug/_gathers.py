"""Warns of operands that are gathered: the op has no rule, needs them whole, or its rule finds no cheaper way.

C++ names an op that gathers once it has found the solution of a new call, and then moves the call's operands. "once" listens only
to these moves, so a call whose solution is known has no extra cost. "every" listens to all moves.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Literal, get_args

from torch._guards import TracingContext

import shardtensor._C as _C
from shardtensor.debug._text import call_site, in_bytes
from shardtensor.tensor._layout import _REPLICATE, _SHARD

if TYPE_CHECKING:
    from shardtensor.debug import _watch

Often = Literal["off", "once", "every"]

_log = logging.getLogger("shardtensor")
_WHOLE = "Redistribute it to Replicate() once if several ops need it whole"
# {why C++ moves an operand: (why it is gathered, what to do)}. Moves of gradients and of written results are not gathers.
_REASONS = {
    "it has no sharding rule, so its inputs are gathered": (
        "the op has no sharding rule",
        "Write one (shardtensor.experimental.register_sharding), or run the op on the pieces (local_map)",
    ),
    "it needs whole inputs": ("the op needs it whole", _WHOLE),
    "the whole of it costs less than its pieces, one after the other": (
        "sending its pieces round the ranks, or exchanging heads for the sequence, would cost more",
        "Redistribute it to Replicate() once if several calls need it whole",
    ),
    "it cannot be sent piece by piece, nor cut along another dim": (
        "its pieces cannot be sent round the ranks, and there are too few heads to cut these instead",
        "Cut queries, keys and values of 4 dims alike, or cut fewer ways",
    ),
    "its rule requires this layout": ("no other layout that the op takes costs less", f"{_WHOLE}, or cut another dim of it"),
}

_often: Often = "off"
_all_ranks = False
_listens = False
_told: set[tuple[object, ...]] = set()
# {thread: (the op whose solution is new, the operands that it has moved)}
_new: dict[int, tuple[str, set[tuple[object, ...]]]] = {}


def log_gathers(often: Often = "once", *, all_ranks: bool = False) -> None:
    """Sets how often the logger "shardtensor" warns of operands that an op gathers: never ("off"), "once" for each op and
    placements (the default), or "every" time. The lowest rank of the operand's mesh warns, or all its ranks.

    Calling it again repeats the warnings. The environment variable SHARDTENSOR_GATHERS sets it at import: "off", "every",
    "once,all_ranks".
    """
    global _often, _all_ranks
    if often not in get_args(Often):
        raise ValueError(f"log_gathers: argument 'often' is {often!r}; use one of {', '.join(get_args(Often))}")
    _often, _all_ranks = often, all_ranks
    _told.clear()
    _new.clear()
    _C.set_fallback_log(_begin if often == "once" else None)
    _C.clear_cache()  # C++ names an op only if it does not know the call's solution
    _listen(often == "every")


def _listen(on: bool) -> None:
    global _listens
    if on == _listens:
        return
    from shardtensor.debug import _watch  # noqa: PLC0415  not needed before

    _listens = on
    (_watch.moves.listen if on else _watch.moves.forget)(_hear)


def _begin(op: str, why: str, layouts: str) -> None:
    _new[threading.get_ident()] = op, set()
    _listen(True)


def _hear(move: _watch.Move) -> None:
    mesh = move.source.mesh
    key = (move.op, move.argument, mesh.id, *move.source.placements, *move.target.placements)
    if _often == "once" and (not _is_new(move.op, key) or key in _told):
        return
    if move.why in _REASONS and _gathers(move) and (_all_ranks or mesh.rank == min(mesh.ranks)):
        _told.add(key)
        _log.warning(_text(move))


def _is_new(op: str, key: tuple[object, ...]) -> bool:
    """Whether a call with a new solution moves this operand. The first other move ends the listening."""
    thread = threading.get_ident()
    new_op, moved = _new.get(thread, ("", set()))
    if op == new_op and key not in moved:
        moved.add(key)
        return True
    _new.pop(thread, None)
    _listen(bool(_new))
    return False


def _gathers(move: _watch.Move) -> bool:
    pairs = zip(move.source.placements, move.target.placements, strict=True)
    return move.communicates and any(a[0] == _SHARD and b[0] == _REPLICATE for a, b in pairs)


def _text(move: _watch.Move) -> str:
    why, cure = _REASONS[move.why]
    line = _line()
    how_often = "once for these layouts" if _often == "once" else "every time"
    return (
        f"{move.op}{line and f' at {line}'} gathers its argument '{move.argument}', shape {move.shape}, {in_bytes(move.bytes())}, from "
        f"{move.source} to {move.target}: {why}. {cure}. (Said {how_often}, by rank {move.source.mesh.rank}; "
        "shardtensor.debug.log_gathers sets how often.)"
    )


def _line() -> str:
    """The user's source line; while dynamo traces, the line that it traces."""
    traced = TracingContext.extract_stack()
    return f"{traced[-1].filename}:{traced[-1].lineno}" if traced else call_site()


def install() -> None:
    often, *more = os.environ.get("SHARDTENSOR_GATHERS", "").lower().split(",")
    often = often or "once"
    if often not in get_args(Often) or more not in ([], ["all_ranks"]):
        raise ValueError(
            f"shardtensor: the environment variable SHARDTENSOR_GATHERS is {os.environ['SHARDTENSOR_GATHERS']!r}; use off, once or "
            "every, and append ,all_ranks to hear of all ranks"
        )
    log_gathers(often, all_ranks=bool(more))  # type: ignore[arg-type]
