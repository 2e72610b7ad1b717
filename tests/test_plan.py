"""The planner alone, without processes: how one layout becomes another, and at what price."""

from __future__ import annotations

import itertools

import pytest
from shardtensor import _C

R, S0, S1, P = (0, -1, 1, "sum", 2.0), (1, 0, 1, "sum", 2.0), (1, 1, 1, "sum", 2.0), (2, -1, 1, "sum", 2.0)
MAX = (2, -1, 1, "max", 2.0)
MIB = 2.0**20
LOCAL = {"slice", "make_partial"}


def mesh(*shape):
    n = 1
    for s in shape:
        n *= s
    return _C.Mesh("cpu", shape, range(n), [], [""] * len(shape), 0)


def layout(on, *placements, cuts=()):
    return _C.Layout(on, placements, cuts)


def steps(source, target, size=MIB):
    return _C.plan(source, target, size)[0]


ONE = mesh(4)
PAIRS = {
    "gather": (S0, R, ["all_gather"]),
    "slice": (R, S1, ["slice"]),
    "exchange": (S0, S1, ["all_to_all"]),
    "reduce": (P, R, ["all_reduce"]),
    "reduce_to_pieces": (P, S1, ["reduce_scatter"]),
    "other_summands": (P, MAX, ["all_reduce", "make_partial"]),
    "nothing": (S0, S0, []),
}


@pytest.mark.parametrize("name", PAIRS)
def test_one_mesh_dim(name):
    source, target, want = PAIRS[name]
    assert [kind for kind, _ in steps(layout(ONE, source), layout(ONE, target))] == want


def test_recut_is_an_exchange():
    assert steps(layout(ONE, S0, cuts=[[5, 3, 0, 1]]), layout(ONE, S0)) == [("all_to_all", 0)]


def test_reduces_while_the_piece_is_small():
    two = mesh(2, 2)
    assert steps(layout(two, P, S0), layout(two, R, R)) == [("all_reduce", 0), ("all_gather", 1)]
    assert steps(layout(two, S0, P), layout(two, R, R)) == [("all_reduce", 1), ("all_gather", 0)]


def test_slices_before_it_sends():
    two = mesh(2, 2)
    assert steps(layout(two, S0, R), layout(two, R, S1)) == [("slice", 1), ("all_gather", 0)]


def test_nested_pieces_are_lifted_in_order():
    two = mesh(2, 2)
    assert steps(layout(two, S0, S0), layout(two, R, S0)) == [("all_gather", 1), ("all_gather", 0), ("slice", 1)]
    assert steps(layout(two, S0, S0), layout(two, S1, S1)) == [("all_gather", 1), ("all_to_all", 0), ("slice", 1)]


def gathered_first(source, target, size):
    """The price of making all whole, then cutting."""
    whole = layout(source.mesh, *[p if p == q and p[0] == 2 else R for p, q in zip(source.placements, target.placements, strict=True)])
    return _C.plan(source, whole, size)[1] + _C.plan(whole, target, size)[1]


@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("size", [1.0, MIB], ids=["small", "large"])
def test_every_pair(shape, size):
    on = mesh(*shape)
    layouts = [layout(on, *p) for p in itertools.product([R, S0, S1, P], repeat=len(shape))]
    for source, target in itertools.product(layouts, repeat=2):
        taken, cost = _C.plan(source, target, size)
        assert (cost == 0) == all(kind in LOCAL for kind, _ in taken), (source, target, taken)
        assert cost <= gathered_first(source, target, size), (source, target, taken)
        # Cutting what is whole sends nothing, unless a later mesh dim has cut it already.
        pairs = list(zip(source.placements, target.placements, strict=True))
        inside = any(p == R and q[0] == 1 and q in source.placements[m + 1 :] for m, (p, q) in enumerate(pairs))
        if all(p in (R, q) for p, q in pairs) and not inside:
            assert cost == 0, (source, target, taken)
