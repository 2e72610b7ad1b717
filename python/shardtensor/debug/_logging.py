"""Every implicit redistribution in the log, with layouts and reason, and every halo: TORCH_LOGS=shardtensor, or log_redistributions().
Halos as objects: halos()."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardtensor.debug import _watch

_log = logging.getLogger("shardtensor")


def _write(move: _watch.Move) -> None:
    _log.info("redistributed for %s", move)


def _write_halo(halo: _watch.Halo) -> None:
    _log.info("halo of %s", halo)


def log_redistributions(on: bool = True) -> None:
    """Logs each redistribution that an op or a gradient needs, and each halo that an op reads, to the logger "shardtensor", at level
    INFO. It is on from the start if that logger is enabled at import: by TORCH_LOGS=shardtensor or by logging's own settings."""
    from shardtensor.debug import _watch  # noqa: PLC0415  not needed before

    listens = _write in _watch.moves
    if on and not listens:
        _watch.moves.listen(_write)
        _watch.halos.listen(_write_halo)
    elif listens and not on:
        _watch.moves.forget(_write)
        _watch.halos.forget(_write_halo)


@contextmanager
def halos() -> Iterator[list[_watch.Halo]]:
    """Inside, the list gets each halo that an op reads, with the bytes that this rank sends to other ranks and receives from them."""
    from shardtensor.debug import _watch  # noqa: PLC0415  not needed before

    heard: list[_watch.Halo] = []
    _watch.halos.listen(heard.append)
    try:
        yield heard
    finally:
        _watch.halos.forget(heard.append)


def install() -> None:
    # torch imports the packages that TORCH_LOGS names before it sets their levels.
    named = [name.strip().removeprefix("+") for name in os.environ.get("TORCH_LOGS", "").split(",")]
    if _log.isEnabledFor(logging.INFO) or "shardtensor" in named:
        log_redistributions()
