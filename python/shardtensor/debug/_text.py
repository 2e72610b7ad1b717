"""Parts of messages."""

from __future__ import annotations

import os
import sys

OWN_FOLDERS = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep, os.sep + os.path.join("torch", ""))


def call_site() -> str:
    """The innermost source line outside shardtensor and torch; empty in autograd's own threads."""
    frame = sys._getframe()
    while frame is not None and (frame.f_code.co_filename.startswith(OWN_FOLDERS[0]) or OWN_FOLDERS[1] in frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def in_bytes(n: int) -> str:
    if n < 1024:
        return f"{n} B"
    value, units = float(n), iter(("KiB", "MiB", "GiB", "TiB"))
    unit = "B"
    while value >= 1024:
        value, unit = value / 1024, next(units, unit)
    return f"{value:.1f} {unit}"
