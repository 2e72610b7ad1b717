"""The names of our ranges in torch.profiler."""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch

import shardtensor._C as _C
from shardtensor.debug._text import call_site, in_bytes


def _modules() -> str:
    """The classes of the modules whose forward runs, from the outside in."""
    classes: list[str] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code.co_name == "_call_impl" else None
        if isinstance(module, torch.nn.Module):
            classes.append(type(module).__name__)
        frame = frame.f_back
    return ".".join(reversed(classes))


def _range_name(kind: str, move: str, sent: int) -> str:
    what = ["wait for", kind, move] if sent < 0 else [kind, move, in_bytes(sent)]
    site, modules = os.path.basename(call_site()), _modules()
    return " ".join(["shardtensor:", *filter(None, what), *([f"at {site}"] if site else []), *([f"({modules})"] if modules else [])])


def install() -> None:
    _C.set_range_name(_range_name)
