"""The sizes of the pieces: `sharding_shapes` as shapes or as sizes along the cut dim, and what a tensor says of its own."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import shardtensor as st
import torch
import torch.distributed as dist
from oracle import mesh_of, place
from pool import on_ranks
from shardtensor import _C, LocalShardsWrapper, Partial, Replicate, Shard, ShardTensor, distribute_tensor, empty, zeros
from shardtensor.experimental import local_map
from shardtensor.parallel import PrepareModuleInput, parallelize_module
from shardtensor.tensor._layout import check_cuts, cuts_from_shapes, sharding_shapes_of
from test_api import layouts_for, numbers
from test_layout import R, S, coordinates, random_cuts
from test_layout import mesh_of as layout_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import _StridedShard

# ---- sharding_shapes() is what sharding_shapes= takes ----


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2), (2, 3), (3, 2, 2)], ids=str)
def test_layouts_come_back(shape):
    """Layouts alone, for all ranks at once: the shapes give the same layout on each of them."""
    rng = random.Random(str(shape))
    for sizes, _ in itertools.product(([7], [1, 4], [5, 6, 3], [0, 3]), range(12)):
        placements = [rng.choice([R, *(S(d) for d in range(len(sizes)))]) for _ in shape]
        cuts = random_cuts(rng, layout_mesh(*shape), placements, sizes)
        for rank, at in enumerate(coordinates(layout_mesh(*shape))):
            mesh = layout_mesh(*shape, rank=rank)
            layout, even = _C.Layout(mesh, placements, cuts), _C.Layout(mesh, placements)
            shapes = sharding_shapes_of(layout, sizes, who="test")
            assert shapes.keys() == {m for m, p in enumerate(placements) if p != R}
            lengths = {m: [along[placements[m][1]] for along in entries] for m, entries in shapes.items()}
            for given in (shapes, lengths, {m - len(shape): entries for m, entries in lengths.items()}):
                again = cuts_from_shapes(even, given, len(sizes), who="test")
                assert _C.Layout(mesh, placements, again) == layout, (layout, sizes, given)
                check_cuts(layout, again, sizes, who="test")
            for m, entries in shapes.items():  # a rank's own entry, along mesh dims that share their tensor dim with no other
                if placements.count(placements[m]) == 1:
                    assert list(entries[at[m]]) == layout.local_sizes(sizes)


@on_ranks((2,), (3,), (2, 2))
def test_accessors(shape):
    """On ranks: pieces have the sizes that all ranks tell of them, nothing is sent, and every function takes what a tensor says."""
    mesh, value = mesh_of(shape), numbers(5, 4)
    for combo, cut in layouts_for(shape, (5, 4)):
        x = place(value, mesh, combo, cut)
        _C.reset_comm_counts()
        shapes, mine = x.sharding_shapes(), x.local_sizes()
        everyones = [x.local_sizes(rank) for rank in range(dist.get_world_size())]
        assert not any(calls for calls, _ in _C.comm_counts().values())
        assert mine == x.to_local().shape and isinstance(mine, torch.Size)
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, tuple(mine))
        assert everyones == told, (combo, cut)
        assert shapes.keys() == {m for m, text in enumerate(combo) if text.startswith("S")}
        if combo.count(combo[0]) == 1 and combo[0].startswith("S"):
            assert shapes[0][mesh.get_coordinate()[0]] == mine

        again = ShardTensor.from_local(x.to_local(), mesh, x.placements, shape=x.shape, sharding_shapes=shapes, run_check=True)
        assert again._layout == x._layout
        if not any(isinstance(p, Partial) for p in x.placements):
            whole = distribute_tensor(value, mesh)
            assert whole.redistribute(placements=x.placements, sharding_shapes=shapes)._layout == x._layout
            assert distribute_tensor(value, mesh, x.placements, sharding_shapes=shapes)._layout == x._layout
            assert empty(5, 4, device_mesh=mesh, placements=x.placements, sharding_shapes=shapes)._layout == x._layout


@on_ranks(4)
def test_nested_rows():
    """Two mesh dims cut one tensor dim: the second has a list for each coordinate of the first, the same on all ranks."""
    mesh = mesh_of((2, 2))
    a, b = mesh.get_coordinate()
    mine = torch.full(([[4, 1], [0, 3]][a][b], 2), 1.0)
    lengths = {0: [5, 3], 1: [4, 1, 0, 3]}
    for given in ("infer", lengths):
        x = ShardTensor.from_local(mine, mesh, [Shard(0), Shard(0)], sharding_shapes=given)
        assert x.sharding_shapes() == {m: [(n, 2) for n in entries] for m, entries in lengths.items()}
        assert [x.local_sizes(rank)[0] for rank in range(4)] == lengths[1]
    assert x._spec.sharding_shapes()[1] == tuple((n, 2) for n in lengths[1][2 * a : 2 * a + 2])  # PhysicsNeMo's: this rank's own


@on_ranks(3)
def test_outside_of_the_mesh():
    """A mesh without some ranks: there the piece is empty, but the other ranks' sizes are known."""
    mesh, me = DeviceMesh("cpu", [2, 0]), dist.get_rank()
    x = st.zeros(5, 3, device_mesh=mesh, placements=[st.Shard(0)], sharding_shapes={0: [1, 4]})
    assert x.local_sizes() == x.to_local().shape == {2: (1, 3), 0: (4, 3), 1: (0,)}[me]
    assert [x.local_sizes(2), x.local_sizes(rank=0)] == [(1, 3), (4, 3)]
    assert x.sharding_shapes() == {0: [(1, 3), (4, 3)]}
    with pytest.raises(ValueError, match=rf"argument 'rank' is 1, which .* does not hold \(rank {me}\)"):
        x.local_sizes(1)


@on_ranks(4)
def test_strided():
    mesh = mesh_of((2, 2))
    x = zeros(7, 3, device_mesh=mesh, placements=[_StridedShard(0, split_factor=2), Shard(1)])
    assert x.sharding_shapes().keys() == {1} and x.local_sizes() == x.to_local().shape
    layout = _C.Layout(x._layout.mesh, x._layout.placements, [[3, 4], None])
    y = _C.wrap(torch.zeros(layout.local_sizes([7, 3])), layout, [7, 3], [3, 1])
    assert y.local_sizes() == y.to_local().shape
    with pytest.raises(NotImplementedError, match="uneven cut with a stride"):
        y.sharding_shapes()


@on_ranks(2)
def test_several_shards():
    n, me = dist.get_world_size(), dist.get_rank()
    x = ShardTensor.from_local(LocalShardsWrapper([torch.ones(1, 2)], [(n - 1 - me, 0)]), mesh_of((n,)), [Shard(0)])
    for ask in (x.sharding_shapes, x.local_sizes):
        with pytest.raises(NotImplementedError, match="LocalShardsWrappers"):
            ask()


# ---- sizes in place of shapes ----


@on_ranks(2, 3)
def test_lengths_everywhere():
    n, me = dist.get_world_size(), dist.get_rank()
    mesh = mesh_of((n,))
    lengths = {2: [1, 4], 3: [3, 0, 2]}[n]
    whole, at = torch.arange(20.0).view(4, 5), dict(device_mesh=mesh, placements=[Shard(1)])
    mine = whole.split(lengths, 1)[me]
    line = dict(device_mesh=mesh, placements=[Shard(0)])
    other = {2: [0, 5], 3: [0, 5, 0]}[n]

    def taken(given):
        x = st.ShardTensor.from_local(mine, mesh, [Shard(1)], **given)
        yield from (x, st.ShardTensor.from_local(mine, mesh, [Shard(1)], shape=(4, 5), run_check=True, **given))
        yield x.redistribute(placements=[Replicate()]).redistribute(placements=[Shard(1)], **given)
        yield from (st.distribute_tensor(whole, mesh, [Shard(1)], **given), st.distribute_tensor(x, mesh, [Shard(1)], **given))
        yield st.scatter_tensor(whole if me == 0 else None, 0, mesh, [Shard(1)], **given)
        yield from (make(4, 5, **at, **given) for make in (st.zeros, st.ones, st.empty, st.rand, st.randn))
        yield st.full((4, 5), 2.0, **at, **given)
        yield local_map(torch.exp, [Shard(1)], **given)(x.redistribute(placements=[Shard(1)]))
        yield st.ShardTensor.from_sharded_tensor(x.to_sharded_tensor(), mesh, [Shard(1)], **given)
        prepare = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1), **given)
        yield parallelize_module(torch.nn.Identity(), mesh, prepare)(mine)

    for a, b in zip(taken({"sharding_shapes": {0: lengths}}), taken({"sharding_shapes": {0: [(4, k) for k in lengths]}}), strict=True):
        assert a._layout == b._layout and a.shape == b.shape == (4, 5)
        assert a._layout.cuts == [lengths] and a.local_sizes() == (4, lengths[me])
    for make in (st.linspace, st.logspace):
        assert make(0.0, 1.0, 5, **line, sharding_shapes={0: other})._layout.cuts == [other]
    x = st.zeros(5, **line)
    assert x.explain([Shard(0)], sharding_shapes={0: other}).target == st.zeros(5, **line, sharding_shapes={0: other})._layout
    # Ranks that say the same in other words agree.
    told = lengths if me == 0 else [(4, k) for k in lengths]
    x = st.ShardTensor.from_local(mine, mesh, [Shard(1)], sharding_shapes={0 if me else -1: told}, run_check=True)
    assert x.full_tensor().equal(whole)


@on_ranks(2, 3)
def test_compiled():
    """Inside a graph too; local_sizes() is a constant there."""
    n, me = dist.get_world_size(), dist.get_rank()
    lengths = {0: [1, 4] if n == 2 else [3, 0, 2]}
    x = ShardTensor.from_local(torch.ones(lengths[0][me], 3), mesh_of((n,)), [Shard(0)], sharding_shapes=lengths)

    def f(x):
        piece = x.to_local() * x.local_sizes()[0]
        y = ShardTensor.from_local(piece, x.device_mesh, x.placements, sharding_shapes=lengths)
        return y.redistribute(placements=[Replicate()]).redistribute(placements=[Shard(0)], sharding_shapes=lengths)

    got = torch.compile(f, fullgraph=True, backend="aot_eager")(x)
    assert got.sharding_shapes() == x.sharding_shapes()
    assert got.full_tensor()[:, 0].tolist() == [float(k) for k in lengths[0] for _ in range(k)]


def test_16384_ranks():
    """The table of a large nested mesh is made in seconds."""
    layout = _C.Layout(layout_mesh(128, 128), [S(0), S(0)])
    shapes = sharding_shapes_of(layout, [20000], who="test")
    assert [len(entries) for entries in shapes.values()] == [128, 16384]
    assert math.fsum(entry[0] for entry in shapes[1]) == 20000


@on_ranks(2, 3)
def test_physicsnemos_arguments():
    """Calls in the words of PhysicsNeMo, by keyword and by position."""
    n, me = dist.get_world_size(), dist.get_rank()
    mesh = mesh_of((n,))
    lengths = {2: [1, 4], 3: [3, 0, 2]}[n]
    whole, placements = torch.arange(20.0).view(5, 4), [Shard(0)]
    mine, chunk = whole.split(lengths)[me].clone().requires_grad_(), whole.chunk(n)[me]
    shapes = {0: [(k, 4) for k in lengths]}
    for x in (
        st.ShardTensor.from_local(mine, mesh, placements, "infer"),
        st.ShardTensor.from_local(mine, mesh, placements, shapes),
        st.ShardTensor.from_local(mine, device_mesh=mesh, placements=placements, sharding_shapes=shapes, global_shape=whole.shape),
        st.ShardTensor.from_local(mine, mesh, placements, global_shape=(5, 4)),  # as there, the ranks are asked
    ):
        assert x.local_sizes() == (lengths[me], 4) and torch.equal(x.full_tensor(), whole)
        assert {m: [tuple(s) for s in cut] for m, cut in x._spec.sharding_shapes().items()} == shapes
        assert x.requires_grad and x.offsets(0) == sum(lengths[:me])
    for given in ((mesh, placements, "chunk", (5, 4)), (mesh, placements, "chunk", torch.Size((5, 4)))):
        x = st.ShardTensor.from_local(chunk, *given)
        assert x.to_local().shape == chunk.shape and torch.equal(x.full_tensor(), whole)
    x = st.ShardTensor.from_local(whole, mesh, [Replicate()], global_shape=(5, 4))
    assert x.placements == (Replicate(),) and x.shape == (5, 4)
    held = whole if me == n - 1 else None
    for x in (
        st.scatter_tensor(held, n - 1, mesh, placements),
        st.scatter_tensor(held, n - 1, mesh, placements, whole.shape, whole.dtype, True),
        st.scatter_tensor(
            tensor=held, global_src=n - 1, mesh=mesh, placements=placements, global_shape=(5, 4), dtype=torch.float32, requires_grad=False
        ),
    ):
        assert x.to_local().shape == chunk.shape and torch.equal(x.full_tensor(), whole)
    assert not x.requires_grad
