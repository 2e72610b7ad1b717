"""The sums that ShardTensors keep beside their pieces, for summands that ops have added up."""

from __future__ import annotations

from typing import NamedTuple, overload

from torch import Tensor

import shardtensor._C as _C


class Kept(NamedTuple):
    """A kept piece: its layout, as text, and its bytes on this rank."""

    layout: str
    bytes: int


@overload
def kept(x: Tensor) -> list[Kept]: ...
@overload
def kept() -> tuple[int, int]: ...
def kept(x: Tensor | None = None) -> list[Kept] | tuple[int, int]:
    """The sums that ShardTensor `x` and its views keep for their next readers. Without `x`: how many sums this process keeps, and
    their bytes. See `shardtensor.set_reduce_once`."""
    return _C.sums() if x is None else [Kept(*one) for one in _C.sums_near(x)]
