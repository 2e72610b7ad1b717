"""Sums of no dims are added up when they are made, so one rank alone may read them: `if rank == 0: print(loss.item())`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from forks import Run, run_each
from pool import on_ranks
from shardtensor import _C, Partial, Replicate, Shard, distribute_tensor, set_reduce_ahead
from test_api import numbers
from torch.distributed.device_mesh import init_device_mesh

LOSSES: dict[str, Callable] = {
    "mean": lambda x, t: x.mean(),
    "sum": lambda x, t: x.sum(),
    "sum of all dims": lambda x, t: x.sum((0, 1)),
    "cross_entropy": F.cross_entropy,
    "mse_loss": lambda x, t: F.mse_loss(x, x.detach() * 0.5),
    "of a loss": lambda x, t: F.cross_entropy(x, t) / 4,
    "of two losses": lambda x, t: F.cross_entropy(x, t) + 0.1 * x.square().mean(),
    "of integers": lambda x, t: (x.argmax(1) == t).sum(),
}
ROWS = {2: ([3, 4], [7, 0]), 3: ([2, 2, 3], [4, 0, 3]), 4: ([2, 2, 2, 1], [0, 4, 0, 3])}

READS: dict[str, Callable] = {
    "item": lambda loss: loss.item(),
    "float": lambda loss: float(loss.detach()),
    "format": lambda loss: float(f"{loss:.12f}"),
    "detach": lambda loss: loss.detach().item(),
    "full_tensor": lambda loss: loss.full_tensor().item(),
    "numpy": lambda loss: float(loss.detach().full_tensor().numpy()),
    "compared": lambda loss: loss.item() if bool(loss > -1000) else None,
    "as a view": lambda loss: loss.view(1)[0].item(),
    "as a view of one dim": lambda loss: loss.view(1).full_tensor().item(),
    "data": lambda loss: loss.data.item(),
}


@contextmanager
def ahead(on: bool = True) -> Iterator[None]:
    before = _C.reduces_ahead()
    set_reduce_ahead(on)
    try:
        yield
    finally:
        set_reduce_ahead(before)


def batch(mesh, rows):
    """Logits and labels cut over the ranks, and the same whole."""
    whole, labels = numbers(7, 5), torch.arange(7) % 5
    x = distribute_tensor(whole, mesh, [Shard(0)], sharding_shapes={0: rows}).requires_grad_()
    return x, distribute_tensor(labels, mesh, [Shard(0)], sharding_shapes={0: rows}), whole.requires_grad_(), labels


def sent():
    return {kind: tuple(n) for kind, n in _C.comm_counts().items() if n[0]}


def mesh_of_all():
    return init_device_mesh("cpu", (dist.get_world_size(),))


@pytest.mark.parametrize("name", LOSSES)
@on_ranks(2, 3)
def test_one_rank_reads(name):
    mesh, loss_of = mesh_of_all(), LOSSES[name]
    for rows in ROWS[mesh.size()]:
        for read_name, read in READS.items():
            for reader in range(mesh.size()):
                x, t, whole, labels = batch(mesh, rows)
                want = loss_of(whole, labels)
                with ahead():
                    loss = loss_of(x, t)
                assert loss.placements[0].is_partial()
                _C.reset_comm_counts()
                if dist.get_rank() == reader:
                    assert read(loss) == pytest.approx(want.item(), abs=1e-9), (read_name, rows)
                assert not sent(), (read_name, sent())
                if want.requires_grad:
                    loss.backward()
                    want.backward()
                    torch.testing.assert_close(x.grad.full_tensor(), whole.grad)


@pytest.mark.parametrize("context", ["no_grad", "inference_mode"])
@on_ranks(2, 4)
def test_without_gradients(context):
    mesh = mesh_of_all()
    x, t, whole, labels = batch(mesh, ROWS[mesh.size()][1])
    with ahead(), getattr(torch, context)():
        loss = F.cross_entropy(x.detach(), t)
        if dist.get_rank() == 1:
            assert loss.item() == pytest.approx(F.cross_entropy(whole, labels).item())
        loss += 1
        loss = loss.clone()
        if dist.get_rank() == 1:
            assert loss.item() == pytest.approx(F.cross_entropy(whole, labels).item() + 1)


@on_ranks(4)
def test_on_two_dims():
    whole = numbers(5, 3)
    mesh = init_device_mesh("cpu", (2, 2))
    with ahead():
        loss = distribute_tensor(whole, mesh, [Shard(0), Shard(1)]).mean()
        assert all(p.is_partial() for p in loss.placements)
        if dist.get_rank() == 3:
            assert loss.item() == pytest.approx(whole.mean().item())


@on_ranks(2, 4)
def test_what_is_sent():
    mesh = mesh_of_all()
    x = distribute_tensor(numbers(7, 5), mesh, [Shard(0)])
    _C.reset_comm_counts()
    with ahead(False):
        x.sum()
    assert not sent()
    with ahead():
        loss = x.sum()
        assert sent() == {"all_reduce": (1, 40)}
        loss.full_tensor(), loss.redistribute(placements=[Replicate()]), loss.item(), x / loss
        assert sent() == {"all_reduce": (1, 40)}  # one for all that need the value
        _C.reset_comm_counts()
        x.max(), x.norm(), x.sum(0), x.abs()
        assert not sent()  # no sums, or not of no dims
        w = distribute_tensor(torch.tensor(2.0).double(), mesh, [Replicate()]).requires_grad_()
        y = (x * w).sum(1)
        _C.reset_comm_counts()
        y.backward(torch.ones_like(y))
        assert w.grad.placements == (Partial(),)
        assert not sent(), sent()  # a gradient


@on_ranks(2, 4)
def test_written_since():
    mesh = mesh_of_all()
    whole = numbers(7, 5)
    writes = {
        "itself": lambda loss: loss.mul_(3),
        "a view": lambda loss: loss.view(1).mul_(3),
        "a detached": lambda loss: loss.detach().mul_(3),
        "its data": lambda loss: loss.data.mul_(3),
        "a list": lambda loss: torch._foreach_mul_([loss], 3),
        "out": lambda loss: torch.mul(loss, 3, out=loss),
    }
    for context in (torch.no_grad, torch.inference_mode):
        for name, write in writes.items():
            with ahead(), context():
                loss = distribute_tensor(whole, mesh, [Shard(0)]).sum()
                write(loss)
                assert loss.item() == pytest.approx(3 * whole.sum().item()), (context, name)
                assert loss.full_tensor().item() == pytest.approx(3 * whole.sum().item())
    with ahead():
        kept = distribute_tensor(whole, mesh, [Shard(0)]).sum()
        replicated = kept.full_tensor()
        replicated.mul_(5)  # not the value that is kept
        assert kept.item() == pytest.approx(whole.sum().item())
        other = distribute_tensor(torch.tensor(1.0).double(), mesh)
        other.data = kept
        kept.mul_(2)
        assert kept.item() == pytest.approx(2 * whole.sum().item())


@on_ranks(2, 4)
def test_one_rank_writes_its_piece():
    mesh = mesh_of_all()
    whole = numbers(7, 5)
    with ahead():
        loss = distribute_tensor(whole, mesh, [Shard(0)]).sum()
        if dist.get_rank() == 0:
            loss.to_local().add_(1)
            with pytest.raises(RuntimeError, match="this rank wrote its piece through to_local"):
                loss.item()
        else:
            assert loss.item() == pytest.approx(whole.sum().item())


@on_ranks(2, 4)
def test_nobody_reads():
    mesh = mesh_of_all()
    x = distribute_tensor(numbers(7, 5), mesh, [Shard(0)])
    with ahead():
        for _ in range(300):
            loss = x.sum()
        assert loss.item() == pytest.approx(numbers(7, 5).sum().item())


def test_environment():
    told = {None: "True", "": "True", "1": "True", "0": "False", "no": "use 0 or 1"}
    program = "from shardtensor import _C; print(_C.reduces_ahead())"
    runs = run_each(program, [Run(environment={"SHARDTENSOR_REDUCE_AHEAD": asked}) for asked in told])
    for says, run in zip(told.values(), runs, strict=True):
        assert says in (run.stdout or run.stderr)
