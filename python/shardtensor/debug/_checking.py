"""The checking mode: SHARDTENSOR_CHECK=1, or `with shardtensor.debug.check():`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import shardtensor._C as _C
from shardtensor.debug._text import OWN_FOLDERS, call_site

_OFF, _SAMPLED, _FULL = range(3)


@contextmanager
def check(full: bool = False) -> Iterator[None]:
    """Inside, each op, redistribution and from_local is checked on all ranks of its mesh, forward and backward.

    Before a call, checks that all ranks run the same call. After it, checks that each piece has the sizes, dtype, device and
    order in memory of its layout; that pieces which should be equal on several ranks are equal, bit by bit (1,024 elements of
    each, or all with `full`); and that summands have not become NaN where the whole has none. An error raises on every rank of
    the mesh, with each rank's call and its source line. Costs two or three small collectives per call: use it to find a fault,
    not in training. All ranks must enter and leave it together.
    """
    before = _C.checking()
    _C.set_checking(_FULL if full else _SAMPLED)
    try:
        yield
    finally:
        _C.set_checking(before)


def install() -> None:
    _C.set_call_site(call_site)
    _C.set_own_folders([OWN_FOLDERS[0], os.path.dirname(os.path.abspath(torch.__file__)) + os.sep])
    asked = os.environ.get("SHARDTENSOR_CHECK", "0").lower()
    if asked not in ("0", "", "1", "full"):
        raise ValueError(f"shardtensor: the environment variable SHARDTENSOR_CHECK is {asked!r}; use 0, 1 or full")
    _C.set_checking({"1": _SAMPLED, "full": _FULL}.get(asked, _OFF))
