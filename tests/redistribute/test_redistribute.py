"""From any layout to any other, on one mesh and from mesh to mesh: who sends what, without processes; then the real thing."""

from __future__ import annotations

import functools
import itertools
import math
import random
import threading

import pytest
import shardtensor as st
import torch
import torch.distributed as dist
from oracle import mesh_here, place
from pool import on_ranks
from shardtensor import _C, Partial, Replicate, Shard, ShardTensor, distribute_module, distribute_tensor
from shardtensor.tensor._mesh import as_mesh
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

R, S0, S1, S2 = (0, -1, 1, "sum", 2.0), (1, 0, 1, "sum", 2.0), (1, 1, 1, "sum", 2.0), (1, 2, 1, "sum", 2.0)
STRIDED0, STRIDED1 = (1, 0, 2, "sum", 2.0), (1, 1, 3, "sum", 2.0)


def partial(reduce="sum", order=2.0):
    return (2, -1, 1, reduce, order)


def mesh_of_ranks(shape, ranks=None, me=0):
    ranks = range(math.prod(shape)) if ranks is None else ranks
    return _C.Mesh("cpu", shape, ranks, [], [""] * len(shape), me)


def layout(mesh, *placements, cuts=()):
    return _C.Layout(mesh, placements, cuts)


def coordinates(mesh):
    return dict(zip(mesh.ranks, itertools.product(*map(range, mesh.shape)), strict=True))


@functools.cache
def indices(where, sizes, rank):
    """Where in the global tensor each element of a rank's piece is; None if the rank is outside the mesh."""
    coordinate = coordinates(where.mesh).get(rank)
    if coordinate is None:
        return None
    out = torch.arange(math.prod(sizes)).view(sizes)
    for d, n in enumerate(sizes):
        runs = where.intervals(d, n, coordinate)
        out = out.index_select(d, torch.cat([torch.arange(start, start + length) for start, length in runs]))
    return out


def lacking(source, target, sizes, rank):
    """The number of elements that a rank wants and does not hold. On any route it must receive them."""
    wanted, held = indices(target, sizes, rank), indices(source, sizes, rank)
    have = set() if held is None else set(held.flatten().tolist())
    return 0 if wanted is None else len(set(wanted.flatten().tolist()) - have)


def box(t, offsets, sizes):
    for d, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
        t = t.narrow(d, start, length)
    return t


def check_transfer(source, target, sizes):
    """Puts all ranks' parts together: each rank gets what it lacks, once, and ends with its own piece."""
    ranks = sorted({*source.mesh.ranks, *target.mesh.ranks})
    parts = {rank: _C.transfer_of(source, target, sizes, rank) for rank in ranks}
    mail = {}
    for rank, part in parts.items():
        pieces = [box(indices(source, sizes, rank), *b).flatten() for b in part["packed"]]
        flat = torch.cat([torch.empty(0, dtype=torch.int64), *pieces])
        assert [r for r, _ in part["sent"]] == sorted({r for r, _ in part["sent"]} - {rank})
        at = 0
        for to, numel in part["sent"]:
            assert numel > 0
            mail[rank, to] = flat[at : at + numel]
            at += numel
        assert at == len(flat)
    for rank, part in parts.items():
        wanted = indices(target, sizes, rank)
        assert [(r, n) for r, n in part["received"]] == [(a, len(m)) for (a, b), m in sorted(mail.items()) if b == rank]
        assert sum(n for _, n in part["received"]) == lacking(source, target, sizes, rank), (source, target, sizes, rank)
        if wanted is None:
            assert not part["unpacked"] and not part["kept"][1]
            continue
        got, at = torch.full_like(wanted, -1), 0
        arrived = torch.cat([torch.empty(0, dtype=torch.int64), *(mail[r, rank] for r, _ in part["received"])])
        for b in part["unpacked"]:
            place = box(got, *b)
            place.copy_(arrived[at : at + place.numel()].view(place.shape))
            at += place.numel()
        for a, b in zip(*part["kept"], strict=True):
            box(got, *b).copy_(box(indices(source, sizes, rank), *a))
        assert torch.equal(got, wanted), (source, target, sizes, rank)


def layouts(mesh, singles, sizes):
    """Every combination of placements. If the first mesh dim cuts, also with an uneven cut that may have empty pieces."""
    out = []
    for placements in itertools.product(singles, repeat=len(mesh.shape)):
        out.append(layout(mesh, *placements))
        kind, dim, factor, *_ = placements[0]
        nested = any(p[0] == 1 and p[1] == dim for p in placements[1:])
        if kind == 1 and factor == 1 and not nested:
            n = mesh.shape[0]
            cut = [0] * n
            cut[-1] = sizes[dim] - 1
            cut[0] += 1 if n > 1 else sizes[dim] - cut[0]
            out.append(layout(mesh, *placements, cuts=[cut] + [None] * (len(placements) - 1)))
    return out


# ---- who sends what, without processes ----


@pytest.mark.parametrize("shape,singles", [((3,), [R, S0, S1, STRIDED0, STRIDED1]), ((2, 2), [R, S0, S1, STRIDED0])], ids=str)
def test_every_pair_on_one_mesh(shape, singles):
    mesh, sizes = mesh_of_ranks(shape), (5, 4)
    for source, target in itertools.product(layouts(mesh, singles, sizes), repeat=2):
        check_transfer(source, target, sizes)


def test_every_pair_in_three_dims():
    mesh, sizes = mesh_of_ranks((2, 2, 2)), (5, 3)
    pairs = list(itertools.product(layouts(mesh, [R, S0, S1], sizes), repeat=2))
    for source, target in random.Random(1).sample(pairs, 250):
        check_transfer(source, target, sizes)


MESHES = {
    "row": mesh_of_ranks((4,)),
    "square": mesh_of_ranks((2, 2)),
    "reordered": mesh_of_ranks((2, 2), [3, 1, 0, 2]),
    "part": mesh_of_ranks((2,), [3, 1]),
    "elsewhere": mesh_of_ranks((3,), [4, 6, 5]),
    "larger": mesh_of_ranks((3, 2), [0, 5, 4, 2, 1, 3]),
    "one": mesh_of_ranks((1,), [2]),
    "three_dims": mesh_of_ranks((2, 1, 2)),
}


@pytest.mark.parametrize("before", MESHES)
def test_every_pair_of_meshes(before):
    sizes = (5, 4)
    a = layouts(MESHES[before], [R, S0, S1], sizes)
    for after in MESHES:
        b = layouts(MESHES[after], [R, S0, S1], sizes)
        pairs = list(itertools.product(a, b))
        for source, target in random.Random(before + after).sample(pairs, min(len(pairs), 40)):
            check_transfer(source, target, sizes)


@pytest.mark.parametrize("sizes", [(), (0, 4), (5, 0), (1, 1), (2, 3, 4)], ids=str)
def test_sizes(sizes):
    singles = [R, S0, S1, S2][: 1 + len(sizes)]
    for a, b in itertools.product(["square", "larger", "part"], repeat=2):
        for source, target in itertools.product(
            [layout(MESHES[a], *p) for p in itertools.product(singles, repeat=len(MESHES[a].shape))][:9],
            [layout(MESHES[b], *p) for p in itertools.product(singles, repeat=len(MESHES[b].shape))][:9],
        ):
            check_transfer(source, target, sizes)


def test_nested_cuts():
    mesh, sizes = mesh_of_ranks((2, 3)), (11, 2)
    cuts = [[None, None], [[3, 8], None], [None, [1, 0, 5, 2, 2, 1]], [[0, 11], [0, 0, 0, 4, 7, 0]], [[8, 3], [2, 5, 1, 3, 0, 0]]]
    nested = [layout(mesh, S0, S0, cuts=c) for c in cuts]
    nested += [layout(mesh, *p) for p in [(STRIDED0, S0), (R, S0), (S0, S1)]]
    for source, target in itertools.product(nested, repeat=2):
        check_transfer(source, target, sizes)


def test_summands_move_among_their_own():
    mesh, sizes = mesh_of_ranks((2, 2, 2)), (4, 3)
    source, target = layout(mesh, S0, partial(), S1), layout(mesh, S1, partial(), S0)
    for rank, (i, j, k) in coordinates(mesh).items():
        t = _C.transfer_of(source, target, sizes, rank)
        assert all(coordinates(mesh)[r][1] == j for r, _ in t["sent"] + t["received"])
        assert {r for r, _ in t["received"]} <= {r for r, c in coordinates(mesh).items() if c[1] == j and c != (i, j, k)}
        assert sum(n for _, n in t["received"]) == lacking(
            layout(mesh, S0, R, S1), layout(mesh, S1, R, S0), sizes, rank
        )


@pytest.mark.parametrize(
    "source,target",
    [
        (layout(mesh_of_ranks((2,)), R), layout(mesh_of_ranks((6,)), R)),
        (layout(mesh_of_ranks((2,)), R), layout(mesh_of_ranks((4,), [2, 3, 4, 5]), S0)),
        (layout(mesh_of_ranks((2, 2)), R, S0), layout(mesh_of_ranks((2, 2), [4, 5, 6, 7]), R, S0)),
        (layout(mesh_of_ranks((2, 2)), S0, R), layout(mesh_of_ranks((2, 2), [4, 5, 6, 7]), R, S0)),
        (layout(mesh_of_ranks((4,)), R), layout(mesh_of_ranks((4, 4), range(4, 20)), R, S0)),
        (layout(mesh_of_ranks((2, 4)), S0, R), layout(mesh_of_ranks((4, 4), range(8, 24)), R, S1)),
    ],
    ids=str,
)
def test_holders_of_a_copy_share_the_work(source, target):
    sent = [sum(n for _, n in _C.transfer_of(source, target, (16, 16), rank)["sent"]) for rank in source.mesh.ranks]
    assert min(sent) == max(sent), sent


def test_copies_come_from_the_own_row():
    mesh = mesh_of_ranks((3, 4))
    source, target = layout(mesh, R, S0), layout(mesh, R, S1)
    for rank, (i, _) in coordinates(mesh).items():
        assert {coordinates(mesh)[r][0] for r, _ in _C.transfer_of(source, target, (12, 12), rank)["received"]} == {i}


def test_messages_to_many():
    """Between meshes that share ranks, in another order too; some pieces are empty."""
    n, sizes = 24, (31, 3, 41)
    cuts = [[(i * k) % 3 for i in range(n - 1)] for k in (1, 2)]
    here, there, back = (mesh_of_ranks((n,), r) for r in (range(n), range(n // 2, n // 2 + n), range(n // 2 + n - 1, n // 2 - 1, -1)))
    grid = mesh_of_ranks((4, 6), range(6, 6 + n))
    cut = {d: [*cut, sizes[d] - sum(cut)] for d, cut in zip((0, 2), cuts, strict=True)}
    s2 = (1, 2, 1, "sum", 2.0)
    ends = [layout(mesh, s, cuts=[c]) for mesh in (there, back) for s in (S0, s2) for c in (None, cut[s[1]])]
    ends += [layout(grid, S0, s2), layout(grid, s2, s2)]
    for source in (layout(here, S0), layout(here, s2, cuts=[cut[2]])):
        for target in ends:
            check_transfer(source, target, sizes)
            check_transfer(target, source, sizes)


def test_a_rank_deals_with_few_of_many():
    big = mesh_of_ranks((64, 64))
    t = _C.transfer_of(layout(big, S0, S1), layout(big, S1, S0), (256, 256), 70)
    assert len(t["received"]) == 1 and t["received"][0][0] == 6 * 64 + 1
    small = _C.transfer_of(layout(big, S0, S0), layout(mesh_of_ranks((4096,)), S0), (4096 * 3 + 5,), 4000)
    assert len(small["sent"]) + len(small["received"]) <= 4


@pytest.mark.parametrize("shape", [(4,), (2, 2), (2, 3), (2, 2, 2)], ids=str)
def test_large_tensors_move_the_least(shape):
    """On the planner's routes too, each rank gets only what it lacks."""
    mesh, sizes = mesh_of_ranks(shape), (24, 12)
    all_layouts = [layout(mesh, *p) for p in itertools.product([R, S0, S1], repeat=len(shape))]
    for source, target in itertools.product(all_layouts, repeat=2):
        legs = _C.route(source, target, sizes, 1 << 14)
        for rank in mesh.ranks:
            got = sum(traffic[rank][1] for *_, traffic in legs)
            assert got == lacking(source, target, sizes, rank) << 14, (source, target, [leg[:2] for leg in legs])


def test_what_cannot_be_done_says_so():
    here, there = layout(mesh_of_ranks((1,)), S0), layout(_C.Mesh("cuda", [1], [0], [], [""], 0), S0)
    with pytest.raises(ValueError, match="another device type"):
        _C.redistribute(_C.wrap(torch.zeros(4), here, [4], [1]), there)
    pair, single = layout(mesh_of_ranks((2,)), S0), layout(mesh_of_ranks((1,)), R)
    with pytest.raises(RuntimeError, match="no default process group"):
        _C.redistribute(_C.wrap(torch.zeros(2), pair, [4], [1]), single)


# ---- with processes ----


_device_meshes = {}


def device_mesh(shape, ranks=None):
    """Made once, by all ranks in the same order."""
    ranks = tuple(range(math.prod(shape)) if ranks is None else ranks)
    if (shape, ranks) not in _device_meshes:
        _device_meshes[shape, ranks] = DeviceMesh("cpu", torch.tensor(ranks).view(shape))
    return _device_meshes[shape, ranks]


def put(whole, where):
    """The whole tensor under a layout, without communication."""
    piece = indices(where, tuple(whole.shape), dist.get_rank())
    local = whole.new_zeros(0 if whole.ndim else ()) if piece is None else whole.detach().flatten()[piece]
    return _C.wrap(local, where, list(whole.shape), list(whole.stride()))


def close(got, want):
    if got.element_size() == 1:  # eight-bit floats cannot be compared
        got, want = got.view(torch.uint8), want.view(torch.uint8)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def check_move(whole, source, target):
    """Values, gradients and bytes of one redistribution."""
    me, sizes = dist.get_rank(), tuple(whole.shape)
    x = put(whole, source)
    if whole.is_floating_point() and whole.element_size() > 1:
        x.requires_grad_()
    _C.reset_comm_counts()
    y = _C.redistribute(x, target)
    bytes_sent = sum(n for _, n in _C.comm_counts().values())
    legs = _C.route(source, target, list(sizes), whole.element_size())
    assert bytes_sent == sum(traffic.get(me, (0, 0))[0] for *_, traffic in legs), (source, target, _C.comm_counts())
    if all(kind == "transfer" for kind, *_ in legs):
        received = sum(traffic.get(me, (0, 0))[1] for *_, traffic in legs)
        assert received == lacking(source, target, sizes, me) * whole.element_size()
    close(y._local_tensor.detach(), put(whole, target)._local_tensor)
    assert y._layout == target and y.shape == whole.shape
    if x.requires_grad:
        seed = torch.linspace(-1, 1, whole.numel(), dtype=whole.dtype).view(sizes)
        (grad,) = torch.autograd.grad(y, x, put(seed, target))
        assert grad._layout == source
        close(grad._local_tensor, put(seed, source)._local_tensor)


def meshes_here():
    shapes = {
        2: [((2,), None), ((2,), [1, 0]), ((1,), [1])],
        3: [((3,), None), ((2,), [2, 0]), ((1,), [1])],
        4: [((4,), None), ((2, 2), None), ((2, 2), [3, 1, 0, 2]), ((2,), [3, 1]), ((3,), [0, 2, 3]), ((1,), [2]), ((2,), [0, 2])],
    }[dist.get_world_size()]
    return [as_mesh(device_mesh(shape, ranks)) for shape, ranks in shapes]


@pytest.mark.parametrize("world,seed", [(2, 0), (3, 0), (4, 0), (4, 1), (4, 2)])
@on_ranks()
def test_moves(seed):
    sizes = (5, 4)
    whole = torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    every = [where for mesh in meshes_here() for where in layouts(mesh, [R, S0, S1, STRIDED0], sizes)]
    for source, target in random.Random(seed).sample(list(itertools.product(every, repeat=2)), 40):
        check_move(whole, source, target)


@on_ranks(4)
def test_moves_at_once():
    """On one mesh, where one transfer is better than several collectives."""
    mesh = as_mesh(device_mesh((2, 2)))
    whole = torch.randn(128, 64, dtype=torch.float64)
    pairs = [((S0, S1), (S1, S0)), ((S0, S0), (S1, S1)), ((S1, S0), (S0, S0)), ((S0, STRIDED1), (S1, S1)), ((S0, S0), (R, S0))]
    for p, q in pairs:
        source, target = layout(mesh, *p), layout(mesh, *q)
        assert [leg[0] for leg in _C.route(source, target, list(whole.shape), 8)] == ["transfer"], (source, target)
        check_move(whole, source, target)
    uneven = layout(mesh, S0, S1, cuts=[[125, 3], [0, 64]])
    check_move(whole, uneven, layout(mesh, S1, S0))
    check_move(whole, uneven, layout(mesh, S0, S0, cuts=[[3, 125], [1, 2, 100, 25]]))

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@on_ranks(4)
def test_dtypes():
    square, part = as_mesh(device_mesh((2, 2))), as_mesh(device_mesh((2,), [3, 1]))
    for dtype in DTYPES:
        whole = (torch.arange(20).view(5, 4) % 7).to(dtype)
        check_move(whole, layout(square, S0, S1), layout(square, S1, S0))
        check_move(whole, layout(square, S0, S1), layout(part, S1))
        check_move(whole, layout(part, S0), layout(square, S0, R))


@on_ranks(4)
def test_summands_of_8_bits():
    mesh = device_mesh((2, 2))
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for rows in (5, 1):
            x = ShardTensor.from_local(torch.full((rows, 2), 0.5).to(dtype), mesh, [Partial(), Replicate()])
            got = x.redistribute(placements=[Shard(0), Replicate()])
            assert got.dtype == dtype
            assert torch.equal(got.to_local().float(), torch.ones(got.to_local().shape))


@on_ranks(4)
def test_locals_of_any_strides():
    mesh, part = as_mesh(device_mesh((2, 2))), as_mesh(device_mesh((2,), [0, 2]))
    whole = torch.randn(6, 8, dtype=torch.complex128)
    for target in (layout(mesh, S1, S0), layout(part, S1)):
        x = put(whole, layout(mesh, S0, S1))
        transposed = x._local_tensor.t().contiguous().t()
        close(_C.redistribute(_C.wrap(transposed, x._layout, [6, 8], [1, 6]), target)._local_tensor, put(whole, target)._local_tensor)
        conjugate = _C.wrap(x._local_tensor.conj(), x._layout, [6, 8], [8, 1])
        assert conjugate._local_tensor.is_conj()
        close(_C.redistribute(conjugate, target)._local_tensor, put(whole.conj().resolve_conj(), target)._local_tensor)
        rows = torch.randn(8).expand(6, 8).contiguous()
        expanded = _C.wrap(put(rows, x._layout)._local_tensor[:1].expand(3, 4), x._layout, [6, 8], [8, 1])
        close(_C.redistribute(expanded, target)._local_tensor, put(rows, target)._local_tensor)


@on_ranks(4)
def test_odd_sizes():
    square, part = as_mesh(device_mesh((2, 2))), as_mesh(device_mesh((2,), [3, 1]))
    for sizes in [(), (0, 4), (4, 0), (1, 1)]:
        whole = torch.randn(sizes)
        singles = [R, S0, S1][: 1 + len(sizes)]
        for a, b in itertools.product((square, part), repeat=2):
            for p, q in itertools.product(singles, repeat=2):
                check_move(whole, layout(a, *[p, R][: len(a.shape)]), layout(b, *[q, singles[-1]][: len(b.shape)]))


def summands(whole, where):
    """The whole under a layout with Partial: random summands, or copies if the reduction is not a sum."""
    coordinate = coordinates(where.mesh).get(dist.get_rank())
    kept = layout(where.mesh, *[R if p[0] == 2 else p for p in where.placements])
    if coordinate is None:
        return put(whole, where)
    value = whole.clone()
    for m, (kind, _, _, reduce, _) in enumerate(where.placements):
        if kind != 2:
            continue
        n, c = where.mesh.shape[m], coordinate[m]
        other = torch.arange(value.numel(), dtype=value.dtype).view(value.shape)
        if reduce == "sum":
            value = value - other * (n - 1) if c == 0 else other
        elif reduce == "avg":
            value = value + other * (n - 1) if c == 0 else value - other
        elif reduce == "max":
            value = value if c == n - 1 else value - other
        elif reduce == "min":
            value = value if c == n - 1 else value + other
    return _C.wrap(put(value, kept)._local_tensor, where, list(whole.shape), list(whole.stride()))


@on_ranks(4)
def test_from_summands():
    """Added up on the mesh where they are, scattered if that is cheaper, then moved."""
    whole = torch.arange(20.0, dtype=torch.float64).view(5, 4) / 4
    square = as_mesh(device_mesh((2, 2)))
    targets = [where for mesh in meshes_here() if mesh != square for where in layouts(mesh, [R, S0, S1], whole.shape)]
    generator = random.Random(3)
    for p in itertools.product([R, S0, partial(), partial("avg"), partial("max"), partial("min")], repeat=2):
        kinds = {q[3] for q in p if q[0] == 2}
        if not kinds or (len(kinds) > 1 and kinds != {"sum", "avg"}):
            continue
        source = layout(square, *p)
        for target in generator.sample(targets, 3):
            x = summands(whole, source).requires_grad_()
            y = _C.redistribute(x, target)
            torch.testing.assert_close(y._local_tensor.detach(), put(whole, target)._local_tensor)
            seed = torch.linspace(-1, 1, 20, dtype=whole.dtype).view(5, 4)
            (grad,) = torch.autograd.grad(y, x, put(seed, target))
            kept = layout(square, *[R if q[0] == 2 else q for q in p])
            assert grad._layout == kept
            close(grad._local_tensor, put(seed, kept)._local_tensor)


@on_ranks(4)
def test_scattered_before_it_moves():
    whole = torch.randn(64, 32, dtype=torch.float64)
    row, square = as_mesh(device_mesh((4,))), as_mesh(device_mesh((2, 2)))
    source, target = layout(row, partial()), layout(square, S0, S1)
    kinds = [leg[0] for leg in _C.route(source, target, [64, 32], 8)]
    assert kinds == ["reduce_scatter", "transfer"], kinds
    _C.reset_comm_counts()
    y = _C.redistribute(summands(whole, source), target)
    torch.testing.assert_close(y._local_tensor, put(whole, target)._local_tensor)
    counts = _C.comm_counts()
    assert counts["reduce_scatter"] == (1, 64 * 32 * 8 * 3 // 4)
    # Ranks 0 and 1 hold and want rows of the upper half, ranks 2 and 3 of the lower. Each keeps half of its columns.
    assert counts["all_to_all"][1] == 16 * 32 * 8 // 2

PADDED = {
    "sum": torch.float64, "product": torch.float32, "min": torch.float64, "max": torch.float32, "band": torch.int32,
    "bor": torch.uint8, "bxor": torch.int64,
}  # fmt: skip


@on_ranks(4)
def test_pieces_become_summands():
    """Padding with the neutral element makes a piece a summand and sends nothing. The way back gives the same tensor."""
    square, row = as_mesh(device_mesh((2, 2))), as_mesh(device_mesh((4,)))
    cases = list(PADDED.items())
    cases += [("max", torch.int8), ("min", torch.uint8), ("max", torch.bool), ("band", torch.bool), ("min", torch.bfloat16)]
    for reduce, dtype in cases:
        low = 0 if dtype in (torch.uint8, torch.bool) else -2
        whole = (torch.arange(20).view(5, 4) % 5 + low).to(dtype)
        for source, target in [
            (layout(row, S0), layout(row, partial(reduce))),
            (layout(row, S0, cuts=[[1, 0, 4, 0]]), layout(row, partial(reduce))),
            (layout(square, S1, S0), layout(square, S1, partial(reduce))),
            (layout(square, S0, S0), layout(square, S0, partial(reduce))),
            (layout(square, S0, STRIDED1), layout(square, S0, partial(reduce))),
        ]:
            _C.reset_comm_counts()
            y = _C.redistribute(put(whole, source), target)
            assert not _C.comm_counts(), (source, target)
            back = _C.redistribute(y, layout(target.mesh, *[R] * len(target.placements)))
            torch.testing.assert_close(back._local_tensor, whole)
    # These are gathered: an average would have to be scaled up, and for a norm all ranks must know whether a value is negative.
    whole = torch.linspace(-3, 3, 20).view(5, 4).half()
    y = _C.redistribute(put(whole, layout(row, S0)), layout(row, partial("avg")))
    close(y._local_tensor, whole)
    back = _C.redistribute(put(whole.abs(), layout(row, S0)), layout(row, partial("norm")))
    close(_C.redistribute(back, layout(row, R))._local_tensor, whole.abs())


@on_ranks(4)
def test_to_summands_elsewhere():
    row, part = as_mesh(device_mesh((4,))), as_mesh(device_mesh((2,), [3, 1]))
    whole = torch.arange(20.0).view(5, 4)
    for source, target in itertools.product([layout(row, S0), layout(row, partial())], [layout(part, partial())]):
        y = _C.redistribute(summands(whole, source), target)
        z = _C.redistribute(y, layout(part, R))
        torch.testing.assert_close(z._local_tensor, put(whole, layout(part, R))._local_tensor)
        again = _C.redistribute(y, layout(row, S1))
        torch.testing.assert_close(again._local_tensor, put(whole, layout(row, S1))._local_tensor)


@on_ranks(4)
def test_public_door():
    """redistribute(device_mesh=...): grow, shrink, move; forward and backward. Ranks outside have an empty piece."""
    me = dist.get_rank()
    all_ranks, part, other = device_mesh((4,)), device_mesh((2,), [3, 1]), device_mesh((2,), [0, 2])
    whole = torch.arange(20.0).view(5, 4)
    x = distribute_tensor(whole.clone().requires_grad_(), part, [Shard(-1)])
    assert x.shape == (5, 4) and x.requires_grad
    assert tuple(x.to_local().shape) == ((5, 2) if me in (1, 3) else (0,))
    y = x.redistribute(all_ranks, [Shard(0)])
    assert y.device_mesh is all_ranks and tuple(y.to_local().shape) == ([2, 2, 1, 0][me], 4)
    torch.testing.assert_close((y * 2).full_tensor(), whole * 2)
    z = y.redistribute(other, [Shard(0)], sharding_shapes={0: [(4, 4), (1, 4)]})
    assert tuple(z.to_local().shape) == {0: (4, 4), 2: (1, 4)}.get(me, (0,))
    # It keeps its sizes unless told otherwise.
    assert [(t._layout.is_even, tuple(t.shape)) for t in (z.redistribute(placements=[Shard(0)], sharding_shapes=s) for s in (None, "chunk"))] == [
        (False, (5, 4)),
        (True, (5, 4)),
    ]
    seed = distribute_tensor(whole + 1, other, [Replicate()])
    (grad,) = torch.autograd.grad(z, x, seed)
    assert grad.device_mesh is part
    if me in (1, 3):
        torch.testing.assert_close(grad.full_tensor(), whole + 1)
    # from_local where the rank is not in the mesh: the shape counts, the values do not.
    local = torch.full((2, 3), float(me), requires_grad=True)
    w = ShardTensor.from_local(local, part, [Shard(0)])
    assert w.shape == (4, 3) and w.to_local().numel() == (6 if me in (1, 3) else 0)
    moved = w.redistribute(all_ranks, [Replicate()])
    assert moved.to_local()[:, 0].tolist() == [3.0, 3.0, 1.0, 1.0]
    moved.sum().to_local().backward()
    assert local.grad.tolist() == [[1.0 if me in (1, 3) else 0.0] * 3] * 2
    # The same ranks in the same places, with groups of their own: nothing moves.

    twin = DeviceMesh("cpu", torch.arange(4))
    _C.reset_comm_counts()
    moved = y.redistribute(twin, [Shard(0)])
    assert not _C.comm_counts() and moved.device_mesh is twin
    assert all(len(x._layout.boxes([5, 4])) == (me in (1, 3)) for x in (x, grad))


@on_ranks(4)
def test_some_ranks_stand_aside():
    """Ranks outside a mesh run the same script: they have empty pieces, know the same sizes, and take part in moves."""
    inside = dist.get_rank() in (2, 0)
    all_ranks, some = device_mesh((4,)), device_mesh((2,), [2, 0])
    plain = torch.arange(42.0, dtype=torch.float64).view(7, 6).requires_grad_()
    whole = distribute_tensor(plain.detach().clone(), all_ranks, [Shard(0)]).requires_grad_()

    def loss(x):
        y = (x * 2 + 1).view(6, 7).transpose(0, 1)[1:, ::2]
        z = torch.cat([y, y.softmax(0)], 1).relu() @ torch.ones_like(y).sum(0, keepdim=True).t().expand(3, 2).repeat(2, 1)
        first, rest = z.split([2, 4])
        q = torch.zeros_like(z).copy_(z)
        q.add_(1)
        q[0] = 0
        values, _ = q.topk(1, dim=1)
        normed = nn.functional.layer_norm(q, (2,)).square().mean()
        return normed + first.logsumexp(0).sum() + nn.functional.linear(rest, rest[:1]).var() + values.sum()

    got, want = loss(whole.redistribute(some, [Shard(0)])), loss(plain)
    assert (got.shape, got.dtype, got.device_mesh) == (want.shape, want.dtype, some)
    got.backward()
    want.backward()
    torch.testing.assert_close(whole.grad.full_tensor(), plain.grad)
    torch.manual_seed(0)
    ours = nn.Linear(6, 3, dtype=torch.float64)
    theirs = nn.Linear(6, 3, dtype=torch.float64)
    theirs.load_state_dict(ours.state_dict())
    distribute_module(ours, some)
    for model, x in ((ours, whole.detach().redistribute(some, [Shard(0)])), (theirs, plain.detach())):
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1, foreach=foreach) for foreach in (True, False)]
        model(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    moved = ours.weight.detach().redistribute(all_ranks, [Replicate()])
    assert type(ours.weight.grad) is ShardTensor and ours.weight.grad.shape == (3, 6)
    torch.testing.assert_close(moved.to_local(), theirs.weight.detach())
    if not inside:
        with pytest.raises(NotImplementedError, match=r"is not in .*, so it has no value to return"):
            got.item()


@on_ranks(4)
def test_meshes_out_of_order():
    """A group sorts its ranks; a mesh need not. Coordinate 0 is the first rank of the mesh, not the lowest."""
    me = dist.get_rank()
    mesh = device_mesh((2, 2), [3, 1, 0, 2])
    whole = torch.arange(20.0).view(5, 4)
    mine = whole + 100 * me
    x = st.distribute_tensor(mine, mesh, [Shard(0), Replicate()])
    assert x.to_local().shape[0] == (3 if me in (3, 1) else 2)
    assert torch.equal(x.full_tensor(), whole + 300)
    assert torch.equal(st.distribute_tensor(mine, mesh, [Shard(1), Shard(0)], src_data_rank=1).full_tensor(), whole + 200)
    for placements in ([Shard(0), Shard(1)], [Shard(1), Shard(1)], [Replicate(), Shard(0)]):
        y = st.scatter_tensor(whole if me == 2 else None, 2, mesh, placements)
        assert torch.equal(y.full_tensor(), whole)
        assert torch.equal(y.redistribute(placements=[Shard(0), Shard(0)]).full_tensor(), whole)
    local = torch.full((me + 1, 2), float(me))
    rows = st.ShardTensor.from_local(local, device_mesh((4,), [3, 1, 0, 2]), [Shard(0)], sharding_shapes="infer")
    assert rows.full_tensor()[:, 0].tolist() == [3.0] * 4 + [1.0] * 2 + [0.0] + [2.0] * 3
    assert torch.equal(rows.sum(1).full_tensor(), rows.full_tensor().sum(1))


@on_ranks(4)
def test_explained():
    square, part = device_mesh((2, 2)), device_mesh((2,), [3, 1])
    x = put(torch.zeros(256, 64), st.tensor._layout.make_layout(square, [Shard(0), Shard(1)], 2, who="test"))
    _C.reset_comm_counts()
    said = x.explain([Shard(1), Shard(0)])
    assert not _C.comm_counts()
    (step,) = said.steps
    assert (step.kind, step.along, step.before, step.after) == ("transfer", "mesh", x._layout, said.target)
    piece = 256 * 64 * 4 // 4
    assert [said.received(r) for r in range(4)] == [lacking(x._layout, said.target, (256, 64), r) * 4 for r in range(4)]
    assert sum(said.sent(r) for r in range(4)) == sum(said.received(r) for r in range(4))
    text = str(said)
    assert "transfer" in text and "mesh" in text and "S(1) S(0)" in text and "KiB" in text
    same = st.explain((square, [Shard(0), Shard(1)], (256, 64), torch.float32), [Shard(1), Shard(0)])
    assert same == said
    gathered = x.explain([Replicate(), Shard(1)])
    assert [(s.kind, s.along, s.received[0]) for s in gathered.steps] == [("all_gather", 0, piece)]
    assert "nothing to do" in str(x.explain([Shard(0), Shard(1)]))
    away = x.explain([Shard(0)], part)
    assert [away.received(r) for r in range(4)] == [lacking(x._layout, away.target, (256, 64), r) * 4 for r in range(4)]
    assert [leg.kind for leg in away.steps] == ["transfer"]
    with pytest.raises(TypeError, match=r"plain torch\.Tensor"):
        st.explain(torch.zeros(3), [Shard(0)])


@on_ranks(2, seconds=20)
def test_a_plan_that_one_rank_lacks():
    """Ranks compare notes before the first move of a kind: of tensors of nine dims here. All must know alike that it is the first."""
    x, y = (place(torch.ones(6, 2, *[1] * n), mesh_here(), ("S(0)",), [1, 5]) for n in (0, 7))
    x.full_tensor()
    got = []
    move = lambda: got.append(y.full_tensor().sum())  # noqa: E731
    if dist.get_rank() == 1:  # a thread has plans of its own; others are dropped when much has been found since
        thread = threading.Thread(target=move)
        thread.start()
        thread.join()
    else:
        move()
    assert got == [12]
