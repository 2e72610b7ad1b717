"""out= arguments: empty ones get the result's sizes, as in torch; other wrong sizes are refused, on every rank alike.
Strides: a result's strides depend on what all ranks know, never on the piece that one rank holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from oracle import EVEN, UNEVEN, compare, mesh_of, place, python_entered
from pool import on_ranks
from shardtensor import implicit_replication
from torch.utils._pytree import tree_leaves

# ---- out= ----

X, W, L = (5, 4), (4, 3), (5, 4, 2)
# A function of its arguments and of out=, and the arguments' sizes.
OUT: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "abs": (torch.abs, (X,)),
    "add": (torch.add, (X, X)),
    "add_broadcast": (torch.add, (X, (4,))),
    "add_number": (lambda x, out: torch.add(x, 1, out=out), (X,)),
    "amax": (lambda x, out: torch.amax(x, 0, out=out), (X,)),
    "argmax": (lambda x, out: torch.argmax(x, 1, out=out), (X,)),
    "bmm": (torch.bmm, (L, (5, 2, 3))),
    "cat": (lambda x, y, out: torch.cat((x, y), out=out), (X, X)),
    "cumsum": (lambda x, out: torch.cumsum(x, 0, out=out), (X,)),
    "gather": (lambda x, out: torch.gather(x, 1, torch.zeros_like(x, dtype=torch.int64), out=out), (X,)),
    "gt": (lambda x, y, out: torch.gt(x, y, out=out), (X, X)),
    "index_select": (lambda x, out: torch.index_select(x, 0, torch.zeros_like(x[:, 0], dtype=torch.int64), out=out), (X,)),
    "linalg_vector_norm": (lambda x, out: torch.linalg.vector_norm(x, dim=1, out=out), (X,)),
    "logsumexp": (lambda x, out: torch.logsumexp(x, 0, out=out), (X,)),
    "matmul": (torch.matmul, (L, (2, 3))),
    "max": (lambda x, out: torch.max(x, 0, out=(out, torch.empty_like(x[0], dtype=torch.int64)))[0], (X,)),
    "mean": (lambda x, out: torch.mean(x, 0, out=out), (X,)),
    "mm": (torch.mm, (X, W)),
    "mul": (torch.mul, (X, X)),
    "prod": (lambda x, out: torch.prod(x, 0, out=out), (X,)),
    "softmax": (lambda x, out: torch.softmax(x, 1, out=out), (X,)),
    "stack": (lambda x, y, out: torch.stack((x, y), out=out), (X, X)),
    "sum": (lambda x, out: torch.sum(x, 1, out=out), (X,)),
    "tril": (torch.tril, (X,)),
    "var": (lambda x, out: torch.var(x, 0, out=out), (X,)),
    "where": (lambda x, y, out: torch.where(x > y, x, y, out=out), (X, X)),
}


@pytest.mark.parametrize("name", OUT)
@on_ranks(3)
def test_out_has_the_result_s_sizes(name):
    f, sizes = OUT[name]
    mesh = mesh_of((3,))
    plain = [torch.randn(s, dtype=torch.float64) for s in sizes]
    dtype = {"argmax": torch.int64, "gt": torch.bool}.get(name, torch.float64)
    want = f(*plain, out=torch.empty(0, dtype=dtype))
    wrong = [torch.zeros(7, dtype=dtype), torch.zeros(*want.shape[:-1], want.shape[-1] + 1, dtype=dtype), torch.zeros(2, *want.shape, dtype=dtype)]
    for placement in ("R", "S(0)"):
        ours = [place(t, mesh, (placement,), UNEVEN) for t in plain]
        out = place(torch.empty(0, dtype=dtype), mesh, ("R",), EVEN)
        assert f(*ours, out=out) is out or name == "max"
        compare(out, want, 1e-9, f"{name} into an empty one, {placement}")
        out.zero_()
        f(*ours, out=out)
        compare(out, want, 1e-9, f"{name} into one that fits, {placement}")
        assert not python_entered(partial(f, *ours, out=out)), f"{name}, {placement}"
        for w in wrong:
            for out in (place(w, mesh, ("R",), EVEN), place(w, mesh, ("S(0)",), EVEN), w.clone()):
                try:
                    with torch.no_grad(), implicit_replication():
                        f(*ours, out=out)
                except RuntimeError as error:
                    assert "are not resized" in str(error) and "has sizes" in str(error), error
                else:
                    raise AssertionError(f"{name} writes {tuple(want.shape)} into {tuple(w.shape)}")
                compare(out, w, 0, f"{name} into a wrong one")
        with torch.no_grad(), implicit_replication():
            for out in (torch.empty(0, dtype=dtype), torch.zeros_like(want)):
                assert f(*ours, out=out) is out or name == "max"
                compare(out, want, 1e-9, f"{name} into a plain one, {placement}")


@on_ranks(2)
def test_several_outputs():
    """Each of several outputs is sized on its own."""
    mesh = mesh_of((2,))
    x = torch.randn(5, 4)
    values, indices = (place(torch.empty(0, dtype=d), mesh, ("R",), EVEN) for d in (torch.float32, torch.int64))
    torch.sort(place(x, mesh, ("S(0)",), UNEVEN), dim=0, out=(values, indices))
    compare((values, indices), tuple(torch.sort(x, dim=0)), 0, "sort")


# ---- strides ----

# Functions of a tensor [5, 4, 3] with its dims in some order in memory, and whether the results' strides are torch's.
STRIDES: dict[str, tuple[Callable[..., Any], bool]] = {
    "mul": (lambda x: x * 2, True),
    "add": (lambda x: x + x, True),
    "add_row": (lambda x: x + x[..., :1], True),
    "relu": (torch.relu, True),
    "where": (lambda x: torch.where(x > 0, x, 0.0), True),
    "clone": (lambda x: x.clone(), True),
    "to": (lambda x: x.to(torch.float32), True),
    "contiguous": (lambda x: x.contiguous(), True),
    "zeros_like": (torch.zeros_like, True),
    "transpose": (lambda x: x.transpose(0, 2) * 2, True),
    "select": (lambda x: x[0] * 2, False),
    "unbind": (lambda x: [r * 2 for r in x.unbind(0)], False),
    "slice": (lambda x: x[1:] * 2, True),
    "softmax": (lambda x: x.softmax(-1), False),
    "layer_norm": (lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]), False),
    "sum": (lambda x: x.sum(0), False),
    "sum_last": (lambda x: x.sum(-1), False),
    "amax": (lambda x: x.amax(1, keepdim=True), False),
    "var": (lambda x: x.var(0), False),
    "sort": (lambda x: x.sort(-1)[0], False),
    "cumsum": (lambda x: x.cumsum(0), False),
    "matmul": (lambda x: x @ x.mT, False),
    "cat": (lambda x: torch.cat((x, x), 1), False),
    "stack": (lambda x: torch.stack((x, x)), False),
    "index": (lambda x: x[:, torch.zeros_like(x[0, :, 0], dtype=torch.int64)], False),
    "flip": (lambda x: x.flip(1), False),
    "foreach": (lambda x: torch._foreach_mul([x], 2.0), True),
    "redistribute": (lambda x: x.flatten(), False),
}
ORDERS = [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1), (1, 2, 0)]


def strides(name: str) -> list[Any]:
    f, like_torch = STRIDES[name]
    out = []
    for order in ORDERS:
        back = [order.index(d) for d in range(3)]
        memory = torch.randn([(5, 4, 3)[d] for d in order], dtype=torch.float64)
        want = tree_leaves(f(memory.permute(back)))
        for d in range(3):
            for cut in (UNEVEN, (memory.shape[order.index(d)] - 1, 1, 0)):
                x = place(memory, mesh_of((3,)), (f"S({order.index(d)})",), cut).permute(back)
                got = tree_leaves(f(x))
                out.append((order, d, [t.stride() for t in got]))
                if like_torch:
                    assert [t.stride() for t in got] == [t.stride() for t in want], (order, d, cut)
    return out


@pytest.mark.parametrize("name", STRIDES)
def test_strides_are_the_same_on_every_rank(pools, name):
    ranks = pools(3).run(strides, name)
    assert all(r == ranks[0] for r in ranks)
