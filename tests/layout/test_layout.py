"""Layouts alone: which rank holds what, for all ranks at once, without processes."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from shardtensor import _C
from shardtensor.tensor._layout import fitting_cuts, make_layout, placements_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

R = (0, -1, 1, "sum", 2.0)
P = (2, -1, 1, "sum", 2.0)


def S(dim, split_factor=1):
    return (1, dim, split_factor, "sum", 2.0)


def mesh_of(*shape, rank=0):
    return _C.Mesh("cpu", shape, range(math.prod(shape)), [], [""] * len(shape), rank)


def coordinates(mesh):
    return list(itertools.product(*(range(n) for n in mesh.shape)))


def layout(shape, placements, cuts=(), rank=0):
    return _C.Layout(mesh_of(*shape, rank=rank), placements, cuts)


# ---- one cut ----

# pieces, size, sizes of the pieces: torch.chunk's, with empty ones where chunk gives fewer
EVEN = [(2, 4, [2, 2]), (2, 5, [3, 2]), (3, 4, [2, 2, 0]), (4, 6, [2, 2, 2, 0]), (4, 1, [1, 0, 0, 0]), (3, 0, [0, 0, 0])]


@pytest.mark.parametrize(("pieces", "size", "want"), EVEN)
def test_even_is_chunk(pieces, size, want):
    l = layout((pieces,), [S(0)])
    assert [l.local_sizes([size], [c])[0] for c in range(pieces)] == want
    chunks = torch.arange(size).chunk(pieces) if size else []
    assert [c.numel() for c in chunks] == [n for n in want if n]


# cut, and (offset, size) of what each coordinate holds of a dim of size sum(cut)
EXPLICIT = [
    ([1, 3], [(0, 1), (1, 3)]),
    ([0, 4], [(0, 0), (0, 4)]),
    ([4, 0], [(0, 4), (4, 0)]),
    ([2, 0, 5], [(0, 2), (2, 0), (2, 5)]),
    ([1, 3, 2], [(0, 1), (1, 3), (4, 2)]),
]


@pytest.mark.parametrize(("cut", "want"), EXPLICIT)
def test_explicit(cut, want):
    l = layout((len(cut),), [S(0)], [cut])
    assert [l.intervals(0, sum(cut), [c])[0] for c in range(len(cut))] == want
    assert l.misfit([sum(cut)]) == ""
    assert "add up" in l.misfit([sum(cut) + 1])


# (size, share, per) of each piece and (times, up, shift, down) of each quotient; a size, and what the pieces are then
FOLLOWING = [
    ([(0, 1, 1), (0, 0, 1)], 4, [4, 0]),
    ([(3, 1, 2), (-3, 1, 2)], 9, [6, 3]),
    ([(0, 1, 6), (0, 4, 6), (0, 1, 6)], 12, [2, 8, 2]),
    ([(2, 0, 1), (-2, 1, 1)], 5, [2, 3]),
    ([(0, 0, 1, 2, 1, 4, 6), (0, 0, 1, 2, 1, 4, 6), (0, 1, 1, -4, 1, 4, 6)], 14, [6, 6, 2]),
    ([(-1, 0, 1, 1, 1, 2, 2, 0, 2, 1, 3), (0, 0, 1, -1, 1, 2, 2, 1, 2, 1, 3), (1, 1, 1, 0, 1, 2, 2, -1, 2, 1, 3)], 8, [4, 0, 4]),
]


@pytest.mark.parametrize(("cut", "size", "want"), FOLLOWING)
def test_cuts_that_follow_the_size(cut, size, want):
    l = layout((len(cut),), [S(0)], [cut])
    assert l.follows_sizes and l.cuts == [cut] and l is not layout((len(cut),), [S(0)], [want])
    assert [l.local_sizes([size], [c])[0] for c in range(len(cut))] == want
    starts = [sum(want[:c]) for c in range(len(cut))]
    assert [l.intervals(0, size, [c]) for c in range(len(cut))] == [[pair] for pair in zip(starts, want, strict=True)]
    assert l.settled([size]).id == layout((len(cut),), [S(0)], [want]).id
    assert l.misfit([size]) == ""


EVEN_CHUNKS = [
    [(0, 1, 2), (0, 1, 2)],
    [(1, 1, 2), (-1, 1, 2)],
    [(2, 1, 3), (2, 1, 3), (-4, 1, 3)],
    [(0, 0, 1, 1, 1, 1, 2), (0, 1, 1, -1, 1, 1, 2)],
]


@pytest.mark.parametrize("cut", EVEN_CHUNKS)
def test_chunks_that_follow_the_size_are_even(cut):
    assert layout((len(cut),), [S(0)], [cut]).is_even


def test_cuts_of_symbols_follow_the_size():
    """In the units of `FOLLOWING`, for all sizes."""
    from shardtensor.tensor._compile import shares_of
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    env = ShapeEnv()
    n, m = (env.create_unspecified_symint_and_symbol(v, ConstantSource(s), DimDynamic.DYNAMIC) for v, s in ((25, "n"), (9, "m")))
    full = (n + 2) // 3
    for pieces, size in (
        ([full, full, n - 2 * full], n),
        ([full + 1, full, n - 2 * full], n + 1),
        ([2 * full, 2 * full, 2 * n - 4 * full], 2 * n),
        ([(n + 5) // 3 - 1, full, n + 1 - full - (n + 5) // 3], n),
        ([n // 2, n - n // 2], n),
    ):
        found = shares_of(pieces, size)
        assert found is not None
        sizes, shares, per, times, quotients = found
        k = len(quotients)
        cut = [(sizes[i], shares[i], per, *(x for j in range(k) for x in (times[i * k + j], *quotients[j]))) for i in range(len(pieces))]
        l = layout((len(cut),), [S(0)], [cut])
        for number in range(9, 30):
            want = [int(p.node.expr.subs(n.node.expr, number)) for p in pieces]
            total = int(size.node.expr.subs(n.node.expr, number))
            assert [l.local_sizes([total], [c])[0] for c in range(len(cut))] == want
        assert l.is_even == (pieces[0] is full)
    assert shares_of([n * m // 2, n - n * m // 2], n) is None


def test_nested_rows():
    # The outer cut is 5 + 3; each side is cut differently by the inner mesh dim.
    l = layout((2, 2), [S(0), S(0)], [[5, 3], [4, 1, 0, 3]])
    assert [l.intervals(0, 8, c) for c in coordinates(l.mesh)] == [[(0, 4)], [(4, 1)], [(5, 0)], [(5, 3)]]
    assert l.misfit([8]) == ""
    assert "add up" in layout((2, 2), [S(0), S(0)], [[5, 3], [4, 1, 0, 2]]).misfit([8])


def test_one_row_holds_for_all():
    once = layout((2, 2), [S(0), S(0)], [None, [1, 3]])
    assert once == layout((2, 2), [S(0), S(0)], [None, [1, 3, 1, 3]])


def test_strided():
    # _StridedShard(0, split_factor=2) on 2 ranks: each rank holds half of each half.
    l = layout((2,), [S(0, 2)])
    assert l.intervals(0, 8, [0]) == [(0, 2), (4, 2)]
    assert l.intervals(0, 8, [1]) == [(2, 2), (6, 2)]
    assert l.boxes([8, 3], [1]) == [([2, 0], [2, 3]), ([6, 0], [2, 3])]


def test_rank_outside_the_mesh():
    mesh = _C.Mesh("cpu", [2], [4, 5], [], [""], 0)
    assert not mesh.has_this_rank
    assert _C.Mesh("cpu", [2], [4, 5], [], [""], 5).coordinate == [1]


# ---- all ranks together ----


def random_cuts(rng, mesh, placements, sizes):
    """Random explicit cuts that fit. About one mesh dim in three gets None."""
    cuts = [None] * len(placements)
    for m, p in enumerate(placements):
        if p[0] != 1 or p[2] != 1 or rng.random() < 0.3:
            continue
        outer = [i for i in range(m) if placements[i] == p]
        so_far = _C.Layout(mesh, [q if i < m else R for i, q in enumerate(placements)], [*cuts[:m], *[None] * (len(cuts) - m)])
        cut = []
        for prefix in itertools.product(*(range(mesh.shape[i]) for i in outer)):
            at = [0] * len(placements)
            for i, c in zip(outer, prefix, strict=True):
                at[i] = c
            extent = so_far.local_sizes(sizes, at)[p[1]]
            marks = sorted(rng.randint(0, extent) for _ in range(mesh.shape[m] - 1))
            cut += [b - a for a, b in itertools.pairwise([0, *marks, extent])]
        cuts[m] = cut
    return cuts


@pytest.mark.parametrize("shape", [(2,), (3,), (5,), (2, 2), (2, 3), (3, 2, 2)], ids=str)
def test_boxes_tile_the_tensor(shape):
    rng = random.Random(str(shape))
    for sizes in ([7], [1, 4], [5, 6, 3]):
        for _ in range(12):
            placements = [rng.choice([R, *(S(d) for d in range(len(sizes)))]) for _ in shape]
            mesh = mesh_of(*shape)
            l = _C.Layout(mesh, placements, random_cuts(rng, mesh, placements, sizes))
            assert l.misfit(sizes) == ""
            copies = math.prod(n for n, p in zip(shape, placements, strict=True) if p == R)
            held = torch.zeros(sizes, dtype=torch.int64)
            for c in coordinates(mesh):
                boxes = l.boxes(sizes, c)
                for offsets, extents in boxes:
                    held[tuple(slice(o, o + n) for o, n in zip(offsets, extents, strict=True))] += 1
                assert sum(math.prod(n) for _, n in boxes) == math.prod(l.local_sizes(sizes, c))
            assert (held == copies).all(), (l, sizes)


# ---- interning ----


def test_equal_layouts_are_one_object():
    a, b = layout((2, 3), [S(0), P]), layout((2, 3), [S(0), P])
    assert a == b and a.id == b.id and hash(a) == hash(b)
    assert a != layout((2, 3), [S(1), P])
    assert a != layout((2, 3), [S(0), (2, -1, 1, "max", 2.0)])
    assert a != layout((3, 2), [S(0), P])
    assert a != layout((2, 3), [S(0), P], rank=1)  # another rank's view


def test_dropped_layouts_do_not_come_back():
    first = layout((2,), [S(3)], [[1, 9]]).id
    assert layout((2,), [S(3)], [[1, 9]]).id != first


def test_explicit_sizes_that_are_even_become_even():
    assert layout((2,), [S(0)], [[3, 2]]) == layout((2,), [S(0)])
    assert layout((3,), [S(0)], [[2, 2, 0]]) == layout((3,), [S(0)])
    assert not layout((2,), [S(0)], [[2, 3]]).is_even
    assert layout((2, 2), [S(0), S(0)], [[2, 3], [1, 1, 2, 1]]).cuts == [[2, 3], None]


def test_facts():
    l = layout((2, 2), [S(1), P])
    assert (l.is_sharded, l.is_replicated, l.has_partial, l.is_even) == (True, False, True, True)
    assert layout((2, 2), [R, R]).is_replicated
    assert repr(layout((2,), [S(0)], [[1, 2]])) == "S(0)[1,2] on cpu mesh (2)"


# ---- what is refused ----


@pytest.mark.parametrize(
    ("placements", "cuts", "says"),
    [
        ([S(0)], [], "1 given for a mesh of 2 dims"),
        ([S(0), R], [[1, 2, 3]], "mesh dim 0 needs 2 sizes, got 3"),
        ([S(0), R], [[-1, 4]], "negative size -1"),
        ([R, R], [[1, 3]], "its placement is R"),
        ([S(0, 3), R], [[1, 3]], "mesh dim 0 needs 3 sizes, got 2"),
        ([S(64), R], [], "must name a dim"),
    ],
)
def test_refused(placements, cuts, says):
    with pytest.raises(ValueError, match=says):
        layout((2, 2), placements, cuts)


def test_misfit_names_what_does_not_fit():
    assert layout((2,), [S(2)]).misfit([4, 4]) == "mesh dim 0 shards tensor dim 2 of a tensor with 2 dims"


# ---- many ranks ----


def test_sixteen_thousand_ranks():
    mesh = mesh_of(128, 128)
    l = _C.Layout(mesh, [S(0), S(1)], [[i % 3 for i in range(128)], None])
    sizes = [sum(i % 3 for i in range(128)), 1000]
    assert sum(math.prod(l.local_sizes(sizes, c)) for c in coordinates(mesh)) == math.prod(sizes)
    cut = [i % 5 for i in range(16384)]
    flat = _C.Layout(mesh_of(16384), [S(0)], [cut])
    assert flat.intervals(0, sum(cut), [16383]) == [(sum(cut[:-1]), cut[-1])]
    assert flat.misfit([sum(cut)]) == ""


# ---- torch says the same ----


def device_mesh(shape, rank):
    ranks = torch.arange(math.prod(shape)).view(shape)
    return DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2), (2, 3)], ids=str)
def test_as_torch_cuts(shape):
    options = [Replicate(), Shard(0), Shard(1), Partial()]
    for placements in itertools.product(options, repeat=len(shape)):
        for sizes in ([4, 6], [5, 7], [1, 3]):
            for rank in range(math.prod(shape)):
                mesh = device_mesh(shape, rank)
                ours = make_layout(mesh, placements, 2, who="test")
                local, offset = _compute_local_shape_and_global_offset(
                    tuple(sizes), mesh.shape, lambda m, mesh=mesh: mesh.get_coordinate()[m], placements
                )
                assert ours.local_sizes(sizes) == list(local)
                starts = [ours.intervals(d, n)[0][0] for d, n in enumerate(sizes)]
                empty = math.prod(local) == 0
                assert empty or starts == list(offset), (placements, sizes, rank)


@pytest.mark.parametrize("factor", [2, 3, 4])
@pytest.mark.parametrize("pieces", [2, 3])
def test_as_torch_strides(pieces, factor):
    strided = _StridedShard(0, split_factor=factor)
    for size in (12, 13, 7, 3):
        whole = torch.arange(size)
        split, _ = strided._split_tensor(whole, pieces, with_padding=False, contiguous=True)
        for rank, want in enumerate(split):
            runs = make_layout(device_mesh((pieces,), rank), [strided], 1, who="test").intervals(0, size)
            assert torch.cat([whole[a : a + n] for a, n in runs]).tolist() == want.tolist(), (size, rank)


@pytest.mark.parametrize("outer", [[5, 2], [2, 5], [0, 7], [3, 1, 0, 9]], ids=str)
@pytest.mark.parametrize("pieces", [2, 3])
def test_uneven_strides_are_pieces_of_pieces(pieces, outer):
    """FSDP chunks each piece of an unevenly cut tensor, on the mesh of (FSDP, tensor parallelism)."""
    n, size = len(outer), sum(outer)
    nothing = [torch.arange(0)] * pieces
    chunked = [[*run.chunk(pieces), *nothing][:pieces] for run in torch.arange(size).split(outer)]
    rows = [len(chunked[t][f]) for f in range(pieces) for t in range(n)]
    for f, t in itertools.product(range(pieces), range(n)):
        l = _C.Layout(mesh_of(pieces, n), [S(0, n), S(0)], [outer, rows])
        assert l.misfit([size]) == ""
        assert l.misfit([size + 1]) != ""
        held = [i for start, length in l.intervals(0, size, [f, t]) for i in range(start, start + length)]
        assert held == chunked[t][f].tolist()
        assert l.local_sizes([size], [f, t]) == [len(held)]


# ---- placements and cuts in Python ----


def test_placements_are_torchs_own():
    mesh = device_mesh((2, 2), 3)
    placements = (_StridedShard(0, split_factor=2), Partial("max"))
    assert placements_of(make_layout(mesh, placements, 2, who="test")) == placements
    assert placements_of(make_layout(mesh, [Shard(-1), Replicate()], 3, who="test")) == (Shard(2), Replicate())
    assert make_layout(mesh, None, 3, who="test").is_replicated


def test_summands_of_two_kinds_are_refused():
    mesh = device_mesh((2, 2), 3)
    for kinds in itertools.product(("sum", "avg", "product", "min", "max"), repeat=2):
        placements = tuple(Partial(kind) for kind in kinds)
        if kinds[0] == kinds[1] or set(kinds) == {"sum", "avg"}:
            assert placements_of(make_layout(mesh, placements, 2, who="test")) == placements
        else:
            with pytest.raises(ValueError, match=rf"P\({kinds[0]}\) on mesh dim 0 and P\({kinds[1]}\) on mesh dim 1.*rank 3"):
                make_layout(mesh, placements, 2, who="test")


def test_fitting_cuts_follow_the_nesting():
    l = layout((2, 2), [S(0), S(0)], [[1, 3], [1, 0, 1, 2]])
    assert fitting_cuts(l, [S(0), S(0)]) == l.cuts
    assert fitting_cuts(l, [S(0), S(1)]) == [[1, 3], None]
    assert fitting_cuts(l, [S(1), S(0)]) == [None, None]  # the inner cut was of the outer cut's rows
    l = layout((2, 2), [S(0), S(1)], [[1, 3], [0, 4]])
    assert fitting_cuts(l, [R, S(1)]) == [None, [0, 4]]
