"""Points and graphs cut over ranks: the same as on one process, also where distances are equal."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import shardtensor as st
import torch
import torch.distributed as dist
from oracle import compare, mesh_here, mesh_of
from pool import on_ranks
from shardtensor import _C, Replicate, Shard, points
from test_spatial import draw_cut, numbers, place

MESHES = [(2,), (3,), (2, 2)]
CALLS = 8


def draw_placements(draw: random.Random, mesh: Any, size: int, ndim: int) -> tuple[list[Any], list[list[int] | None]]:
    """Mostly cut by rows; with uneven and empty pieces."""
    placements: list[Any] = []
    cuts: list[list[int] | None] = []
    for m in range(mesh.ndim):
        placements.append(draw.choice([Shard(0), Shard(0), Shard(0), Replicate(), Shard(ndim - 1)]))
        is_free = placements[m] == Shard(0) and placements[m] not in placements[:m]
        cuts.append(draw_cut(draw, size, mesh.size(m)) if is_free else None)
    return placements, cuts


def put(draw: random.Random, whole: torch.Tensor, mesh: Any) -> Any:
    return place_nested(whole, mesh, *draw_placements(draw, mesh, len(whole), whole.ndim))


def place_nested(whole: torch.Tensor, mesh: Any, placements: Any, cuts: Any) -> Any:
    out = place(whole, mesh, placements, cuts)
    return out.requires_grad_(whole.requires_grad)


def grid(draw: random.Random, count: int, dims: int) -> torch.Tensor:
    """Points on a coarse grid: many are as far as others."""
    return torch.tensor([[float(draw.randint(0, 2)) for _ in range(dims)] for _ in range(count)], dtype=torch.float64).view(count, dims)


def same(got: Any, want: Any, text: str) -> None:
    """Values, and integers to the bit."""
    compare(got, want, 1e-9 if want.is_floating_point() else 0, text)


def gradients(results: Any, inputs: Any, seeds: list[torch.Tensor], mesh: Any = None) -> Any:
    if mesh is not None:
        seeds = [place(s, mesh, [Replicate()] * mesh.ndim, [None] * mesh.ndim) for s in seeds]
    return torch.autograd.grad(results, inputs, seeds)


# ---- neighbours ----


def search(draw: random.Random, dims: int, count: int) -> Any:
    """One call, as a function of points and queries; the results, floating-point ones last."""
    radius = draw.choice([0.0, 1.0, 1.5])
    return draw.choice([
        lambda p, q: points.knn(p, q, draw_few),
        lambda p, q: points.radius_search(p, q, radius, None, True, True),
        lambda p, q: points.radius_search(p, q, radius, 4, True, True),
        lambda p, q: points.ball_query(p, q, radius, 3),
        lambda p, q: (points.radius_search(p, q, radius),),
    ]) if (draw_few := draw.randint(0, min(4, count))) is not None else None  # fmt: skip


def run_search(shape: tuple[int, ...]) -> None:
    mesh, draw = mesh_of(shape), random.Random(f"search {shape}")
    for number in range(3 * CALLS):
        dims, count = draw.randint(1, 3), draw.choice([0, 1, 5, 17])
        p = grid(draw, count, dims) if number % 2 else numbers(draw, count, dims)
        q = grid(draw, draw.choice([0, 1, 6, 11]), dims) if number % 2 else numbers(draw, 9, dims)
        p, q = p.requires_grad_(), q.requires_grad_()
        call = search(draw, dims, count)
        ours = [put(draw, t, mesh) for t in (p, q)]
        text = f"{number}: {[t._layout for t in ours]}"
        got, want = call(*ours), call(p, q)
        for g, w in zip(got, want, strict=True):
            same(g, w.detach(), text)
        floats = [i for i, w in enumerate(want) if w.is_floating_point()]
        if floats:
            seeds = [numbers(draw, *want[i].shape) for i in floats]
            grads = gradients([got[i] for i in floats], ours, seeds, mesh)
            for g, w in zip(grads, gradients([want[i] for i in floats], [p, q], seeds), strict=True):
                same(g, w, f"{text}: gradient")


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_search(pools, shape):
    pools(math.prod(shape)).run(run_search, shape)


def test_search_in_plain_torch():
    """Against distances between all pairs, sorted by distance and then by number."""
    draw = random.Random(1)
    for number in range(30):
        p, q = (grid(draw, 13, 2), grid(draw, 7, 2)) if number % 2 else (numbers(draw, 13, 3), numbers(draw, 7, 3))
        distances = torch.cdist(q, p)
        near, order = distances.sort(dim=1, stable=True)
        index, got = points.knn(p, q, 5)
        assert torch.equal(index, order[:, :5])
        torch.testing.assert_close(got, near[:, :5])
        of, number_of = (distances <= 1).nonzero(as_tuple=True)
        assert torch.equal(points.radius_search(p, q, 1.0), torch.stack([of, number_of]))
        index, points_, got = points.radius_search(p, q, 1.0, 3, return_dists=True, return_points=True)
        inside = near[:, :3] <= 1
        assert torch.equal(index, order[:, :3] * inside)
        torch.testing.assert_close(got, near[:, :3] * inside)
        torch.testing.assert_close(points_, p[order[:, :3]] * inside.unsqueeze(-1))
        index, counts = points.ball_query(p, q, 1.0, 3)
        for i in range(7):
            wanted = (distances[i] <= 1).nonzero().flatten()[:3].tolist()
            assert index[i].tolist() == wanted + [0] * (3 - len(wanted)) and counts[i] == len(wanted)
    assert points.knn(torch.zeros(5, 2, dtype=torch.bfloat16), torch.zeros(2, 2, dtype=torch.bfloat16), 3)[0].tolist() == [[0, 1, 2]] * 2


@on_ranks(3)
def test_search_in_blocks():
    """Many queries at a time, few at a time: the same. Nothing is gathered."""
    import shardtensor.points._search as module

    mesh, draw = mesh_here(), random.Random(3)
    p, q = numbers(draw, 50, 3), numbers(draw, 40, 3)
    ours = [place(t, mesh, [Shard(0)], [None]) for t in (p, q)]
    want = points.knn(p, q, 6)
    before = module._BLOCK
    try:
        for module._BLOCK in (before, 60):
            _C.reset_comm_counts()
            got = points.knn(*ours, 6)
            calls, sent = _C.comm_counts()["all_to_all"]
            assert set(_C.comm_counts()) == {"all_to_all"} and calls == mesh.size() - 1
            assert sent == (mesh.size() - 1) * len(ours[0].to_local()) * 3 * 8
            for g, w in zip(got, want, strict=True):
                same(g, w, "blocks")
    finally:
        module._BLOCK = before


# ---- rows by number ----


def run_rows(shape: tuple[int, ...]) -> None:
    mesh, draw = mesh_of(shape), random.Random(f"rows {shape}")
    for number in range(2 * CALLS):
        rows, named = draw.randint(1, 12), draw.choice([(0,), (1,), (9,), (7, 3)])
        features = draw.choice([(), (2,), (2, 3)])
        index = torch.tensor([draw.randrange(rows) for _ in range(math.prod(named))], dtype=torch.int64).view(named)
        x, src = numbers(draw, rows, *features).requires_grad_(), numbers(draw, *named, *features).requires_grad_()
        ours, ours_src = put(draw, x, mesh), put(draw, src, mesh)
        where = put(draw, index, mesh)
        text = f"{number}: {[t._layout for t in (ours, where, ours_src)]}"
        routes = points.Routes(where, ours) if number % 2 else None
        by = routes or where
        seeds = [numbers(draw, *src.shape), numbers(draw, *x.shape)]
        for g, w, s, i, o in (
            (points.take(ours, by), points.take(x, index), seeds[0], ours, x),
            (points.index_add(ours, by, ours_src, alpha=2), points.index_add(x, index, src, alpha=2), seeds[1], ours_src, src),
        ):
            same(g, w.detach(), text)
            same(*gradients([g], [i], [s], mesh), *gradients([w], [o], [s]), f"{text}: gradient")
        for reduce in ("sum", "mean", "amax", "amin"):
            if reduce[0] == "a":
                src = torch.round(src.detach()).requires_grad_()  # equal values share the gradient
                ours_src = put(draw, src, mesh)
            options: Any = {} if routes else draw.choice([{"like": ours}, {"size": rows}])
            g, w = points.scatter(ours_src, by, reduce=reduce, **options), points.scatter(src, index, rows, reduce)
            same(g, w.detach(), f"{text}: {reduce}")
            assert "like" not in options or g.placements == tuple(p if p.is_shard(0) else type(p)() for p in g.placements)
            same(*gradients([g], [ours_src], [seeds[1]], mesh), *gradients([w], [src], [seeds[1]]), f"{text}: gradient of {reduce}")
        whole = torch.arange(float(src.numel())).view(src.shape).to(torch.int64)
        for reduce in ("sum", "mean", "amax"):
            same(points.scatter(put(draw, whole, mesh), where, rows, reduce), points.scatter(whole, index, rows, reduce), f"{text}: integers, {reduce}")


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_rows(pools, shape):
    pools(math.prod(shape)).run(run_rows, shape)


@pytest.mark.parametrize("shape", MESHES, ids=str)
@on_ranks(of="shape")
def test_segments(shape):
    mesh, draw = mesh_of(shape), random.Random(f"segments {shape}")
    for number in range(CALLS):
        lengths = torch.tensor([draw.choice([0, 1, 2, 5]) for _ in range(draw.randint(1, 9))])
        data = numbers(draw, int(lengths.sum()), 2).requires_grad_()
        ours, where = put(draw, data, mesh), put(draw, lengths, mesh)
        reduce = draw.choice(["sum", "mean", "amax", "amin"])
        got, want = points.segment_reduce(ours, reduce, lengths=where), points.segment_reduce(data, reduce, lengths=lengths)
        text = f"{number}: {reduce} of {[t._layout for t in (ours, where)]}"
        same(got, want.detach(), text)
        for i, n in enumerate(lengths.tolist()):  # against plain torch
            run = data[(a := int(lengths[:i].sum())) : a + n]
            assert not n or torch.allclose(want[i], getattr(run, reduce)(0)), text
        seed = numbers(draw, *want.shape)
        same(*gradients([got], [ours], [seed], mesh), *gradients([want], [data], [seed]), f"{text}: gradient")


@on_ranks(3)
def test_bytes_are_those_of_the_rows():
    """Of the rows that a rank lacks each comes once, and nothing else; each other rank's row goes home once."""
    mesh, rank = mesh_here(), dist.get_rank()
    x = place(torch.randn(9, 4, dtype=torch.float64), mesh, [Shard(0)], [[4, 2, 3]])
    mine = [[0, 1, 1, 4, 4, 4], [4, 5, 0, 0, 8, 8], [8, 7, 6, 6, 6, 6]][rank]
    index = place(torch.tensor([0, 1, 1, 4, 4, 4, 4, 5, 0, 0, 8, 8, 8, 7, 6, 6, 6, 6]), mesh, [Shard(0)], [None])
    assert index.to_local().tolist() == mine
    routes = points.Routes(index, x)
    src = place(torch.randn(18, 4, dtype=torch.float64), mesh, [Shard(0)], [None])
    for call, lent in ((lambda: points.take(x, routes), [1, 1, 1]), (lambda: points.scatter(src, routes), [1, 2, 0])):
        _C.reset_comm_counts()
        call()
        assert _C.comm_counts() == {"all_to_all": (1, lent[rank] * 4 * 8)}


@on_ranks(3)
def test_twice_differentiable():
    mesh, draw = mesh_here(), random.Random(5)
    x, index = numbers(draw, 7, 2).requires_grad_(), torch.tensor([0, 6, 6, 3, 2])
    ours, where = place_nested(x, mesh, [Shard(0)], [[5, 0, 2]]), place(index, mesh, [Shard(0)], [[0, 4, 1]])
    seconds = []
    for a, i in ((ours, where), (x, index)):
        y = points.scatter(points.take(a, i) ** 3, i, like=a)
        (g,) = torch.autograd.grad((y**2).sum(), a, create_graph=True)
        seconds.append(torch.autograd.grad((g**2).sum(), a)[0])
    same(*seconds, "second derivative")


def layer(x: Any, index: Any, weight: Any) -> Any:
    return x + points.scatter(torch.relu(points.take(x, index) @ weight), index, like=x)


@on_ranks(2)
def test_compiled():
    torch._dynamo.reset()
    mesh, draw = mesh_here(), random.Random(6)
    x, w, index = numbers(draw, 7, 2).requires_grad_(), numbers(draw, 2, 2).requires_grad_(), torch.tensor([0, 6, 6, 3, 2])
    ours = [place_nested(x, mesh, [Shard(0)], [[5, 2]]), place(index, mesh, [Shard(0)], [[4, 1]]), place_nested(w, mesh, [Replicate()], [None])]
    got, want = torch.compile(layer, backend="aot_eager")(*ours), layer(x, index, w)
    same(got, want.detach(), "compiled")
    for g, e in zip(torch.autograd.grad(got.sum(), ours[::2]), torch.autograd.grad(want.sum(), [x, w]), strict=True):
        same(g, e, "gradient")


# ---- samples ----


@pytest.mark.parametrize("shape", MESHES, ids=str)
@on_ranks(of="shape")
def test_farthest(shape):
    mesh, draw = mesh_of(shape), random.Random(f"farthest {shape}")
    for number in range(CALLS):
        count = draw.randint(1, 15)
        p = grid(draw, count, 2) if number % 2 else numbers(draw, count, 3)
        few, start = draw.randint(0, count), draw.randrange(count)
        got = points.farthest_points(put(draw, p, mesh), few, start)
        assert got.placements == tuple(type(q)() for q in got.placements)
        same(got, points.farthest_points(p, few, start), f"{number}")


def test_farthest_in_plain_torch():
    p = numbers(random.Random(2), 20, 3)
    chosen = [4]
    while len(chosen) < 8:
        chosen.append(int(torch.cdist(p, p[chosen]).amin(1).argmax()))
    assert points.farthest_points(p, 8, 4).tolist() == chosen


def on_four_ranks() -> None:
    """For test_nccl_like.py."""
    run_rows((2, 2))
    run_search((2, 2))


# ---- refusals ----


@on_ranks(2)
def test_refused_on_all_ranks():
    mesh, rank = mesh_here(), dist.get_rank()
    x = st.distribute_tensor(torch.randn(5, 3), mesh, [Shard(0)])

    def raises(error: Any, text: str, call: Any, *args: Any, **options: Any) -> None:
        with pytest.raises(error, match=text):
            call(*args, **options)
        dist.barrier()

    bad = st.ShardTensor.from_local(torch.tensor([0, 5 if rank else 4]), mesh, [Shard(0)])
    raises(IndexError, "number on rank 1 that is not in 0 to 4", points.take, x, bad)
    raises(RuntimeError, r"'index' is a plain tensor .*implicit_replication\(\)", points.take, x, torch.tensor([0]))
    raises(TypeError, "'index' is torch.float32 of 2 dims", points.take, x, x)
    raises(ValueError, "'k' is 6, but there are 5 points", points.knn, x, x, 6)
    raises(ValueError, "3 and 2 coordinates", points.knn, x, x[:, :2], 1)
    raises(ValueError, "'reduce' is 'mul'", points.scatter, x, bad, 5, "mul")
    raises(TypeError, "one of the arguments 'size' and 'like'", points.scatter, x, bad)
    routes = points.Routes(bad.clamp(max=4), x)
    raises(ValueError, "the routes are for 5 rows", points.take, x[:4], routes)
    elsewhere = x.redistribute(st.DeviceMesh("cpu", [1, 0]), [Shard(0)])
    raises(ValueError, "the routes are for cpu mesh", points.take, elsewhere, routes)
    raises(TypeError, "leave out 'size'", points.scatter, x[:4], routes, 4)
    raises(ValueError, r"sizes \[5, 3\], the index \[4\]", points.scatter, x, routes)
    raises(ValueError, "adds up to 2, but the data have 5 rows", points.segment_reduce, x, lengths=bad.clamp(max=1))
    raises(ValueError, "negative entry", points.segment_reduce, x, lengths=bad - 5)
    raises(ValueError, "'count' 6 and 'start' 0", points.farthest_points, x, 6)
    for t in (x, torch.randn(5, 3)):  # negative numbers name no row, on one process neither
        with pytest.raises((IndexError, RuntimeError), match=r"not in 0 to 4|out of range"):
            points.take(t, bad - 5 if t is x else torch.tensor([-1]))
    with st.implicit_replication():
        assert torch.equal(points.take(x, torch.tensor([4, 0])).full_tensor(), x.full_tensor()[[4, 0]])


