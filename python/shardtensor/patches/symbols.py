"""torch.fx.experimental.proxy_tensor: which node of a graph stands for a symbol. All versions."""

from __future__ import annotations

import functools
from typing import Any

from shardtensor.tensor._compile import is_of_ours


class _FirstStays(dict[Any, Any]):
    def __setitem__(self, symbol: Any, node: Any) -> None:
        if symbol not in self or not is_of_ours():
            super().__setitem__(symbol, node)


def patch(proxy_tensor: Any) -> None:
    """A sum may give a symbol again that is an input of the graph (3 + (s - 3)). torch then takes the sum for the symbol, also where
    the sum itself needs it: an endless recursion for sizes of a subclass, which torch finds by their symbol only."""
    tracer = proxy_tensor.PythonKeyTracer
    make = tracer.__init__

    @functools.wraps(make)
    def made(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self.sympy_expr_tracker = _FirstStays(self.sympy_expr_tracker)

    tracer.__init__ = made
