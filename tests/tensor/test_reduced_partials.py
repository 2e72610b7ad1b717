"""A `Partial` result of an op is added up once for all its readers, until it is written, and not for longer than it lives."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable

import pytest
import shardtensor
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import mesh_here, whole
from pool import on_ranks
from shardtensor import _C, Partial, Replicate, Shard, ShardTensor, debug, distribute_tensor, set_reduce_once
from torch.distributed.device_mesh import init_device_mesh

DOUBLE = torch.float64
SIZES = (7, 4, 6)
# How the rows are cut: evenly, unevenly, with empty pieces.
ROWS = {2: (None, [2, 5], [7, 0]), 3: (None, [1, 4, 2], [0, 7, 0])}

# Results in summands of [4, 6], and the same of plain tensors.
SUMMANDS: dict[str, Callable] = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "amax": lambda x: x.amax(0),
    "matmul": lambda x: x[:, :, 0].t() @ x[:, 0],
}
# Ops that have to add up, by what they read: all of it, or a part.
READERS: dict[str, Callable] = {
    "exp": lambda y: y.exp(),
    "exp of t": lambda y: y.t().exp(),
    "norms": lambda y: y.softmax(-1),
    "with itself": lambda y: torch.maximum(y, y.exp()),
    "of a view": lambda y: y.view(-1).abs().exp(),
    "detached": lambda y: y.detach().exp(),
    "data": lambda y: y.data.square(),
    "a row": lambda y: y[1].exp(),
    "columns": lambda y: y[:, 2:5].exp(),
    "split": lambda y: torch.cat([part.tanh() for part in y.split(2)]),
    "redistributed": lambda y: y.redistribute(placements=replicated(y)),
    "cut": lambda y: y.redistribute(placements=cut(y)),
    "full_tensor": lambda y: y.full_tensor(),
}


def replicated(y):
    return [Replicate()] * y.device_mesh.ndim


def cut(y):
    return [Shard(1)] * y.device_mesh.ndim


def plain(read):
    """The reader, on a plain tensor."""
    return (lambda y: y) if read in (READERS["redistributed"], READERS["cut"], READERS["full_tensor"]) else read


def inputs(rows, requires_grad=False):
    generator = torch.Generator().manual_seed(1)
    want = torch.randn(SIZES, generator=generator, dtype=DOUBLE)
    shapes = {} if rows is None else {"sharding_shapes": {0: rows}}
    x = distribute_tensor(want, mesh_here(), [Shard(0)], **shapes)
    return x.requires_grad_(requires_grad), want.requires_grad_(requires_grad)


def sent():
    """The collectives since the last call of this."""
    out = {kind: n for kind, (n, _) in _C.comm_counts().items() if n}
    _C.reset_comm_counts()
    return out


@on_ranks(2, 3)
@pytest.mark.parametrize("cut", range(3))
def test_all_pairs(cut, world):
    """The second reader of whatever the first has read sends nothing that adds up, and nothing at all if it was all-reduced."""
    rows = ROWS[world][cut]
    x, plain_x = inputs(rows)
    for made, make in SUMMANDS.items():
        for first, read in READERS.items():
            owns = first in ("redistributed", "cut", "full_tensor")
            part = first in ("a row", "columns", "split")
            for second, again in READERS.items():
                y, want = make(x), make(plain_x)
                what = (made, first, second)
                assert y.placements[0].is_partial(), what
                torch.testing.assert_close(whole(read(y)), plain(read)(want), msg=str(what))
                sent()
                got = again(y)
                kinds = sent()
                if not owns and not (part and second != first):
                    assert not kinds, (what, kinds)
                torch.testing.assert_close(whole(got), plain(again)(want), msg=str(what))


def same_bits(rows):
    x, _ = inputs(rows)
    for make in SUMMANDS.values():
        y = make(x)
        assert torch.equal((y.t() == y.amax(-1, keepdim=True).t()).full_tensor(), (y == y.amax(-1, keepdim=True)).full_tensor().t())
        assert (y == y.amax(-1, keepdim=True)).any(-1).full_tensor().all()
        kept = y.exp().full_tensor()
        assert torch.equal(y.full_tensor().exp(), kept)
        assert torch.equal(y.t().exp().full_tensor(), kept.t())
        assert len(debug.kept(y)) == 1


@pytest.mark.parametrize("world", [2, 3])
def test_same_bits(pools, world):
    for rows in ROWS[world]:
        pools(world).run(same_bits, rows)


WRITES: dict[str, Callable] = {
    "add_": lambda y: y.add_(y),
    "times": lambda y: y.mul_(2),
    "through a view": lambda y: y[1].mul_(2),
    "through an older view": lambda y: y.of_it.mul_(2),
    "through data": lambda y: y.data.mul_(2),
    "detached": lambda y: y.detach().mul_(2),
    "zero_": lambda y: y.zero_(),
    "fill of a column": lambda y: y[:, 1].zero_(),
    "out": lambda y: torch.add(y.clone(), y.clone(), out=y),
    "list": lambda y: torch._foreach_mul_([y], 2),
}


def writes(rows):
    x, plain_x = inputs(rows)
    for name, write in WRITES.items():
        y, want = x.sum(0), plain_x.sum(0)
        y.of_it, want.of_it = y[2:], want[2:]
        for _ in range(2):
            torch.testing.assert_close(y.exp().full_tensor(), want.exp())
            assert debug.kept(y), name
            write(y)
            write(want)
            assert not debug.kept(y), name
            sent()
            torch.testing.assert_close(whole(y.exp()), want.exp(), msg=name)
            assert sent(), name


@pytest.mark.parametrize("world", [2, 3])
def test_writes(pools, world):
    for rows in ROWS[world]:
        pools(world).run(writes, rows)


@on_ranks(2)
def test_written_by_one():
    """Through to_local(), also of a view: this rank raises, since the others would not add up again."""
    x, _ = inputs(None)
    for piece_of in (lambda y: y, lambda y: y.detach(), lambda y: y.t(), lambda y: y[1:]):
        y = x.sum(0)
        y.exp()
        sent()
        if dist.get_rank() == 1:
            piece_of(y).to_local().mul_(2)
            with pytest.raises(RuntimeError, match=r"wrote its piece through to_local.*set_reduce_once"):
                y.cos()
        else:
            y.cos()
        assert not sent()


@on_ranks(2)
def test_not_kept():
    """Where others may write the pieces at any time, each read adds up: from_local, a leaf's gradient; and inference mode."""
    mesh = mesh_here()
    local = torch.full((4, 6), 2.0, dtype=DOUBLE)
    y = ShardTensor.from_local(local, mesh, [Partial()])
    for _ in range(2):
        torch.testing.assert_close(y.exp().full_tensor(), (local * mesh.size()).exp())
        local += 1

    x, plain_x = inputs(None)
    w, plain_w = (t.detach()[0, 0].clone().requires_grad_() for t in (x.redistribute(placements=replicated(x)), plain_x))
    (x * w).sum().backward()
    (plain_x * plain_w).sum().backward()
    if w.grad.placements[0].is_partial():
        for _ in range(2):
            torch.testing.assert_close(w.grad.exp().full_tensor(), plain_w.grad.exp())
            w.grad.to_local().mul_(0.5)
            plain_w.grad.mul_(0.5)

    with torch.inference_mode():
        y = x.sum(0)
        for _ in range(2):
            torch.testing.assert_close(y.exp().full_tensor(), plain_x.sum(0).exp())
            y.to_local().mul_(1)
    set_reduce_once(False)
    try:
        y = x.sum(0)
        y.exp()
        sent()
        y.exp()
        assert sent() == {"all_reduce": 1}
    finally:
        set_reduce_once(True)
    assert not debug.kept(y)


def gradients(rows):
    """Two readers, and autograd's own: what their formulas read again is not added up again."""
    def zeros(y):
        index = torch.zeros(4, 6, dtype=torch.int64)
        return index if type(y) is torch.Tensor else distribute_tensor(index, y.device_mesh, replicated(y))

    formulas = {
        "gelu and tanh": lambda y: F.gelu(y) * torch.tanh(y),
        "square": lambda y: y * y.exp(),
        "amax": lambda y: (y - y.amax(-1, keepdim=True)).exp(),
        "scatter amax": lambda y: y.scatter_reduce(1, zeros(y), y.exp(), "amax"),
    }
    for name, f in formulas.items():
        x, want = inputs(rows, requires_grad=True)
        f(x.sum(0)).square().sum().backward()
        f(want.sum(0)).square().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), want.grad, msg=name)
    x, _ = inputs(rows, requires_grad=True)
    y = x.sum(0)
    z = F.gelu(y)
    sent()
    z.backward(torch.ones_like(z))
    assert not sent()


@pytest.mark.parametrize("world", [2, 3])
def test_gradients(pools, world):
    for rows in ROWS[world]:
        pools(world).run(gradients, rows)


@on_ranks(2)
def test_lifetimes():
    """A sum is gone with its summand and the summand's views, and results of ops that could share its memory do not."""
    before = debug.kept()
    x, _ = inputs(None)
    y = x.sum(0)
    y.exp()
    piece = 4 * 6 * 8
    assert debug.kept() == (before[0] + 1, before[1] + piece)
    assert debug.kept(y) == debug.kept(y.t()) == [(f"R on cpu mesh ({dist.get_world_size()})", piece)]
    row = y[1]
    del y
    gc.collect()
    assert debug.kept() == (before[0] + 1, before[1] + piece)
    torch.testing.assert_close(row.exp().full_tensor(), x.full_tensor().sum(0)[1].exp())
    del row
    gc.collect()
    assert debug.kept() == before

    y = x.sum(0)
    want = y.exp().full_tensor()
    for own in (y.redistribute(placements=replicated(y)), y.contiguous(), y.clone(), y.exp(), y.reshape(-1), y.view(-1).contiguous()):
        if not own.placements[0].is_partial():
            own.zero_()
    y.full_tensor().zero_()
    torch.testing.assert_close(y.exp().full_tensor(), want)
    parts = [x.sum(0) for _ in range(20)]
    views = [y[i : i + 1] for i in range(4)] * 5
    for part in parts + views:
        part.exp()
    assert len(debug.kept(y)) <= 8
    del parts, views, part, y, own
    gc.collect()
    assert debug.kept() == before


@on_ranks(2)
def test_in_lists():
    """Lists of ops and redistribute() of several start from the sums."""
    x, plain_x = inputs(None)
    ys = [x.sum(0), x.mean(0), x.sum(0) * 2]
    wants = [plain_x.sum(0), plain_x.mean(0), plain_x.sum(0) * 2]
    for y in ys:
        y.exp()
    sent()
    for got, want in zip(torch._foreach_exp(ys), wants, strict=True):
        torch.testing.assert_close(whole(got), want.exp())
    moved = shardtensor.redistribute(ys, placements=replicated(x))
    assert not sent()
    for t, y, want in zip(moved, ys, wants, strict=True):
        torch.testing.assert_close(whole(t), want)
        t.zero_()
        torch.testing.assert_close(whole(y.exp()), want.exp())


def same_on_all_ranks(*facts):
    all_facts = [None] * dist.get_world_size()
    dist.all_gather_object(all_facts, facts[1:])
    assert all(f == all_facts[0] for f in all_facts), (inspect.getsource(facts[0]), all_facts)


@on_ranks(4)
def test_with_empty_pieces():
    """On ranks with empty pieces alone, the kernels of some views copy. No view may have a sum on some ranks and none on others."""
    mesh = init_device_mesh("cpu", (2, 2))
    want = torch.randn(SIZES, generator=torch.Generator().manual_seed(2), dtype=DOUBLE)
    for sizes in ([0, 4], [4, 0], [1, 3]):
        for view in (
            lambda y: y.unsqueeze(1), lambda y: y.view(-1), lambda y: y.view(2, 2, 6), lambda y: y.unflatten(1, (2, 3)), lambda y: y.t(),
            lambda y: y.expand(2, 4, 6), lambda y: y.narrow(0, 0, 4), lambda y: y[:, ::2], lambda y: y.diagonal(), lambda y: y.unbind(1)[2],
            lambda y: y.movedim(0, 1).flatten(), lambda y: y.split([1, 5], 1)[1], lambda y: y.squeeze(), lambda y: y.view_as(y), lambda y: y[2:],
        ):  # fmt: skip
            x = distribute_tensor(want, mesh, [Shard(1), Shard(0)], sharding_shapes={0: sizes})
            y, plain_y = x.sum(0), want.sum(0)
            assert y.placements == (Shard(0), Partial())
            for read in (lambda y: y.exp(), lambda y, view=view: view(y).exp(), lambda y, view=view: view(y).sinh(), lambda y: y.cos()):
                got = read(y)
                same_on_all_ranks(view, debug.kept()[0], [sum.layout for sum in debug.kept(y)])
                torch.testing.assert_close(whole(got), read(plain_y))
            if 0 not in view(plain_y).stride():
                view(plain_y).mul_(2)
                view(y).mul_(2)
                same_on_all_ranks(view, debug.kept()[0], [sum.layout for sum in debug.kept(y)])
                got = y.exp()
                torch.testing.assert_close(whole(got), plain_y.exp())


@on_ranks(4)
def test_two_dims():
    mesh = init_device_mesh("cpu", (2, 2))
    want = torch.randn(SIZES, generator=torch.Generator().manual_seed(2), dtype=DOUBLE)
    for placements in ([Shard(0), Shard(0)], [Shard(0), Shard(2)], [Replicate(), Shard(0)], [Shard(1), Shard(0)]):
        y = distribute_tensor(want, mesh, placements).sum(0)
        part = (slice(None), 1) if Shard(0) in y.placements else 1  # a true view, which takes nothing from other ranks
        reads = (lambda y: y.exp(), lambda y: y.t().exp(), lambda y, part=part: y[part].exp(), lambda y: y[..., 2:].sinh())
        for read in reads:
            torch.testing.assert_close(whole(read(y)), read(want.sum(0)))
        assert debug.kept(y)
        sent()
        for read in reads[:2]:  # of other views of cut tensors, kernels may make copies
            read(y)
        kinds = sent()
        assert not any(kind.startswith("all_reduce") for kind in kinds), (placements, kinds, debug.kept(y))
