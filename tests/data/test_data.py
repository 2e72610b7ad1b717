"""An epoch of shard_batches is an epoch of one process that has all rows, whatever the ranks' loaders hold."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import multiprocessing

import pytest
import shardtensor as st
import torch
import torch.distributed as dist
from oracle import lies_as_the_whole, mesh_here, mesh_of, place
from pool import on_ranks
from shardtensor import _C, Partial, Replicate, Shard
from shardtensor.data import ShardSampler, shard_batches
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# ---- training ----


def rows(count):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 4, generator=generator, dtype=torch.float64), torch.randint(5, (count,), generator=generator)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5)).double()


def whole(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def trained(batches, net):
    """Each step's loss and gradients; the steps change the model."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    out = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        out.append([whole(loss.detach()), *(whole(p.grad).clone() for p in net.parameters())])
        optimizer.step()
    return out


def compare(got, want):
    assert len(got) == len(want)
    for a, b in zip(itertools.chain(*got), itertools.chain(*want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def epochs(count, batch, options):
    """With ShardSampler, two epochs; the plain twin takes the ranks' batches together, from the sampler's own order."""
    mesh, ranks = mesh_here(), dist.get_world_size()
    data = rows(count)
    sampler = ShardSampler(range(count), mesh=mesh, seed=5, **options)
    parts = [ShardSampler(range(count), ranks, r, seed=5, **options) for r in range(ranks)]
    loader = DataLoader(TensorDataset(*data), batch_size=batch, sampler=sampler)
    plain, ours = model(), st.distribute_module(model(), mesh)
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        read = []
        for part in parts:
            part.set_epoch(epoch)
            read.append(list(part))
        assert sorted(itertools.chain(*read)) == list(range(count)) and len(sampler) == len(read[dist.get_rank()])
        steps = -(-max(map(len, read)) // batch)
        taken = [list(itertools.chain(*(one[s * batch : (s + 1) * batch] for one in read))) for s in range(steps)]
        compare(trained(shard_batches(loader, mesh), ours), trained(([t[i] for t in data] for i in taken), plain))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("count", [13, 5, 2])  # 13: some ranks end before others; 2 on three ranks: one rank has nothing
def test_an_epoch_is_that_of_one_process(pools, world, count):
    for options in ({}, {"shuffle": False}, {"contiguous": True}, {"shares": [3, 1, 0][:world]}):
        pools(world).run(epochs, count, 2, options)


def in_order(data, size):
    return zip(*(t.split(size) for t in data), strict=True)


@pytest.mark.parametrize("count", [13, 2])
@on_ranks(4)
def test_rows_and_features_are_cut(count):
    """On a mesh of 2 x 2: rows are cut along the first mesh dim, features along the second."""
    mesh, placements = mesh_of((2, 2)), [Shard(0), Replicate()]
    data = rows(count)
    sampler = ShardSampler(range(count), mesh=mesh, placements=placements, shuffle=False, shares=[2, 2])
    loader = DataLoader(TensorDataset(*data), batch_size=2, sampler=sampler)

    def cut(name, module, mesh):
        for key, p in list(module.named_parameters(recurse=False)):
            dim = Shard(1) if name == "2" and key == "weight" else Replicate() if name == "2" else Shard(0)
            setattr(module, key, nn.Parameter(st.distribute_tensor(p.data, mesh, [Replicate(), dim])))

    got = trained(shard_batches(loader, mesh, placements), st.distribute_module(model(), mesh, cut))
    compare(got, trained(in_order(data, 4), model()))


@on_ranks(2, 3)
def test_fsdp(count=13):
    """FSDP2's modules take plain tensors and average gradients: rows are weighed by hand, as docs/data.md says."""
    mesh, data, plain = mesh_here(), rows(count), model()
    loader = DataLoader(TensorDataset(*data), batch_size=2, sampler=ShardSampler(range(count), mesh=mesh, shuffle=False))
    net = fully_shard(model(), mesh=mesh)
    for (x, y), (a, b) in zip(shard_batches(loader, mesh), in_order(data, 2 * mesh.size()), strict=True):
        local = nn.functional.cross_entropy(net(x.to_local()), y.to_local(), reduction="sum")
        (local / len(x) * mesh.size()).backward()
        nn.functional.cross_entropy(plain(a), b).backward()
    for ours, want in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), want.grad, rtol=1e-9, atol=1e-9)


# ---- batches of other kinds ----


@dataclasses.dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    names: list[str]
    step: int
    factor: torch.Tensor
    nothing: object = None


Pair = collections.namedtuple("Pair", "left right")


class Registered:
    def __init__(self, inner, tag):
        self.inner, self.tag = inner, tag


torch.utils._pytree.register_pytree_node(Registered, lambda r: ([r.inner], r.tag), lambda parts, tag: Registered(*parts, tag))


def a_batch(rank, step, count):
    """`count` rows that say where they come from, in every kind of container."""
    x = torch.arange(count * 6, dtype=torch.float64).reshape(count, 2, 3) + 100 * rank + 10 * step
    names = [f"{rank}.{step}.{i}" for i in range(count)]
    return collections.OrderedDict(
        sample=Sample(x, names, step, torch.tensor(2.0 + step)),
        pair=Pair(x[:, 0].int(), [x[:, 1, 1] > 0, {"deep": x.bfloat16()}]),
        registered=Registered(x[:, :1], "tag"),
        flag=True,
        size=(2, 3),
    )


LENGTHS = {2: [[3, 1, 2], [2]], 3: [[2, 4], [], [1, 0, 5]]}  # of each rank's batches


@on_ranks(2, 3)
def test_other_kinds_of_batches():
    mesh, rank, world = mesh_here(), dist.get_rank(), dist.get_world_size()
    lengths = LENGTHS[world]
    batches = [a_batch(rank, step, n) for step, n in enumerate(lengths[rank])]
    step = 0
    for got in shard_batches(batches, mesh):
        there = [a_batch(r, step, one[step]) for r, one in enumerate(lengths) if step < len(one)]
        mine = step < len(lengths[rank])
        leader, sample = there[0], got["sample"]
        assert type(got) is collections.OrderedDict and type(sample) is Sample and type(got["pair"]) is Pair
        assert got["registered"].tag == "tag" and got["flag"] is True and got["size"] == (2, 3)
        assert (sample.step, float(sample.factor), sample.nothing) == (step, 2.0 + step, None)
        assert type(sample.factor) is torch.Tensor
        assert sample.names == (batches[step]["sample"].names if mine else [])
        for find in (
            lambda b: b["sample"].image,
            lambda b: b["pair"].left,
            lambda b: b["pair"].right[0],
            lambda b: b["pair"].right[1]["deep"],
            lambda b: b["registered"].inner,
        ):
            ours, want = find(got), torch.cat([find(b) for b in there])
            assert ours.to_local().shape[0] == (lengths[rank][step] if mine else 0)
            assert ours.dtype == want.dtype and ours.to_local().shape[1:] == find(leader).shape[1:]
            assert torch.equal(ours.full_tensor(), want)
        step += 1
    assert step == max(map(len, lengths))


@on_ranks(3)
def test_more_tensors_than_a_message_holds():
    """More than one message's room holds; each with another length."""
    mesh, rank = mesh_here(), dist.get_rank()
    first = {f"t{i}": torch.full((i % 5 + rank, 3), float(i)) for i in range(60)}
    got = list(shard_batches([first] if rank else [first, {k: t + 1 for k, t in first.items()}], mesh))
    assert len(got) == 2
    for i in range(60):
        held = [i % 5 + r for r in range(dist.get_world_size())]
        assert got[0][f"t{i}"].shape == (sum(held), 3) and got[1][f"t{i}"].shape == (held[0], 3)
        assert torch.equal(got[1][f"t{i}"].full_tensor(), torch.full((held[0], 3), i + 1.0))


@on_ranks(3)
def test_order_in_memory_and_gradients():
    """Pieces lie in memory as those of the first rank that has a batch, also empty ones."""
    mesh, rank = mesh_here(), dist.get_rank()
    x = torch.randn(rank + 1, 3, 4, 5)
    last = x.to(memory_format=torch.channels_last)
    batches = [[last, last], [x], []][rank]
    got = list(shard_batches(batches, mesh))
    assert [t.is_contiguous(memory_format=torch.channels_last) for t in got] == [True, True]
    assert all(lies_as_the_whole(t) for t in got)
    if rank == 1:
        assert torch.equal(got[0].to_local(), x)
    x.requires_grad_()
    for t in shard_batches([x] if rank else [], mesh):
        assert t.requires_grad
        (t**2).sum().backward()
    assert not rank or torch.equal(x.grad, 2 * x)


@on_ranks(4)
def test_rows_and_sequences_are_cut():
    """Rows cut along one mesh dim, sequences along the other; labels, without a sequence, are the same there."""
    mesh = mesh_of((2, 2))
    row, column = mesh.get_coordinate()
    tokens = [torch.arange(n * 7).reshape(n, 7) + 100 * s for s, n in enumerate([3, 2])]
    parts = [t[: t.size(0) - 1] if row == 0 else t[t.size(0) - 1 :] for t in tokens]
    batches = [(p[:, :5] if column == 0 else p[:, 5:], p[:, 0]) for p in parts]
    if row == 1:
        del batches[1]
    got = list(shard_batches(batches, mesh, [Shard(0), Shard(1)]))
    assert got[0][1].placements == (Shard(0), Replicate())
    assert torch.equal(got[0][0].full_tensor(), tokens[0]) and torch.equal(got[0][1].full_tensor(), tokens[0][:, 0])
    assert torch.equal(got[1][0].full_tensor(), tokens[1][:1])
    assert got[1][0].to_local().shape == (1 - row, 5 if column == 0 else 2)
    with pytest.raises(ValueError, match=r"has ended, .* mesh dim 1 does not split the rows"):
        list(shard_batches([(torch.ones(2, 3), torch.ones(2))] * (column + 1), mesh, [Shard(0), Shard(1)]))
    with pytest.raises(ValueError, match="'1' of the batch has other values"):
        list(shard_batches([(torch.ones(2, 3), torch.ones(2) + column)], mesh, [Shard(0), Shard(1)]))
    nested = list(shard_batches([torch.ones(2 * row + column, 2)], mesh, [Shard(0), Shard(0)]))
    assert nested[0].shape == (6, 2)
    turned = list(shard_batches([torch.ones(4, row + 1)] * (row + 1), mesh, [Shard(1), Replicate()]))
    assert [t.shape for t in turned] == [(4, 3), (4, 2)]


@on_ranks(2)
def test_batches_without_tensors():
    rank = dist.get_rank()
    assert list(shard_batches(["a", "b"] if rank else ["c"], mesh_here())) == (["a", "b"] if rank else ["c", "b"])
    assert list(shard_batches([], mesh_here())) == []


@on_ranks(2)
def test_worker_processes():
    """Loaders with worker processes; an epoch that all ranks leave early, and another after it."""
    multiprocessing.current_process()._config["daemon"] = False  # the tests' ranks are daemons, which may have no children
    try:
        mesh = mesh_here()
        loader = DataLoader(range(11), batch_size=2, sampler=ShardSampler(range(11), mesh=mesh, shuffle=False), num_workers=1)
        batches = shard_batches(loader, mesh)
        for count, _ in enumerate(batches):
            if count == 1:
                break
        assert sorted(torch.cat([t.full_tensor() for t in batches]).tolist()) == list(range(11))
    finally:
        multiprocessing.current_process()._config["daemon"] = True


# ---- how ranks wait for each other ----


def one_ahead():
    """A rank gets a batch before the others have taken the next one; and sends one small message for it."""
    mesh, rank, world = mesh_here(), dist.get_rank(), dist.get_world_size()
    store, one_ahead.calls = dist.distributed_c10d._get_default_store(), getattr(one_ahead, "calls", 0) + 1

    def slow():
        for step in range(4):
            if rank and step:
                store.wait([f"test_data/{one_ahead.calls}/{step - 1}"])  # rank 0 has the batch before
            yield torch.ones(step + rank, 2)

    _C.reset_comm_counts()
    for step, t in enumerate(shard_batches(slow(), mesh)):
        assert t.shape == (world * step + sum(range(world)), 2)
        if rank == 0:
            store.set(f"test_data/{one_ahead.calls}/{step}", "")
    calls = {kind: n for kind, (n, _) in _C.comm_counts().items() if n}
    assert calls == {"all_gather": 5}, calls  # 4 batches and the end


@pytest.mark.parametrize("world", [2, 3])
def test_messages_travel_ahead(pools, world):
    pools(world).run(one_ahead)


# ---- what is refused, on all ranks alike ----


class Broken:
    def __iter__(self):
        yield torch.ones(2, 2)
        if dist.get_rank() == 1:
            raise ZeroDivisionError("a bad sample")
        yield torch.ones(2, 2)


@on_ranks(2, seconds=100)
def test_refused():
    mesh, rank = mesh_here(), dist.get_rank()
    mine = [torch.ones(2, 2), torch.ones(3, 2)][rank]

    def raises(error, text, batches, *placements):
        with pytest.raises(error, match=text):
            list(shard_batches(batches, mesh, *placements))
        dist.barrier()

    raises(ZeroDivisionError if rank else RuntimeError, "a bad sample" if rank else "rank 1 raised ZeroDivisionError: a bad sample", Broken())
    raises(ValueError, r"the batches.*on rank 1 than on rank 0 .*tensors \['[ab]'\]", [{"ab"[rank]: mine}])
    raises(ValueError, r"'placements', have another structure", [mine], [Shard(rank)])
    raises(ValueError, r"'x' of the batch is torch.float64 on rank 1, torch.float32 on rank 0", [{"x": mine.to([torch.float32, torch.float64][rank])}])
    raises(ValueError, r"'0' of the batch has sizes \[3, 3\] on rank 1, \[2, 2\] on rank 0 .*pad to the same length", [(torch.ones(2 + rank, 2 + rank),)])
    raises(ValueError, "requires_grad of the batch is True on rank 1, False on rank 0", [mine.requires_grad_(rank == 1)])
    raises(ValueError, "ended, the one of rank 0 has not, but mesh dim 0 does not split the rows", [torch.ones(2)] * (2 - rank), [Replicate()])
    raises(ValueError, "other values on rank 1 than on rank 0", [torch.ones(2) + rank], [Replicate()])
    raises(ValueError, "other sizes on rank 1 than on rank 0", [torch.ones(2 + rank)], [Replicate()])
    for swapped in ([1, 0], [0, 1]), ([[1.0, 2.0], [3.0, 4.0]], [[3.0, 4.0], [1.0, 2.0]]), ([1j, 2j], [2j, 1j]):
        raises(ValueError, "other values", [torch.tensor(swapped[rank])], [Replicate()])
    assert torch.equal(next(iter(shard_batches([torch.tensor([1j, 2])], mesh, [Replicate()]))).to_local(), torch.tensor([1j, 2]))
    sparse, ours = torch.ones(2, 2).to_sparse(), place(torch.ones(4, 2), mesh, ["S(0)"], "even")
    raises(NotImplementedError, "not a dense tensor", [sparse])
    raises(TypeError, "is a ShardTensor already", [ours])
    raises(ValueError, r"sizes \[2\], but its rows should be along dim 1", [torch.ones(2)], [Shard(1)])
    raises(RuntimeError, r"ranks \[1\] have ended and need .* rank 0, but it cannot be pickled", [] if rank else [(torch.ones(2), lambda: 0)])
    for placements, text in (([Partial()], "use Shard"), ([Shard(-1)], "use Shard"), ([Shard(0)] * 2, "mesh.* has 1 dims")):
        with pytest.raises(ValueError, match=text):
            shard_batches([], mesh, placements)
    dataset = TensorDataset(torch.arange(5))
    with pytest.warns(UserWarning, match="repeats 1 samples .*ShardSampler repeats none"):
        shard_batches(DataLoader(dataset, sampler=DistributedSampler(dataset)), mesh)
    with pytest.raises(ValueError, match="leave out 'num_replicas'"):
        ShardSampler(range(3), 2, 0, mesh=mesh)


@on_ranks(4)
def test_refused_on_two_dims():
    with pytest.raises(ValueError, match="has 2 dims; say which"):
        shard_batches([], mesh_of((2, 2)))
    half = st.DeviceMesh("cpu", [0, 1])
    if dist.get_rank() > 1:
        with pytest.raises(ValueError, match="does not hold rank"):
            shard_batches([], half)
    # A sampler that splits over all ranks, where half of them should read the same.
    loader = DataLoader(torch.arange(8.0), batch_size=2, sampler=DistributedSampler(range(8), shuffle=False))
    with pytest.raises(ValueError, match=r"other values .* mesh dim 1: .*ShardSampler\(mesh=..., placements=...\)"):
        list(shard_batches(loader, mesh_of((2, 2)), [st.Shard(0), st.Replicate()]))


# ---- the sampler ----


@pytest.mark.parametrize("options", [{}, {"contiguous": True}, {"shares": [2, 0, 3]}, {"shares": [2, 0, 3], "contiguous": True}])
@pytest.mark.parametrize("size", [0, 1, 3, 17])
def test_sampler_gives_each_sample_once(options, size):
    for epoch in (0, 1):
        parts = [ShardSampler(range(size), 3, r, **options) for r in range(3)]
        for part in parts:
            part.set_epoch(epoch)
        assert sorted(itertools.chain(*parts)) == list(range(size))
        assert [len(list(part)) for part in parts] == [len(part) for part in parts]
        assert list(copy.copy(parts[0])) == list(parts[0])


def test_sampler_reads_in_torchs_order():
    for shuffle in (False, True):
        ours, torchs = (kind(range(12), 3, 1, shuffle, 7) for kind in (ShardSampler, DistributedSampler))
        for sampler in (ours, torchs):
            sampler.set_epoch(4)
        assert list(ours) == list(torchs)
    epochs = []
    for epoch in (0, 1):
        ours.set_epoch(epoch)
        epochs.append(list(ours))
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("ranks", [2, 3])
def test_sampler_resumes_in_the_middle_of_an_epoch(ranks):
    """On other ranks than before: together they read what is left."""
    before = [ShardSampler(range(23), 4, r) for r in range(4)]
    after = [ShardSampler(range(23), ranks, r) for r in range(ranks)]
    for sampler in before + after:
        sampler.set_epoch(2)
    read = {i for sampler in before for i in list(sampler)[:3]}
    for sampler in after:
        sampler.set_epoch(2, start=len(read))
    assert sorted(itertools.chain(read, *after)) == list(range(23))
    assert sum(map(len, after)) == 11
    after[0].set_epoch(3)
    assert len(after[0]) == len(ShardSampler(range(23), ranks, 0))
    with pytest.raises(ValueError, match="'start' is 24"):
        after[0].set_epoch(2, start=24)
    with pytest.raises(ValueError, match="contiguous=True"):
        ShardSampler(range(3), 2, 0, contiguous=True).set_epoch(0, start=1)


def test_sampler_refuses():
    for arguments, text in (((2, 2), "'rank' is 2"), ((2, 0, True, 0), "one number")):
        with pytest.raises(ValueError, match=text):
            ShardSampler(range(3), *arguments, shares=[1, 1] if len(arguments) == 2 else [1])
    with pytest.raises(RuntimeError, match="no process group"):
        ShardSampler(range(3))
