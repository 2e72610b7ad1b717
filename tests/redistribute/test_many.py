"""redistribute() of several tensors: the pieces and gradients of moves one by one, in few collectives."""

from __future__ import annotations

import itertools
import random
import threading

import pytest
import shardtensor as st
import torch
import torch.distributed as dist
from oracle import mesh_of, place
from pool import Pool, on_ranks
from shardtensor import _C
from shardtensor.tensor._mesh import as_mesh
from test_redistribute import S0, S1, STRIDED0, R, close, layout, layouts, meshes_here, partial, put, summands

P, MAX, AVG = partial(), partial("max"), partial("avg")
SIZES = [(5, 4), (1, 4), (7, 1), (0, 3), (8, 6), (4, 0), (3, 2, 2)]
DTYPES = [torch.float64, torch.float64, torch.float32, torch.int64, torch.bool, torch.complex128, torch.bfloat16]


def calls():
    return {kind: n for kind, (n, _) in _C.comm_counts().items() if n}


def numbers(sizes, dtype, generator):
    return torch.randint(-4, 5, sizes, generator=generator).to(dtype)


def anywhere(mesh, sizes):
    singles = [R, S0, S1, STRIDED0]
    if 0 in sizes:  # nothing to cut unevenly
        return [layout(mesh, *ps) for ps in itertools.product(singles, repeat=len(mesh.shape))]
    return layouts(mesh, singles, sizes)


def one_move(rng, meshes, generator):
    """A tensor, where it is, and where it goes: any layouts, also in summands, on any meshes."""
    sizes, dtype = rng.choice(SIZES), rng.choice(DTYPES)
    whole = numbers(sizes, dtype, generator)
    reduces = [P, MAX] if dtype == torch.int64 else [P, MAX, AVG]
    sources = [where for mesh in meshes for where in anywhere(mesh, sizes)]
    if dtype not in (torch.bool, torch.complex128):
        for mesh in meshes:
            combinations = itertools.product([R, S0, *reduces], repeat=len(mesh.shape))
            sources += [layout(mesh, *ps) for ps in combinations if len({p for p in ps if p[0] == 2}) == 1]
    source = rng.choice(sources)
    mesh = source.mesh if rng.random() < 0.8 else rng.choice(meshes)
    target = rng.choice(anywhere(mesh, sizes))
    return whole, source, target


@pytest.mark.parametrize("world,seed", [(2, 0), (2, 1), (3, 2), (3, 3), (4, 4), (4, 5), (4, 6)])
@on_ranks()
def test_many(seed):
    """Lists of anything. Each result is what the tensor's own move gives."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    meshes = meshes_here()
    for _ in range(12):
        moves = [one_move(rng, meshes, generator) for _ in range(rng.randint(1, 9))]
        xs = [summands(whole, source) if source.has_partial else put(whole, source) for whole, source, _ in moves]
        differentiable = [x.is_floating_point() and rng.random() < 0.7 for x in xs]
        for x, grad in zip(xs, differentiable, strict=True):
            x.requires_grad_(grad)
        ys = _C.redistribute_all(xs, [target for *_, target in moves], async_op=rng.random() < 0.5)
        for x, y, grad, (whole, source, target) in zip(xs, ys, differentiable, moves, strict=True):
            assert y._layout == target and y.shape == whole.shape and y.dtype == whole.dtype and y.requires_grad == grad, (source, target)
            close(y._local_tensor.detach(), put(whole, target)._local_tensor)
            assert y is x or y._local_tensor.untyped_storage() is not x._local_tensor.untyped_storage() or source == target
        picked = [i for i, grad in enumerate(differentiable) if grad and rng.random() < 0.8]
        seeds = {i: numbers(moves[i][0].shape, moves[i][0].dtype, generator) for i in picked}
        if not picked:
            continue
        grads = torch.autograd.grad([ys[i] for i in picked], [xs[i] for i in picked], [put(seeds[i], moves[i][2]) for i in picked])
        for i, grad in zip(picked, grads, strict=True):
            source = moves[i][1]
            kept = layout(source.mesh, *[R if p[0] == 2 else p for p in source.placements], cuts=source.cuts)
            assert grad._layout == kept and grad.dtype == xs[i].dtype
            close(grad._local_tensor, put(seeds[i], kept)._local_tensor)


@pytest.mark.parametrize("world,seed", [(2, 10), (3, 11), (4, 12)])
@on_ranks()
def test_later(seed):
    """What is started holds whatever happens to the inputs, in whichever order each rank reads its results, or drops them."""
    rng, mine = random.Random(seed), random.Random(seed + dist.get_rank())
    generator = torch.Generator().manual_seed(seed)
    meshes = meshes_here()
    for _ in range(12):
        moves = [one_move(rng, meshes, generator) for _ in range(rng.randint(1, 9))]
        xs = [summands(whole, source) if source.has_partial else put(whole, source) for whole, source, _ in moves]
        ys = _C.redistribute_all(xs, [target for *_, target in moves], async_op=True)
        results = [(y, put(whole, target)._local_tensor) for x, y, (whole, _, target) in zip(xs, ys, moves, strict=True) if y is not x]
        for x, y in zip(xs, ys, strict=True):
            if y is not x:
                x._local_tensor.zero_()
        del ys, y
        mine.shuffle(results)
        for y, want in results[: mine.randint(0, len(results))]:
            close(y._local_tensor, want)
    del results, y
    dist.barrier()
    _C.drain_dropped()
    assert _C.dropped_in_flight() == 0


def three(n=3):
    """Moves that are one call, and what they give."""
    mesh = mesh_of((dist.get_world_size(),))
    wholes = [torch.arange(6.0 * rows).view(rows, 6) + rows for rows in range(4, 4 + n)]
    return [place(whole, mesh, ["S(0)"], cut) for whole, cut in zip(wholes, itertools.cycle(["uneven", "even", "empty"]))], wholes


def not_done_at_once():
    """Rank 0 is past its call, and has views of the results, before the others begin. The store enforces this order, not a clock."""
    xs, wholes = three()
    store = dist.distributed_c10d._get_default_store()
    for to in (st.Replicate(), st.Shard(1)):
        st.redistribute(xs, [to])  # the ranks compare notes
        not_done_at_once.calls += 1
        key = f"test_many/{not_done_at_once.calls}"
        if dist.get_rank() == 0:
            ys = st.redistribute(xs, [to], async_op=True)
            views = [y.t() for y in ys]
            store.set(key, "past")
        else:
            store.wait([key])
            views = [y.t() for y in st.redistribute(xs, [to], async_op=True)]
        for view, whole in zip(reversed(views), reversed(wholes), strict=True):
            close(view.full_tensor(), whole.t())


not_done_at_once.calls = 0


def test_not_done_at_once(pools):
    pools(3).run(not_done_at_once)


@on_ranks(3)
def test_read_by_threads():
    """Each result of one call is read by two threads at the same time."""
    xs, wholes = three(4)
    for _ in range(5):
        seen = []
        ys = st.redistribute(xs, [st.Replicate()], async_op=True)
        users = [
            threading.Thread(target=lambda y=y, whole=whole, seen=seen: seen.append(torch.equal(y.to_local(), whole)))
            for y, whole in [*zip(ys, wholes, strict=True)] * 2
        ]
        for user in users:
            user.start()
        for user in users:
            user.join()
        assert seen == [True] * 8


def as_one_later():
    as_one(async_op=True)


def as_one(async_op=False):
    """As many collectives as one tensor needs, forward and backward; for reductions, per dtype and reduction."""
    mesh, square = mesh_of((dist.get_world_size(),)), mesh_of((2, dist.get_world_size() // 2))
    sums = 1 if dist.get_backend() == "gloo" else 2  # Gloo's ranks add up on arrival, so dtypes do not matter
    objects = {"R": st.Replicate(), "S(0)": st.Shard(0), "S(1)": st.Shard(1)}
    sizes = [(6, 8), (5, 3), (1, 4), (7, 1), (8, 8)]
    dtypes = [torch.float64, torch.float32, torch.float64, torch.float32, torch.float64]

    def check(on, sources, target, forward, backward=None):
        wholes = [numbers(n, dtype, torch.Generator().manual_seed(i)) for i, (n, dtype) in enumerate(zip(sizes, dtypes, strict=True))]
        xs = [place(whole, on, source, cut).requires_grad_() for whole, source, cut in zip(wholes, sources, itertools.cycle(["uneven", "even", "empty"]))]
        _C.reset_comm_counts()
        ys = st.redistribute(xs, [objects[p] for p in target], async_op=async_op)
        assert calls() == forward, (sources, target, calls())
        for y, whole in zip(ys, wholes, strict=True):
            assert y.placements == tuple(objects[p] for p in target)
            torch.testing.assert_close(y.detach().full_tensor(), whole)
        if backward is not None:
            _C.reset_comm_counts()
            torch.autograd.backward(ys, [y.detach() for y in ys])
            assert calls() == backward, (sources, target, calls())

    for _ in range(2):  # the first moves of a kind compare what the ranks know
        check(mesh, [["P"]] * 5, ["R"], {"all_reduce": 2}, {})
        check(mesh, [["P"]] * 5, ["S(0)"], {"reduce_scatter": sums}, {"all_gather": 1})
        check(mesh, [["S(0)"]] * 5, ["R"], {"all_gather": 1}, {})
        check(mesh, [["S(1)"]] * 5, ["R"], {"all_gather": 1}, {})
        check(mesh, [["S(0)"]] * 5, ["S(1)"], {"all_to_all": 1}, {"all_to_all": 1})
        check(mesh, [["R"]] * 5, ["S(1)"], {}, {"all_gather": 1})
        check(mesh, [["P"], ["S(0)"], ["R"], ["S(1)"], ["P"]], ["R"], {"all_reduce": 1, "all_gather": 1}, {})
        check(square, [["P", "S(0)"]] * 5, ["R", "R"], {"all_reduce": 2, "all_gather": 1})
        check(square, [["S(0)", "S(1)"]] * 5, ["R", "R"], {"all_to_all": 1})
        check(square, [["P", "S(0)"], ["R", "S(0)"], ["P", "R"], ["R", "S(1)"], ["P", "S(1)"]], ["R", "R"], {"all_reduce": 1, "all_gather": 1})
        part = mesh_of((2,))
        xs = [place(numbers(n, torch.float32, torch.Generator()), mesh, ["S(0)"], "even") for n in sizes]
        _C.reset_comm_counts()
        ys = st.redistribute(xs, [[st.Shard(d % 2)] for d in range(5)], part, async_op=async_op)
        assert calls().get("all_to_all", 0) <= 1 and len(calls()) <= 1, calls()  # a rank that keeps all it has sends nothing
        assert [y.placements for y in ys] == [(st.Shard(d % 2),) for d in range(5)]


@pytest.mark.parametrize("case", [as_one, as_one_later], ids=lambda f: f.__name__)
def test_as_one(pools, case):
    pools(4).run(case)


@on_ranks(2)
def test_large_ones_go_alone():
    mesh = mesh_of((dist.get_world_size(),))
    xs = [place(torch.ones(n), mesh, ["P"], "even") for n in (5, 2**19 + 1, 7)]
    st.redistribute(xs, [st.Replicate()])
    _C.reset_comm_counts()
    for y in st.redistribute(xs, [st.Replicate()]):
        torch.testing.assert_close(y.to_local(), torch.ones(y.shape))
    assert calls() == {"all_reduce": 2}


@on_ranks(2)
def test_arguments():
    """One for all or one for each; dtypes on the way; what the user gets wrong is named."""
    mesh = mesh_of((2,))
    xs = [place(torch.randn(n, 4), mesh, ["S(0)"], "uneven") for n in (6, 3)]
    assert st.redistribute([], [st.Replicate()]) == []
    a, b = st.redistribute(xs, [st.Shard(0)], sharding_shapes=[{0: [6, 0]}, None])
    assert a.local_sizes() == ((6, 4) if dist.get_rank() == 0 else (0, 4)) and b is xs[1]
    a, b = st.redistribute(xs, [(st.Shard(-1),), [st.Replicate()]])
    assert a.placements == (st.Shard(1),) and b.placements == (st.Replicate(),)
    leaf = xs[0].detach().requires_grad_()
    a, b = st.redistribute([leaf, xs[1]], [st.Replicate()], forward_dtype=torch.bfloat16, backward_dtype=torch.float32)
    assert a.dtype == b.dtype == torch.bfloat16 and a.requires_grad and not b.requires_grad
    a.float().sum().backward()
    assert leaf.grad.dtype == torch.float32 and leaf.grad._layout == leaf._layout
    a, b = st.redistribute(tuple(xs), [st.Replicate()], mesh)
    torch.testing.assert_close(a.to_local(), xs[0].full_tensor())
    with pytest.raises(TypeError, match="item 1 is a Tensor, not a ShardTensor"):
        st.redistribute([xs[0], torch.ones(2)], [st.Replicate()])
    with pytest.raises(ValueError, match="'placements' has 3 items for 2 tensors"):
        st.redistribute(xs, [[st.Replicate()]] * 3)
    with pytest.raises(IndexError, match="redistribute: tensor 1"):
        st.redistribute(xs, [[st.Replicate()], [st.Shard(2)]])
    mean = place(torch.ones(4), mesh, ["R"], "even")
    whole_numbers = _C.wrap(torch.ones(4, dtype=torch.int64), layout(mean._layout.mesh, AVG), [4], [1])
    with pytest.raises(TypeError, match="the mean of a tensor of dtype Long"):
        st.redistribute([mean, whole_numbers], [st.Replicate()])


@on_ranks(2)
def test_in_a_graph():
    mesh = mesh_of((2,))
    xs = [place(torch.randn(n, 4), mesh, ["S(0)"], "uneven") for n in (6, 3)]
    run = torch.compile(lambda a, b: [t * 2 for t in st.redistribute([a, b], [st.Replicate()])], backend="aot_eager", fullgraph=True)
    for got, x in zip(run(*xs), xs, strict=True):
        torch.testing.assert_close(got.to_local(), x.full_tensor() * 2)


def many_ranks():
    """More ranks than a few: equal pieces next to each other are one copy."""
    import test_redistribute as base

    n = dist.get_world_size()
    mesh = as_mesh(base.device_mesh((n,)))
    for sizes in ((2 * n + 3, 3 * n + 1), (3, 2 * n, 4)):
        whole = numbers(sizes, torch.float64, torch.Generator().manual_seed(0))
        uneven = [i % 2 for i in range(n - 1)]
        cut = layout(mesh, S1, cuts=[[*uneven, sizes[1] - sum(uneven)]])
        ends = [layout(mesh, S0), layout(mesh, S1), cut]
        for source, target in [*itertools.permutations(ends, 2), *((end, layout(mesh, R)) for end in ends)]:
            base.check_move(whole, source, target)
        for target in ends:
            x = summands(whole, layout(mesh, P))
            for y in _C.redistribute_all([x, x], [target, target]):
                close(y._local_tensor, put(whole, target)._local_tensor)
            close(_C.redistribute(x, target)._local_tensor, put(whole, target)._local_tensor)


def test_many_ranks():
    pool = Pool(18)
    try:
        pool.run(many_ranks)
    finally:
        pool.stop()
