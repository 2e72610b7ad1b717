"""Second derivatives of windowed ops cut in space equal plain torch's, and nothing is gathered for them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import compare
from pool import on_ranks
from shardtensor import _C, Replicate
from test_spatial import DRAWN, Call, laid_like, numbers, place, place_randomly
from torch.distributed.device_mesh import init_device_mesh

KINDS = ("conv", "conv_transpose", "max_pool", "avg_pool", "adaptive", "global", "fractional", "unpool", "nearest", "linear", "pad", "repeat")
MAY_GATHER = ("repeat", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")  # what each rank needs whole; small maxima
CALLS = 6  # per kind and mesh


def beside(whole: torch.Tensor, like: Any) -> Any:
    """A tensor laid out as `like`; replicated where that has summands."""
    held = [Replicate() if p.is_partial() else p for p in like.placements]
    return place(laid_like(whole, whole), like.device_mesh, held, like._layout.cuts).requires_grad_()


def derivatives(function: Any, inputs: list[Any], upstream: Any, directions: Any) -> tuple[Any, Any]:
    """The gradients, and those of their products with `directions`."""
    y = function(*inputs)
    y = y[0] if isinstance(y, tuple) else y
    up = upstream(y).requires_grad_()
    first = torch.autograd.grad(y, inputs, up, create_graph=True)
    return first, torch.autograd.grad(first, [up, *inputs], directions(first), allow_unused=True)


def kind_of(call: Call) -> str:
    return call.text.split(" ")[0]


def check(call: Call, x: Any) -> None:
    mesh, text = x.device_mesh, f"{call.text} on {x._layout}"
    parameters = [place(p, mesh, [Replicate()] * mesh.ndim, [None] * mesh.ndim) for p in call.parameters]
    plain = [t.detach().clone().requires_grad_() for t in (call.x, *call.parameters)]
    draw = random.Random(text.split(" on ")[0])
    want_y = call.function(*plain)
    want_y = want_y[0] if isinstance(want_y, tuple) else want_y
    up = laid_like(numbers(draw, *want_y.shape), want_y)
    along = [laid_like(numbers(draw, *t.shape), t) for t in plain]
    want = derivatives(call.function, plain, lambda y: up.clone(), lambda first: along)
    _C.reset_comm_counts()
    got = derivatives(
        call.function,
        [t.requires_grad_() for t in (x, *parameters)],
        lambda y: beside(up, y),
        lambda first: [beside(v, g).detach() for v, g in zip(along, first, strict=True)],
    )
    sent = _C.comm_counts()
    assert kind_of(call) in MAY_GATHER or "all_gather" not in sent, f"{text} sends {sent}"
    for order, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            what = f"{text}: derivative {i} of order {order + 1}"
            if a is None or b is None:  # torch makes zeros for some
                assert all(t is None or t.detach().abs().max() == 0 for t in (a, b)), what
            else:
                compare(a.detach(), b.detach(), 1e-8, what)


@on_ranks((2,), (3,), (2, 2))
@pytest.mark.parametrize("kind", KINDS)
def test_equals_torch(kind, shape):
    mesh = init_device_mesh("cpu", shape)
    draw = random.Random(f"{kind} {shape}")
    done = 0
    while done < CALLS:
        call = DRAWN[kind](draw)
        if call is not None:
            check(call, place_randomly(draw, call.x, mesh))
            done += 1


@on_ranks(2)
def test_of_made_operands():
    """Operands of a gradient that were made by other ops: the zero gradient of an operand whose sizes alone are read is added to others."""
    mesh = init_device_mesh("cpu", (2,))
    draw = random.Random(0)
    functions = {
        "lp_pool1d": lambda x: F.lp_pool1d(x[0].square() + 0.1, 3.0, 2),
        "lp_pool2d": lambda x: F.lp_pool2d(x.square() + 0.1, 2.0, 3, 2),
        "local_response_norm": lambda x: F.local_response_norm(x, 3),
        "reflect": lambda x: F.pad(x.square(), (1, 2, 2, 1), "reflect").square(),
        "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x.square(), (4, 3)).square(),
        "max_pool2d": lambda x: F.max_pool2d(x.square(), 3, 2).square(),
    }
    for name, function in functions.items():
        x = numbers(draw, 2, 4, 12, 9)
        check(Call(name, function, x, [], []), place_randomly(draw, x, mesh))
