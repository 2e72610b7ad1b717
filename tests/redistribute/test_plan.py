"""The planner alone, without processes: how one layout becomes another, and at what price."""

from __future__ import annotations

import itertools

import pytest
from shardtensor import _C

R, S0, S1, P = (0, -1, 1, "sum", 2.0), (1, 0, 1, "sum", 2.0), (1, 1, 1, "sum", 2.0), (2, -1, 1, "sum", 2.0)
MAX, AVG = (2, -1, 1, "max", 2.0), (2, -1, 1, "avg", 2.0)
MIB = 2.0**20
LOCAL = {"slice", "make_partial", "pad"}


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
    "pieces_to_summands": (S0, P, ["pad"]),
    "pieces_to_an_average": (S0, AVG, ["all_gather", "make_partial"]),
    "nothing": (S0, S0, []),
}


@pytest.mark.parametrize("name", PAIRS)
def test_one_mesh_dim(name):
    source, target, want = PAIRS[name]
    assert [kind for kind, _ in steps(layout(ONE, source), layout(ONE, target))] == want


def test_many_peers_are_not_sent_to_one_by_one():
    large = mesh(64, 64)
    for size in (2.0**13, 2.0**15, 2.0**20):
        assert [kind for kind, _ in steps(layout(large, S0, S0), layout(large, R, R), size)] == ["all_gather", "all_gather"]


def test_recut_is_an_exchange():
    assert steps(layout(ONE, S0, cuts=[[5, 3, 0, 1]]), layout(ONE, S0)) == [("all_to_all", 0)]


def test_summands_are_of_one_kind_at_a_time():
    two = mesh(2, 2)
    assert steps(layout(two, P, R), layout(two, S0, MAX)) == [("reduce_scatter", 0), ("make_partial", 1)]
    assert steps(layout(two, R, P), layout(two, MAX, S0)) == [("reduce_scatter", 1), ("make_partial", 0)]
    assert steps(layout(two, P, S0), layout(two, R, MAX)) == [("all_reduce", 0), ("pad", 1)]


def test_reduces_while_the_piece_is_small():
    two = mesh(2, 2)
    assert steps(layout(two, P, S0), layout(two, R, R)) == [("all_reduce", 0), ("all_gather", 1)]
    assert steps(layout(two, S0, P), layout(two, R, R)) == [("all_reduce", 1), ("all_gather", 0)]


def test_slices_before_it_sends():
    two = mesh(2, 2)
    assert steps(layout(two, S0, R), layout(two, R, S1)) == [("slice", 1), ("all_gather", 0)]


AT_ONCE = {
    "swap": ((S0, S1), (S1, S0)),
    "all_to_another_dim": ((S0, S0), (S1, S1)),
    "outer_nest": ((S0, S0), (R, S0)),
    "into_a_nest": ((S0, S1), (S1, S1)),
    "two_dims": ((S0, R), (S1, S0)),
}


@pytest.mark.parametrize("name", AT_ONCE)
def test_changes_that_go_at_once(name):
    source, target = AT_ONCE[name]
    two = mesh(2, 2)
    assert steps(layout(two, *source), layout(two, *target)) == [("transfer", -1)]


def test_nested_cuts_change_at_once():
    two = mesh(2, 2)
    source, target = layout(two, S0, S0, cuts=[[5, 3], [1, 4, 3, 0]]), layout(two, S0, S0, cuts=[[3, 5], [1, 2, 3, 2]])
    assert steps(source, target) == [("transfer", -1)]
    assert steps(source, layout(two, S0, S0, cuts=[[5, 3], [4, 1, 0, 3]])) == [("all_to_all", 1)]


def test_summands_are_added_up_before_the_rest_goes_at_once():
    three = mesh(2, 2, 2)
    assert steps(layout(three, P, S0, S1), layout(three, R, S1, S0)) == [("all_reduce", 0), ("transfer", -1)]
    assert steps(layout(three, P, S0, S1), layout(three, P, S1, S0)) == [("transfer", -1)]
    assert sorted(steps(layout(three, R, S0, S1), layout(three, P, S1, S0))) == [("make_partial", 0), ("transfer", -1)]


SINGLE = [(S0, R, "all_gather"), (S0, S1, "all_to_all"), (P, S0, "reduce_scatter"), (P, R, "all_reduce")]


@pytest.mark.parametrize("shape", [(4,), (2, 2), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("size", [1.0, MIB], ids=["small", "large"])
@pytest.mark.parametrize("before,after,kind", SINGLE, ids=[kind for *_, kind in SINGLE])
def test_one_collective_is_not_replaced(shape, size, before, after, kind):
    on = mesh(*shape)
    for m, other in itertools.product(range(len(shape)), (R, (1, 2, 1, "sum", 2.0))):
        source, target = [other] * len(shape), [other] * len(shape)
        source[m], target[m] = before, after
        assert steps(layout(on, *source), layout(on, *target), size) == [(kind, m)]


def test_gathers_stay_collectives_where_they_carry_much():
    two = mesh(2, 2)
    assert [kind for kind, _ in steps(layout(two, S0, S1), layout(two, R, R))] == ["all_gather"] * 2


def gathered_first(source, target, size):
    """The price of gathering everything, then cutting."""
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
