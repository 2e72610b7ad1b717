from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import MESHES, case, ints, mesh_id, mesh_of, place, run_on
from pool import on_ranks
from shardtensor import _C, Partial, Replicate, Shard


def bag(mode: str) -> Any:
    return lambda w, i: F.embedding_bag(i, w, mode=mode)


CASES = [
    case("embedding", lambda w, i: F.embedding(i, w), (7, 4), ints(7, 5), quiet=lambda w, i: w == "R" or i == "R"),
    case("embedding_2d", lambda w, i: F.embedding(i, w), (7, 4), ints(7, 3, 2)),
    case("embedding_scalar", lambda w, i: F.embedding(i, w), (7, 4), ints(7)),
    case("embedding_none", lambda w, i: F.embedding(i, w), (7, 4), ints(7, 0), quiet=lambda w, i: i == "R"),
    case("embedding_padding", lambda w, i: F.embedding(i, w, padding_idx=2), (7, 4), ints(7, 5, 2)),
    case("embedding_padding_negative", lambda w, i: F.embedding(i, w, padding_idx=-1), (7, 4), ints(7, 5, 2)),
    case("embedding_frequency", lambda w, i: F.embedding(i, w, scale_grad_by_freq=True), (3, 4), ints(3, 6)),
    case("embedding_int32", lambda w, i: F.embedding(i.int(), w), (7, 4), ints(7, 5)),
    case("embedding_tied", lambda w, i: F.embedding(i, w) @ w.t(), (7, 4), ints(7, 5)),
    case("embedding_max_norm", lambda w, i: F.embedding(i, w.clone(), max_norm=0.7), (7, 4), ints(7, 5), backward=False),
    case("embedding_renorm_", lambda w, i: torch.embedding_renorm_(w.clone(), i, 0.7, 1.0), (7, 4), ints(7, 5), backward=False),
    *(case(f"embedding_bag_{m}", bag(m), (7, 4), ints(7, 3, 2), limit=20) for m in ("sum", "mean", "max")),
    case("embedding_bag_weights", lambda w, i, s: F.embedding_bag(i, w, mode="sum", per_sample_weights=s),
         (7, 4), ints(7, 3, 2), (3, 2), limit=20),
    case("embedding_bag_offsets", lambda w, i: F.embedding_bag(i, w, torch.tensor([0, 2, 2]), mode="sum"),
         (7, 4), ints(7, 5), limit=20),
    case("one_hot", lambda i: F.one_hot(i, 5), ints(5, 6), backward=False),
    case("one_hot_inferred", lambda i: F.one_hot(i), ints(5, 6), backward=False),
]


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_equals_torch(pools, name, mesh):
    run_on(pools, mesh, __name__, name)


def table(placement: str, cut: str) -> Any:
    return place(torch.arange(28, dtype=torch.float64).view(7, 4), mesh_of((3,)), (placement,), cut)


def indices(values: list[int]) -> Any:
    return place(torch.tensor(values), mesh_of((3,)), ("R",), "even")


@on_ranks(4)
def test_rows_and_batches():
    """Rows cut over one mesh dim, batches over the other: the gradient has summands of the held rows only."""
    mesh = mesh_of((2, 2))
    whole = torch.arange(28, dtype=torch.float64).view(7, 4)
    numbers = torch.tensor([6, 0, 3, 3, 1])
    w = place(whole, mesh, ("R", "S(0)"), "uneven").requires_grad_()
    out = F.embedding(place(numbers, mesh, ("S(0)", "R"), "uneven"), w, padding_idx=3)
    seed = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _C.reset_comm_counts()
    (grad,) = torch.autograd.grad(out, w, place(seed, mesh, ("S(0)", "R"), "uneven"))
    assert not _C.comm_counts() and grad.placements == (Partial(), Shard(0))
    assert grad.to_local().shape == w.to_local().shape
    plain = whole.clone().requires_grad_()
    (want,) = torch.autograd.grad(F.embedding(numbers, plain, padding_idx=3), plain, seed)
    torch.testing.assert_close(grad.full_tensor(), want)


@on_ranks(3)
def test_nothing_is_sent():
    for cut in ("even", "uneven", "empty"):
        for weight, index, want in (("S(0)", "R", Partial()), ("S(1)", "R", Shard(1)), ("R", "S(0)", Shard(0)), ("R", "R", Replicate())):
            w = table(weight, cut).requires_grad_()
            i = place(torch.tensor([6, 0, 3, 3, 1]), mesh_of((3,)), (index,), cut)
            _C.reset_comm_counts()
            out = F.embedding(i, w)
            assert out.placements == (want,)
            seed = place(torch.ones(5, 4, dtype=torch.float64), mesh_of((3,)), ("S(1)" if weight == "S(1)" else "R",), cut)
            (grad,) = torch.autograd.grad(out, w, seed)
            assert not _C.comm_counts()
            if index == "S(0)":
                assert grad.placements == (Partial(),)
            else:  # each rank makes the rows, or the columns, that it holds
                assert grad._layout == w._layout


@pytest.mark.parametrize("cut", ["even", "uneven", "empty"])
@pytest.mark.parametrize("placement", ["S(0)", "S(1)", "R"])
@on_ranks(3)
def test_index_out_of_range(placement, cut):
    for bad in (7, -1):
        with pytest.raises((IndexError, RuntimeError)):
            F.embedding(indices([0, bad]), table(placement, cut))
        with pytest.raises((IndexError, RuntimeError)):
            torch.embedding_renorm_(table(placement, cut), indices([0, bad]), 1.0, 2.0)


@on_ranks(3)
def test_sparse_gradients_are_refused():
    with pytest.raises(NotImplementedError, match="sparse=False"):
        F.embedding(indices([0]), table("S(0)", "even"), sparse=True)
