"""Every implicit redistribution in the log, with layouts and reason: TORCH_LOGS=shardtensor, or log_redistributions()."""

from __future__ import annotations

import logging
import os

from shardtensor.debug import _watch

_log = logging.getLogger("shardtensor")


def _write(move: _watch.Move) -> None:
    _log.info("redistributed for %s", move)


def log_redistributions(on: bool = True) -> None:
    """Logs each redistribution that an op or a gradient needs to the logger "shardtensor", at level INFO. It is on from the
    start if that logger is enabled at import: by TORCH_LOGS=shardtensor or by logging's own settings."""
    listens = _write in _watch._moves
    if on and not listens:
        _watch.listen_to_moves(_write)
    elif listens and not on:
        _watch.forget_moves(_write)


def install() -> None:
    # torch imports the packages that TORCH_LOGS names before it sets their levels.
    named = [name.strip().removeprefix("+") for name in os.environ.get("TORCH_LOGS", "").split(",")]
    log_redistributions(_log.isEnabledFor(logging.INFO) or "shardtensor" in named)
