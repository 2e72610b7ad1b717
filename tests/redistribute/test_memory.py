"""The memory rule: while a tensor moves, this rank holds what it had, what it gets, and one staging buffer at most."""

from __future__ import annotations

import math
import time

import pytest
import torch
import torch.distributed as dist
from oracle import EMPTY, EVEN, UNEVEN, mesh_id, mesh_of, place
from shardtensor import _C, Partial, Replicate, Shard
from shardtensor.tensor._mesh import as_mesh

WORLDS = [(2, (2,)), (3, (3,))]
SIZES = (120, 90, 60)
TABLES = 64 * 1024  # boxes on their way to a kernel, and the like: less than any piece

# From, to, and which buffers may be held besides the old and the new piece: for data sent, received, or summands.
NOTHING, ONE_WAY, RECEIVED, SUMMANDS, SENT_AND_SUMMANDS = "nothing", "one way", "received", "summands", "sent and summands"
CASES = {
    "gather": ("S(0)", "R", NOTHING),
    "gather_inner": ("S(1)", "R", RECEIVED),
    "recut": ("S(0)", "recut", NOTHING),
    "recut_inner": ("S(2)", "recut", ONE_WAY),
    "exchange": ("S(0)", "S(1)", ONE_WAY),
    "exchange_inner": ("S(2)", "S(1)", ONE_WAY),
    "reduce": ("P", "R", NOTHING),
    "reduce_scatter": ("P", "S(0)", SUMMANDS),  # with Gloo, every rank's summand of this rank's piece arrives
    "reduce_scatter_inner": ("P", "S(2)", SENT_AND_SUMMANDS),
    "slice": ("R", "S(1)", NOTHING),
}


def wait_until(true):
    end = time.monotonic() + 5
    while not true() and time.monotonic() < end:
        time.sleep(0.001)
    assert true()


def most_held(move):
    """The most bytes held at once besides those held before; what `move` returned; the bytes it sent."""
    most = math.inf
    _C.count_memory(True)
    try:
        start = _C.allocated_memory()[0]
        for _ in range(8):  # Gloo's threads free a buffer shortly after they report the end of a call
            result = None
            wait_until(lambda: _C.allocated_memory()[0] <= start)
            _C.reset_comm_counts()
            _C.reset_peak_memory()
            result = move()
            most = min(most, _C.allocated_memory()[1] - start)
    finally:
        _C.count_memory(False)
    return most, result, sum(sent for _, sent in _C.comm_counts().values())


def peak(shape, source, target, cut):
    """The most bytes held at once besides the old piece; the bytes of the old piece, of the new piece, and sent."""
    mesh = mesh_of(shape)
    n = mesh.size()
    g = torch.Generator().manual_seed(1)
    x = place(torch.randn(SIZES, generator=g), mesh, (source,), cut)
    shapes = None
    if target == "recut":
        to = x.placements
        size = SIZES[to[0].dim]
        other = [size - 2 * (n - 1), *[2] * (n - 1)]
        shapes = {0: [tuple(c if d == to[0].dim else s for d, s in enumerate(SIZES)) for c in other]}
    else:
        to = [Replicate() if target == "R" else Partial() if target == "P" else Shard(int(target[2:-1]))]
        if target.startswith("S") and cut != EVEN:
            size = SIZES[to[0].dim]
            shapes = {0: [tuple(c if d == to[0].dim else s for d, s in enumerate(SIZES)) for c in (size - n + 1, *[1] * (n - 1))]}
    most, y, sent = most_held(lambda: x.redistribute(placements=to, sharding_shapes=shapes))
    return most, x._local_tensor.nbytes, y._local_tensor.nbytes, sent, n


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cut", [EVEN, UNEVEN, EMPTY])
@pytest.mark.parametrize(("world", "shape"), WORLDS, ids=map(mesh_id, WORLDS))
def test_peak(pools, world, shape, cut, name):
    source, target, staging = CASES[name]
    results = pools(world).run(peak, shape, source, target, cut)
    ins = sum(result[3] for result in results)
    for rank, (most, held, got, sent, n) in enumerate(results):
        received = got - held if target == "R" else ins - sent if n == 2 else got
        allowed = {
            NOTHING: 0,
            ONE_WAY: max(sent, received),
            RECEIVED: received,
            SUMMANDS: n * got,
            SENT_AND_SUMMANDS: sent + n * got,
        }[staging]
        assert most <= got + allowed + TABLES, f"rank {rank}: held {most} bytes for a result of {got}, from {held}"
        if source != "R":
            assert most >= got, f"rank {rank}: {most} bytes cannot hold the result of {got}"


def boxes_peak():
    """Each rank gives up its rows and gets columns."""
    from test_exchange import exchange

    me, n = dist.get_rank(), dist.get_world_size()
    rows, columns = 600 // n, 900 // n
    held = [(r, [r * rows, 0], [rows, n * columns]) for r in range(n)]
    wanted = [(r, [0, r * columns], [n * rows, columns]) for r in range(n)]
    mine = torch.full((rows, n * columns), float(me))
    most, (got,), sent = most_held(lambda: exchange([mine], held, wanted))
    return most, got.nbytes, sent


@pytest.mark.parametrize("world", [2, 3])
def test_peak_of_boxes(pools, world):
    for most, got, sent in pools(world).run(boxes_peak):
        assert sent == got - got // world
        assert got <= most <= got + sent + TABLES


def counted(shape):
    _C.count_memory(True)
    try:
        _C.reset_peak_memory()
        start = _C.allocated_memory()[0]
        a = torch.empty(1 << 20, dtype=torch.uint8)
        b = torch.empty(1 << 20, dtype=torch.uint8)
        del a
        c = torch.empty(1 << 10, dtype=torch.uint8)
        now, most = _C.allocated_memory()
    finally:
        _C.count_memory(False)
    del b, c
    return now - start, most - start, _C.allocated_memory()[0] - start


def test_the_counter_counts(pools):
    now, most, end = pools(2).run(counted, (2,))[0]
    assert (now, most, end) == ((1 << 20) + (1 << 10), 2 << 20, 0)


def scattered(shape, dim):
    """The most bytes held besides rank 0's list of pieces and this rank's own piece, while rank 0 scatters."""
    mesh = mesh_of(shape)
    view = as_mesh(mesh)
    n = mesh.size()
    whole = torch.ones(SIZES)
    pieces = list(whole.split([SIZES[dim] - n + 1, *[1] * (n - 1)][::-1], dim))  # the last one is large
    mine = torch.zeros_like(pieces[mesh.get_local_rank()], memory_format=torch.contiguous_format)
    _C.count_memory(True)
    try:
        _C.reset_peak_memory()
        start = _C.allocated_memory()[0]
        _C.scatter(mine, pieces if mesh.get_local_rank() == 0 else [], view, 0, 0)
        most = _C.allocated_memory()[1] - start
    finally:
        _C.count_memory(False)
    assert mine.sum() == mine.numel()
    return most, sum(piece.nbytes for piece in pieces[1:])


@pytest.mark.parametrize("world", [2, 3])
def test_scatter(pools, world):
    for dim in (0, 1):
        for rank, (most, sent) in enumerate(pools(world).run(scattered, (world,), dim)):
            assert most <= (sent if rank == 0 and dim else 0) + TABLES
