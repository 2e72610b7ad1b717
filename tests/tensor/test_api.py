"""The public API, on ranks: making ShardTensors, reading them, changing layouts, and what users expect of a tensor."""

from __future__ import annotations

import copy
import itertools
import os
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import shardtensor as st
import torch
import torch.distributed as dist
from oracle import cut_sizes, make, mesh_id, mesh_of, place, whole
from pool import Pool, on_ranks
from shardtensor import Partial, Replicate, Shard, ShardTensor, distribute_module, distribute_tensor, init_device_mesh, scatter_tensor, zeros
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import distribute_tensor as stock_distribute

SHAPES = [(2,), (3,), (2, 2)]
MESHES = [(2, (2,)), (3, (3,)), (4, (2, 2))]


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def numbers(*sizes):
    return make(sizes, torch.Generator().manual_seed(3))


# ---- from_local ----


@on_ranks(*SHAPES)
def test_from_local(shape):
    mesh = mesh_of(shape)
    n, me = mesh.size(0), mesh.get_local_rank(0)
    rest = [Replicate()] * (mesh.ndim - 1)
    for run_check in (False, True):
        x = ShardTensor.from_local(torch.full((2, 3), float(me)), mesh, [Shard(0), *rest], run_check=run_check)
        assert x.shape == (2 * n, 3) and x._layout.is_even and x.offsets() == (2 * me, 0)
        assert x.full_tensor()[:, 0].tolist() == [float(i) for i in range(n) for _ in range(2)]

        # Cut as torch.chunk does, with empty pieces at the end.
        for mode in (None, "chunk"):
            mine = torch.arange(4.0).chunk(n)
            mine = mine[me] if me < len(mine) else torch.empty(0)
            x = ShardTensor.from_local(mine, mesh, [Shard(0), *rest], shape=(4,), sharding_shapes=mode, run_check=run_check)
            assert x.full_tensor().tolist() == [0.0, 1.0, 2.0, 3.0]

        # Uneven: sizes inferred, or given.
        mine = torch.full((3, me), float(me))
        shapes = {0: [(3, i) for i in range(n)]}
        for mode in ("infer", shapes, {-mesh.ndim: shapes[0]}):
            x = ShardTensor.from_local(mine, mesh, [Shard(-1), *rest], sharding_shapes=mode, run_check=run_check)
            assert x.shape == (3, n * (n - 1) // 2) and x.placements[0] == Shard(1)
            assert x.offsets(0) == me * (me - 1) // 2
            assert x.full_tensor()[0].tolist() == [float(i) for i in range(n) for _ in range(i)]
            assert x._spec.sharding_shapes()[0] == tuple(torch.Size((3, i)) for i in range(n))

        x = ShardTensor.from_local(torch.ones(2), mesh, [Partial(), *rest], run_check=run_check)
        assert x.full_tensor().tolist() == [n, n]
        x = ShardTensor.from_local(torch.ones(2), mesh, run_check=run_check)
        assert all(isinstance(p, Replicate) for p in x.placements)
    assert x.device_mesh is mesh
    assert isinstance(x, st.DTensor) and isinstance(x, torch.distributed.tensor.DTensor) and isinstance(x, torch.Tensor)


@on_ranks((2, 2))
def test_from_local_nested(shape):
    mesh = mesh_of(shape)
    a, b = mesh.get_coordinate()
    sizes = [[4, 1], [0, 3]]
    start = sum(sizes[0]) * a + sizes[a][0] * b
    mine = torch.arange(start, start + sizes[a][b])
    x = ShardTensor.from_local(mine, mesh, [Shard(0), Shard(0)], sharding_shapes="infer")
    assert x._layout.cuts == [[5, 3], [4, 1, 0, 3]]
    assert x.full_tensor().tolist() == list(range(8))
    assert x._spec.sharding_shapes() == {0: ((5,), (3,)), 1: tuple((s,) for s in sizes[a])}
    # Two tensor dims, uneven both.
    rows, columns = [1, 3], [0, 2]
    grid = torch.arange(8).view(4, 2)
    mine = grid.split(rows)[a].split(columns, dim=1)[b]
    x = ShardTensor.from_local(mine, mesh, [Shard(0), Shard(1)], sharding_shapes="infer")
    assert x._layout.cuts == [rows, columns]
    assert x.full_tensor().equal(grid)


@on_ranks((2,), (3,))
def test_from_local_gradient(shape):
    mesh = mesh_of(shape)
    n, me = mesh.size(), mesh.get_rank()
    weights = torch.arange(1.0, n + 1)
    mine = torch.ones(1, requires_grad=True)
    whole_row = ShardTensor.from_local(mine, mesh, [Shard(0)])
    (whole_row * ShardTensor.from_local(weights, mesh)).sum().backward()
    assert mine.grad.tolist() == [me + 1]
    # The gradient of a summand is that of the sum.
    mine = torch.ones(n, requires_grad=True)
    (ShardTensor.from_local(mine, mesh, [Partial()]) * ShardTensor.from_local(weights, mesh)).sum().backward()
    assert mine.grad.tolist() == weights.tolist()
    # grad_placements=[Replicate()]: every rank gets the whole gradient.
    mine = torch.ones(n, requires_grad=True)
    x = ShardTensor.from_local(mine, mesh, [Replicate()], grad_placements=[Replicate()])
    (x * ShardTensor.from_local(weights, mesh)).sum().backward()
    assert mine.grad.tolist() == weights.tolist()


# ---- to_local, full_tensor ----


@on_ranks((2,), (3,))
def test_to_local(shape):
    mesh = mesh_of(shape)
    n, me = mesh.size(), mesh.get_rank()
    x = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]).requires_grad_()
    piece = x.to_local()
    assert type(piece) is torch.Tensor and piece.numel() == len(range(5)[: x._local_tensor.numel()])
    (piece * (me + 1)).sum().backward()
    want = torch.cat([torch.full_like(c, i + 1.0) for i, c in enumerate(torch.arange(5.0).chunk(n))])
    assert type(x.grad) is ShardTensor and x.grad.placements == x.placements
    assert x.grad.full_tensor().equal(want)
    # grad_placements=[Partial()]: each rank's gradient is a summand.
    x = distribute_tensor(torch.ones(3), mesh, [Replicate()]).requires_grad_()
    (x.to_local(grad_placements=[Partial()]) * (me + 1.0)).sum().backward()
    assert x.grad.full_tensor().tolist() == [n * (n + 1) / 2] * 3
    # Without grad, to_local() is a new tensor on the piece's memory.
    x = x.detach()
    assert x.to_local().data_ptr() == x._local_tensor.data_ptr()
    x.to_local().unsqueeze_(0)
    assert x.to_local().ndim == x._local_tensor.ndim == 1
    # full_tensor is differentiable.
    x = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]).requires_grad_()
    (x.full_tensor() * torch.arange(5.0)).sum().backward()
    assert x.grad.full_tensor().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


# ---- redistribute ----


def layouts_for(shape, sizes):
    """Yields (placements as text, cut kind), nested cuts too."""
    single = ["R", "P", *(f"S({d})" for d in range(len(sizes)))]
    for combo in itertools.product(single, repeat=len(shape)):
        sharded = [c for c in combo if c.startswith("S")]
        nested = len(set(sharded)) < len(sharded)
        for kind in ("even", "uneven", "empty") if sharded and not nested else ("even",):
            yield combo, kind


def shapes_of(combo, kind, shape, sizes):
    """sharding_shapes for redistribute: None where even."""
    out = {}
    for m, text in enumerate(combo):
        if text.startswith("S") and kind != "even":
            dim = int(text[2:-1])
            out[m] = [[s if d == dim else n for d, n in enumerate(sizes)] for s in cut_sizes(sizes[dim], shape[m], kind)]
    return out or None


def redistribute(shape, seed, limit):
    mesh = mesh_of(shape)
    sizes = (5, 4)
    value, c, v = numbers(*sizes), numbers(*sizes) + 3, numbers(*sizes) - 1
    pairs = [(a, b) for a in layouts_for(shape, sizes) for b in layouts_for(shape, sizes) if "P" not in b[0]]
    if len(pairs) > limit:
        pairs = random.Random(seed).sample(pairs, limit)
    everywhere = ("R",) * len(shape)
    for (before, cut), (after, new_cut) in pairs:
        what = f"{before} {cut} -> {after} {new_cut}"
        x = place(value, mesh, before, cut).requires_grad_()
        placements = [Replicate() if t == "R" else Shard(int(t[2:-1])) for t in after]
        y = x.redistribute(placements=placements, sharding_shapes=shapes_of(after, new_cut, shape, sizes))
        assert y.placements == tuple(placements), what
        if new_cut == "even" and cut == "even":
            assert y._layout.is_even, what
        close(whole(y), value)
        loss = (y * y * place(c, mesh, everywhere, "even")).sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        assert not grad._layout.has_partial, what
        close(whole(grad), 2 * c * value)
        (second,) = torch.autograd.grad((grad * place(v, mesh, everywhere, "even")).sum(), x)
        close(whole(second), 2 * c * v)
    return len(pairs)


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
def test_redistribute(pools, mesh):
    assert pools(mesh[0]).run(redistribute, mesh[1], 0, 80)[0] > 30


@on_ranks((2, 2))
def test_redistribute_nested(shape):
    mesh = mesh_of(shape)
    value = numbers(8, 3)
    targets = [
        ([Shard(0), Shard(0)], {0: [(5, 3), (3, 3)]}),
        ([Shard(0), Shard(0)], {0: [(4, 3), (4, 3)], 1: [(1, 3), (3, 3)]}),
        ([Shard(0), Shard(0)], {0: [(0, 3), (8, 3)]}),
        ([Shard(0), Shard(1)], {0: [(1, 3), (7, 3)], 1: [(7, 0), (7, 3)]}),
        ([Shard(0), Shard(0)], None),
        ([Replicate(), Shard(0)], {1: [(7, 3), (1, 3)]}),
    ]
    for (_, first), (_, second) in itertools.product(enumerate(targets), repeat=2):
        x = place(value, mesh, ("R", "R"), "even").redistribute(placements=first[0], sharding_shapes=first[1])
        close(whole(x), value)
        close(whole(x.redistribute(placements=second[0], sharding_shapes=second[1])), value)
    # redistribute accepts what the layout reports.
    x = place(value, mesh, ("R", "R"), "even").redistribute(placements=targets[0][0], sharding_shapes=targets[1][1])
    again = x.redistribute(placements=[Replicate()] * 2).redistribute(
        placements=x.placements, sharding_shapes=x._spec.sharding_shapes()
    )
    assert again._layout == x._layout


@on_ranks((2, 2))
def test_redistribute_keeps_cuts(shape):
    mesh = mesh_of(shape)
    x = place(numbers(6, 4), mesh, ("S(0)", "R"), "uneven")
    assert x.redistribute(placements=[Shard(0), Replicate()]) is x
    assert x.redistribute(placements=[Shard(0), Shard(1)])._layout.cuts == [x._layout.cuts[0], None]
    assert x.redistribute(placements=[Shard(-2), Replicate()]) is x
    assert x.redistribute(placements=[Replicate(), Shard(0)])._layout.is_even


@on_ranks(*SHAPES)
def test_redistribute_dtypes(shape):
    mesh = mesh_of(shape)
    rest = ("R",) * (mesh.ndim - 1)
    x = place(numbers(5, 4), mesh, ("S(0)", *rest), "uneven").requires_grad_()
    y = x.redistribute(placements=[Replicate()] * mesh.ndim, forward_dtype=torch.float32)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert x.grad.dtype == torch.float64 and whole(x.grad).eq(1).all()
    # The backward casts too: thirds come back with float32 precision.
    x.grad = None
    y = x.redistribute(placements=[Shard(1)] + [Replicate()] * (mesh.ndim - 1), backward_dtype=torch.float32)
    assert y.dtype == torch.float64 and torch.equal(whole(y), numbers(5, 4))
    (y / 3).sum().backward()
    third = torch.tensor(1 / 3)
    assert x.grad.dtype == torch.float64 and third.double() != 1 / 3
    assert whole(x.grad).eq(third.double()).all()


@on_ranks((2,), (3,))
def test_partials(shape):
    mesh = mesh_of(shape)
    n, me = mesh.size(), mesh.get_rank()
    every = torch.stack([numbers(5) + i for i in range(n)])
    for op, want in {
        "sum": every.sum(0),
        "avg": every.mean(0),
        "product": every.prod(0),
        "min": every.amin(0),
        "max": every.amax(0),
    }.items():
        x = ShardTensor.from_local(every[me], mesh, [Partial(op)])
        assert x.placements == (Partial(op),)
        close(x.full_tensor(), want)
        close(whole(x.redistribute(placements=[Shard(0)])), want)
        close(whole(x.redistribute(placements=[Shard(0)], sharding_shapes={0: [(5,), *[(0,)] * (n - 1)]})), want)
        close(whole(x.redistribute(placements=[Replicate()])), want)


# ---- distribute_tensor, scatter_tensor ----


@on_ranks(*SHAPES)
def test_distribute_tensor(shape):
    mesh = mesh_of(shape)
    n, me = mesh.size(), mesh.get_rank()
    rest = [Replicate()] * (mesh.ndim - 1)
    first = mesh.size(0)
    mine = numbers(5, 4) + me
    for source in (0, 1, None):
        x = distribute_tensor(mine, mesh, [Replicate(), *rest], src_data_rank=source)
        if source is None:
            close(x.to_local(), mine)
        else:
            close(x.full_tensor(), numbers(5, 4) + mesh.mesh[(source,) * mesh.ndim].item())
    same = numbers(5, 4)
    for placements in ([Shard(0), *rest], [Shard(-1), *rest], [Partial(), *rest], [Partial("avg"), *rest], None):
        x = distribute_tensor(same, mesh, placements)
        assert type(x) is ShardTensor and x.is_leaf and x.dtype == torch.float64
        close(whole(x), same)
    shapes = {0: [(5, 0)] * (first - 1) + [(5, 4)]}
    x = distribute_tensor(same.requires_grad_(), mesh, [Shard(1), *rest], sharding_shapes=shapes)
    assert x.requires_grad and x.is_leaf and x._spec.sharding_shapes()[0] == tuple(torch.Size(s) for s in shapes[0])
    close(whole(x), same.detach())
    # A tensor that is distributed already is left alone.
    assert distribute_tensor(x, mesh, [Shard(1), *rest]) is x
    # The piece does not keep the whole alive, and does not share the user's memory.
    plain = torch.zeros(4)
    distribute_tensor(plain, mesh, [Replicate(), *rest], src_data_rank=None).add_(1)
    assert plain.sum() == 0
    x = distribute_tensor(torch.zeros(100 * n), mesh, [Shard(0), *rest])
    assert x.to_local().untyped_storage().nbytes() <= 4 * 100 * n // first
    # Strides are the input's.
    x = distribute_tensor(numbers(5, 4).t(), mesh, [Shard(0), *rest], src_data_rank=None)
    close(whole(x), numbers(5, 4).t())
    # A meta tensor has no values to send.
    x = distribute_tensor(torch.empty(5, 4, device="meta"), mesh, [Shard(0), *rest])
    assert x.is_meta and x.shape == (5, 4)


@on_ranks(*SHAPES)
def test_scatter_tensor(shape):
    mesh = mesh_of(shape)
    me = mesh.get_rank()
    value = numbers(7, 3)
    two = mesh.ndim == 2
    every = [[Shard(0)], [Shard(1)], [Replicate()]]
    if two:
        every = [[a, b] for (a,), (b,) in itertools.product(every, repeat=2)]
    for source in range(mesh.size()):
        for placements in every:
            x = scatter_tensor(value if me == source else None, source, mesh, placements, requires_grad=True)
            assert x.requires_grad and x.dtype == torch.float64
            close(whole(x), value)
        cut = [0, 7, *[0] * (mesh.size(0) - 2)]
        rest = [Shard(1)] if two else []
        shapes = {0: [(s, 3) for s in cut]}
        x = scatter_tensor(value.int() if me == source else None, source, mesh, [Shard(0), *rest], sharding_shapes=shapes)
        assert x._layout.cuts[0] == cut
        close(whole(x), value.int())


# ---- distribute_module ----


@on_ranks(*SHAPES)
def test_distribute_module(shape):
    mesh = mesh_of(shape)
    rest = [Replicate()] * (mesh.ndim - 1)
    plain = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    plain.register_buffer("steps", torch.arange(3))
    value = numbers(2, 4)
    want = plain(value)
    seen = []

    def partition(name, part, where):
        seen.append(name)
        if name == "0":
            for key, dim in (("weight", 0), ("bias", 0)):
                p = distribute_tensor(getattr(part, key).data, where, [Shard(dim), *rest])
                part.register_parameter(key, nn.Parameter(p))

    def enter(m, inputs, where):
        return (distribute_tensor(inputs[0], where),)

    def leave(m, outputs, where):
        return outputs.full_tensor()

    out = distribute_module(plain, mesh, partition, enter, leave)
    assert out is plain and seen == ["", "0", "1", "2"]
    assert all(type(p) is ShardTensor and isinstance(p, nn.Parameter) for p in plain.parameters())
    assert plain[0].weight.placements[0] == Shard(0) and plain[2].weight.placements[0] == Replicate()
    assert type(plain.steps) is ShardTensor
    close(plain(value), want)


# ---- factories ----


@on_ranks(*SHAPES)
def test_factories(shape):
    mesh = mesh_of(shape)
    n = mesh.size(0)
    rest = [Replicate()] * (mesh.ndim - 1)
    where = {"device_mesh": mesh, "placements": [Shard(0), *rest]}
    for made, want in (
        (st.zeros(5, 3, **where), torch.zeros(5, 3)),
        (st.zeros((5, 3), **where), torch.zeros(5, 3)),
        (st.ones(torch.Size([5]), dtype=torch.int32, **where), torch.ones(5, dtype=torch.int32)),
        (st.full((5, 2), 1.5, **where), torch.full((5, 2), 1.5)),
        (st.full(5, 2, **where), torch.full((5,), 2)),
        (st.linspace(0, 1, 7, dtype=torch.float64, **where), torch.linspace(0, 1, 7, dtype=torch.float64)),
        (st.logspace(0, 1, 7, base=2.0, **where), torch.logspace(0, 1, 7, base=2.0)),
    ):
        assert made.dtype == want.dtype and made.stride() == want.stride()
        assert whole(made).equal(want)
    assert st.empty(5, 3, **where).shape == (5, 3)
    assert st.zeros(5, requires_grad=True, **where).requires_grad
    uneven = {0: [(0,)] * (n - 1) + [(7,)]}
    x = st.linspace(0, 6, 7, sharding_shapes=uneven, **where)
    assert whole(x).equal(torch.linspace(0, 6, 7)) and x._layout.cuts[0] == [0] * (n - 1) + [7]
    assert st.zeros(3, device_mesh=mesh).placements == (Replicate(),) * mesh.ndim


@on_ranks(*SHAPES)
def test_current_mesh(shape):
    world = dist.get_world_size()
    x = st.zeros(5, placements=[Shard(0)])
    assert x.device_mesh.mesh.tolist() == list(range(world))
    assert ShardTensor.from_local(torch.ones(1), placements=[Shard(0)]).sum().item() == world
    assert st.zeros(5).device_mesh is x.device_mesh
    mesh = mesh_of(shape)
    with mesh:
        assert st.ones(3).device_mesh is mesh
        assert st.distribute_tensor(torch.ones(3)).device_mesh is mesh


@on_ranks((2, 2))
def test_submesh(shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))
    x = zeros(5, device_mesh=mesh["b"], placements=[Shard(0)])
    assert x.device_mesh == mesh["b"] and x.device_mesh._get_root_mesh() is mesh  # nothing else keeps mesh["b"] alive
    assert x.full_tensor().shape == (5,)
    del mesh
    assert (x + 1).full_tensor().tolist() == [1.0] * 5
    assert x.device_mesh.get_group().size() == 2


@on_ranks((2,), (3,))
def test_outside(shape):
    """As in torch: on a rank outside the mesh a number's piece is a number, 0; other pieces are empty."""
    mesh = DeviceMesh("cpu", [1])
    there = dist.get_rank() == 1
    x = distribute_tensor(numbers(5, 4), mesh, [Shard(0)]).requires_grad_()
    numbers_of = (x.sum(), x.mean(), x.max(), x[1, 2], torch.linalg.vector_norm(x), x.sum() * 2 + 1, torch.stack(x.unbind(0)).sum())
    for number in (*numbers_of, nn.functional.mse_loss(x, x + 1)):
        piece = number.to_local()
        assert number.shape == () and piece.shape == () and piece.dtype == x.dtype
        assert there or piece.item() == 0
        assert number.redistribute(placements=[Replicate()]).to_local().shape == () and number.full_tensor().shape == ()
    assert x.sum(0).to_local().shape == ((4,) if there else (0,))
    (x.sum() * 2).full_tensor().backward()
    assert x.grad.shape == x.shape and (not there or x.grad.to_local().eq(2).all())
    far = x.detach().sum().redistribute(DeviceMesh("cpu", [0]), [Replicate()])
    assert far.shape == () and (dist.get_rank() or far.to_local() == numbers(5, 4).sum())


@on_ranks(*SHAPES)
def test_grad_of_leaf(shape):
    """torch.autograd.grad returns a leaf's gradient as .grad would have it: in the leaf's cuts."""
    mesh = mesh_of(shape)
    rest = ("R",) * (mesh.ndim - 1)
    value = numbers(5, 4)
    for cut in ("even", "uneven"):
        for placements in (("S(0)", *rest), ("S(1)", *rest), ("S(0)", "S(1)")[: mesh.ndim], ("S(0)", "S(0)")[: mesh.ndim]):
            leaf = place(value, mesh, placements, "even" if placements == ("S(0)", "S(0)") else cut).requires_grad_()
            for cotangent in [("P", *rest), ("R", *rest), ("S(1)", *rest), ("P", "S(1)")[: mesh.ndim], ("P", "P")[: mesh.ndim]]:
                for create_graph in (False, True):
                    weights = place(value + 1, mesh, cotangent, "even")
                    weights = weights.requires_grad_() if create_graph else weights
                    (grad,) = torch.autograd.grad(leaf * 2, leaf, weights, create_graph=create_graph)
                    stays = all(b.is_shard() for a, b in zip(leaf.placements, weights.placements, strict=True) if a.is_shard())
                    kept = weights if stays else leaf  # a cotangent that is cut wherever the leaf is gives a gradient that is cut so
                    assert all(not a.is_shard() or a == b for a, b in zip(kept.placements, grad.placements, strict=True)), grad
                    close(whole(grad), 2 * (value + 1))
                    if create_graph:
                        assert grad.requires_grad
                        grad.sum().backward(inputs=[weights])
                        close(whole(weights.grad), torch.full_like(value, 2))
            weights = place(value + 1, mesh, ("P", *rest), "even")
            out = leaf * 2
            inner, none = torch.autograd.grad(out.sum() * 0 + (out * weights).sum(), [leaf, torch.ones(1, requires_grad=True)], allow_unused=True)
            assert none is None and all(not a.is_shard() or a == b for a, b in zip(leaf.placements, inner.placements, strict=True))
    plain = torch.ones(3, requires_grad=True)
    assert type(torch.autograd.grad(plain.sum(), plain)[0]) is torch.Tensor


@on_ranks(*SHAPES)
def test_wrapper_subclass(shape):
    """Each tensor in a wrapper is sent: ranks have other values before."""
    from torch.testing._internal.two_tensor import TwoTensor

    mesh = mesh_of(shape)
    rest = [st.Replicate()] * (mesh.ndim - 1)
    rank, value = dist.get_rank(), numbers(5, 4)
    for made in (TwoTensor(value + rank, value * 2 - rank), TwoTensor(TwoTensor(value + rank, value), value * 2 - rank)):
        for placement in (st.Shard(0), st.Shard(1), st.Replicate()):
            t = st.distribute_tensor(made, mesh, [placement, *rest])
            a, b = value, value * 2
            if placement.is_shard():
                at = mesh.get_coordinate()[0]
                cuts = [[*x.chunk(mesh.size(0), placement.dim), x.narrow(placement.dim, 0, 0)] for x in (a, b)]
                a, b = (cut[min(at, len(cut) - 1)] for cut in cuts)
            piece = t.to_local()
            assert type(piece) is TwoTensor and t.shape == made.shape
            inner = piece.a.a if isinstance(piece.a, TwoTensor) else piece.a
            assert inner.equal(a) and piece.b.equal(b), (placement, rank)
            assert (t + 1).to_local().b.equal(b + 1)


@on_ranks((2,))
def test_local_tensor_mode(shape):
    from torch.distributed._local_tensor import LocalTensorMode

    mesh = mesh_of(shape)
    with LocalTensorMode(mesh.size()), pytest.raises(NotImplementedError, match="simulates all ranks in one process"):
        st.distribute_tensor(torch.ones(4), torch.distributed.device_mesh.DeviceMesh("cpu", torch.arange(mesh.size())), [st.Shard(0)])
    assert st.distribute_tensor(torch.ones(4), mesh, [st.Replicate()] * mesh.ndim).full_tensor().eq(1).all()


# ---- beside stock DTensors ----


@on_ranks(*SHAPES)
def test_stock_dtensors(shape):
    mesh = mesh_of(shape)
    rest = [Replicate()] * (mesh.ndim - 1)
    value = numbers(5, 4)
    theirs = stock_distribute(value, mesh, [Shard(0), *rest]).requires_grad_()
    ours = ShardTensor.from_dtensor(theirs)
    assert type(ours) is ShardTensor and ours.placements == theirs.placements
    close(whole(ours), value)
    (ours * 2).sum().backward()
    assert type(theirs.grad) is DTensor and theirs.grad.full_tensor().eq(2).all()
    assert ShardTensor.from_dtensor(ours) is ours
    back = ours.to_dtensor()
    assert type(back) is DTensor and back.placements == theirs.placements
    close(back.full_tensor(), value)
    leaf = place(value, mesh, ("S(0)",) + ("R",) * (mesh.ndim - 1), "even").requires_grad_()
    (leaf.to_dtensor() * 3).sum().full_tensor().backward()
    assert whole(leaf.grad).eq(3).all()
    with pytest.raises(RuntimeError, match="uneven cuts, which torch's DTensor cannot describe"):
        place(value, mesh, ("S(0)",) + ("R",) * (mesh.ndim - 1), "uneven").to_dtensor()


# ---- autograd and modules ----


@on_ranks(*SHAPES)
def test_autograd(shape):
    mesh = mesh_of(shape)
    rest = ("R",) * (mesh.ndim - 1)
    x = place(numbers(5, 4), mesh, ("S(0)", *rest), "uneven").requires_grad_()
    assert x.is_leaf and x.grad is None
    hooked, accumulated = [], []
    x.register_hook(lambda g: hooked.append(type(g)))
    x.register_post_accumulate_grad_hook(lambda t: accumulated.append(t is x))
    y = (x * x).sum()
    assert y._layout.has_partial and not y.is_leaf  # the summands are not added up yet
    y.backward(retain_graph=True)
    assert hooked == [ShardTensor] and accumulated == [True]
    assert type(x.grad) is ShardTensor
    close(whole(x.grad), 2 * numbers(5, 4))
    y.backward()
    close(whole(x.grad), 4 * numbers(5, 4))
    x.grad = None
    y = x * 3
    y.backward(place(torch.ones(5, 4, dtype=torch.float64), mesh, ("R",) * mesh.ndim, "even"))
    assert whole(x.grad).eq(3).all()
    x.grad.zero_()
    assert whole(x.grad).eq(0).all()
    assert type(x.detach()) is ShardTensor and not x.detach().requires_grad
    with torch.no_grad():
        assert not (x * 2).requires_grad
    # .data reads and writes the same pieces.
    x.data.fill_(7)
    assert whole(x).eq(7).all()
    x.data = place(numbers(5, 4), mesh, ("S(1)", *rest), "even")
    assert x.placements[0].dim == 1 and x.requires_grad
    close(whole(x), numbers(5, 4))


@on_ranks(*SHAPES)
def test_parameters(shape):
    mesh = mesh_of(shape)
    rest = ("R",) * (mesh.ndim - 1)
    p = nn.Parameter(place(numbers(5, 4), mesh, ("S(0)", *rest), "uneven"))
    assert isinstance(p, nn.Parameter) and type(p) is ShardTensor and p.requires_grad and p.is_leaf
    holder = nn.Module()
    holder.p = p
    assert dict(holder.named_parameters()) == {"p": p}
    holder.to(torch.float32)
    assert holder.p.dtype == torch.float32 and isinstance(holder.p, nn.Parameter)
    assert holder.p._layout.cuts == p._layout.cuts
    torch.testing.assert_close(whole(holder.p), numbers(5, 4).float())
    holder.p.requires_grad_(False)
    assert not holder.p.requires_grad
    holder.half()
    assert holder.p.dtype == torch.float16
    state = holder.state_dict()
    assert type(state["p"]) is ShardTensor
    holder.load_state_dict({"p": place(torch.ones(5, 4).half(), mesh, ("R",) * mesh.ndim, "even")})
    assert whole(holder.p).eq(1).all() and holder.p.placements[0].is_shard()


# ---- values ----


@on_ranks(*SHAPES)
def test_values(shape):
    mesh = mesh_of(shape)
    rest = ("R",) * (mesh.ndim - 1)
    value = numbers(5, 4)
    cut = place(value, mesh, ("S(0)", *rest), "uneven")
    same = place(value, mesh, ("R",) * mesh.ndim, "even")
    total = cut.sum()
    assert abs(total.item() - value.sum().item()) < 1e-9
    assert abs(float(total) - value.sum().item()) < 1e-9
    assert f"{total:.3f}" == f"{value.sum():.3f}"
    assert bool((total - total) == 0)
    assert same.tolist() == value.tolist()
    assert (same.numpy() == value.numpy()).all()

    assert (numpy.asarray(same) == value.numpy()).all()
    assert (numpy.array(same, dtype=numpy.float32) == value.float().numpy()).all()
    assert torch.from_dlpack(same).equal(value)
    for read in (lambda: cut.numpy(), lambda: cut.tolist(), lambda: numpy.asarray(cut), lambda: torch.from_dlpack(cut)):
        with pytest.raises(RuntimeError, match="this rank holds a piece"):
            read()
    with pytest.raises(RuntimeError, match="requires grad"):
        same.clone().requires_grad_().numpy()
    for call in (
        lambda: cut.data_ptr(),
        lambda: cut.share_memory_(),
        lambda: cut.resize_(3),
        lambda: cut.set_(torch.zeros(3)),
        lambda: cut.pin_memory(),
    ):
        with pytest.raises(RuntimeError, match="has no memory of its own"):
            call()
    assert repr(cut).startswith("ShardTensor(local_tensor=tensor(") and "shape=(5, 4)" in repr(cut)
    assert "grad_fn=<Mul" in repr(cut.requires_grad_() * 2) and "requires_grad=True" in repr(cut)
    assert f"{cut}".startswith("ShardTensor(")
    assert cut.device == torch.device("cpu") and cut.layout == torch.strided and cut.numel() == 20
    assert cut.untyped_storage().nbytes() == 160
    assert len(cut) == 5 and cut.size(1) == 4 and cut.ndim == 2 and cut.stride() == (4, 1)


@on_ranks(*SHAPES)
def test_one_storage(shape):
    """The storage is made on first request, one for all users of the tensor, even if many threads ask at once."""
    x = ShardTensor.from_local(torch.ones(3, 2), mesh_of(shape))

    def storage(t):
        return t.untyped_storage()._cdata

    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch._C.TensorBase.data_ptr(x * 2)
    y = x * 2
    assert storage(y.detach()) == storage(y.data) == storage(y.view(6)[1:]) == storage(y) != storage(x * 2)
    assert y.untyped_storage().nbytes() == (x * 2).t_().untyped_storage().nbytes() == 24
    y.data = other = x * 3
    assert storage(y) == storage(other)
    with torch.inference_mode():
        y = x * 2
        assert storage(y[1:]) == storage(y)
    with ThreadPoolExecutor(8) as threads:
        for _ in range(50):
            assert len(set(threads.map(storage, [x * 2] * 16))) == 1


@on_ranks(*SHAPES)
def test_made_from_another(shape):
    """torch's old `new` makes of sizes what new_empty does, a ShardTensor of these sizes. Data belongs to no mesh."""
    x = ShardTensor.from_local(torch.ones(3, 2, dtype=torch.float64), mesh_of(shape), [Shard(0), *[Shard(1)] * (len(shape) - 1)])
    for made, sizes in (
        (x.new(5, 4), (5, 4)),
        (x.new(torch.Size([5, 4])), (5, 4)),
        (x.new(torch.Size([])), ()),
        (x.new(), (0,)),
    ):
        assert type(made) is ShardTensor and made.shape == sizes and made.dtype == torch.float64
        assert made._layout == x.new_empty(sizes)._layout
    for made in (x.new_tensor([1.0, 2.0]), x.new([1.0, 2.0])):
        assert type(made) is torch.Tensor and made.tolist() == [1.0, 2.0] and made.dtype == torch.float64
    assert x.new(((1, 2),)).tolist() == [[1.0, 2.0]]


# ---- process groups come and go ----


def again():
    """Two process groups with the same name, one after the other."""
    for _ in range(2):
        rank, world = dist.get_rank(), dist.get_world_size()
        mesh = st.init_device_mesh("cpu", (world,))
        x = st.distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
        assert x.full_tensor().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert st.zeros(3, placements=[Shard(0)]).full_tensor().tolist() == [0.0] * 3
        store = [tempfile.mktemp(prefix="shardtensor-test-")]
        dist.broadcast_object_list(store)
        del mesh
        dist.destroy_process_group()
        with pytest.raises(RuntimeError):
            x.full_tensor()
        dist.init_process_group("gloo", init_method=f"file://{store[0]}", rank=rank, world_size=world)
        assert x.full_tensor().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]  # the new group is found by its name
    return os.getpid()


def test_process_group_destroyed_and_made_anew():
    pool = Pool(2)
    try:
        assert len(set(pool.run(again))) == 2
    finally:
        pool.stop()


@on_ranks(*SHAPES)
def test_inference(shape):
    """Views of a normal tensor stay normal under inference mode, as in torch; computed results are inference tensors."""
    torch.manual_seed(0)
    mesh = mesh_of(shape)
    value = torch.randn(5, 4, dtype=torch.float64)
    for placement in ("R", "S(0)", "S(1)"):
        placements = (placement,) + ("R",) * (len(shape) - 1)
        x, plain = place(value.clone(), mesh, placements, "uneven"), value.clone()
        with torch.inference_mode():
            for f in (torch.t, lambda t: t[1:3], lambda t: t.view(5, 2, 2), lambda t: t.detach(), lambda t: t * 2, lambda t: t.t() * 2):
                got, want = f(x), f(plain)
                assert got.is_inference() == want.is_inference()
                assert torch.equal(whole(got), whole(want))
            y, z = x * 2, plain * 2
            y.t().add_(1)
            z.t().add_(1)
            assert torch.equal(whole(y), z)
            x.t().mul_(3)
            plain.t().mul_(3)
        assert torch.equal(whole(x), plain)
    module = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 3)).double()
    ours = st.distribute_module(copy.deepcopy(module), mesh)
    with torch.inference_mode():
        close(whole(ours(place(value, mesh, ("S(0)",) + ("R",) * (len(shape) - 1), "uneven"))), module(value))
