"""torch.fx.experimental.proxy_tensor: which node of a graph stands for a symbol. All versions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from shardtensor.patches._graphs import REFUSED, refuse
from shardtensor.patches._patch import Patch
from shardtensor.tensor._compile import is_of_ours


class _FirstStays(dict[Any, Any]):
    def __setitem__(self, symbol: Any, node: Any) -> None:
        if symbol not in self or not is_of_ours():
            super().__setitem__(symbol, node)


def _first_stays(make: Callable[..., None]) -> Callable[..., None]:
    """A sum may give a symbol again that is an input of the graph (3 + (s - 3)). torch then takes the sum for the symbol, also where
    the sum itself needs it: an endless recursion for sizes of a subclass, which torch finds by their symbol only."""

    @functools.wraps(make)
    def made(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self.sympy_expr_tracker = _FirstStays(self.sympy_expr_tracker)

    return made


PATCHES = (
    Patch(
        "torch.fx.experimental.proxy_tensor",
        "PythonKeyTracer.__init__",
        _first_stays,
        why="a sum that gives an input's symbol again must not stand for the input.",
        ask="a tracker in which the first node of a symbol stays",
        without=REFUSED,
        turn_off=refuse,
    ),
)
