"""x + y and other operators on ShardTensors and any other operand: torch's values, dtypes and classes of errors."""

from __future__ import annotations

import operator

import pytest
import torch
from oracle import EVEN, UNEVEN, mesh_of, place
from pool import on_ranks
from shardtensor import ShardTensor
from shardtensor.tensor import _handlers

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "@": operator.matmul}
NUMBERS = [2, 2.5, True, 0, -3, 1j, 2**62, float("inf")]


def attempt(f, *args):
    try:
        return f(*args), None
    except Exception as error:
        return None, type(error)


def same_as_torchs():
    mesh = mesh_of((2,))
    values = [torch.arange(1, 10).view(3, 3), torch.randn(3, 3), torch.rand(3, 3) > 0.5, torch.randn(3, 3, dtype=torch.complex64)]
    tried = 0
    for symbol, f in OPERATORS.items():
        for a in values:
            for b in [*values, *NUMBERS, 2**70, None, "text"]:
                x = place(a, mesh, ("S(0)",), UNEVEN)
                y = place(b, mesh, ("R",), UNEVEN) if isinstance(b, torch.Tensor) else b
                for got, want in ((attempt(f, x, y), attempt(f, a, b)), (attempt(f, y, x), attempt(f, b, a))):
                    assert got[1] == want[1], (symbol, a.dtype, b, got, want)
                    if want[1] is None:
                        assert type(got[0]) is ShardTensor
                        torch.testing.assert_close(got[0].full_tensor(), want[0], equal_nan=True)
                        tried += 1
    return tried


def test_same_as_torchs(pools):
    (tried, other) = pools(2).run(same_as_torchs)
    assert tried == other > 200


@on_ranks(2)
def test_heard():
    """Operators reach modes, handlers and the other operand's class."""
    from torch.overrides import TorchFunctionMode

    x = place(torch.ones(4, 4), mesh_of((2,)), ("S(0)",), EVEN)
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Mode():
        x + x, x * 2, x @ x
    assert seen == ["add", "mul", "matmul"]

    ShardTensor.register_function_handler(torch.Tensor.add, lambda func, types, args, kwargs: "handled")
    assert x + x == "handled"
    _handlers.unregister_handler(torch.Tensor.add)
    assert (x + x).full_tensor().eq(2).all()

    class Reflected:
        def __radd__(self, other):
            return "reflected"

    assert x + Reflected() == "reflected"
    with pytest.raises(RuntimeError, match=r"plain torch\.Tensor"):
        x + torch.ones(4, 4)
