"""rebalance: cuts that give all ranks the same work, by the fewest bytes; and the monitor that says when it pays."""

from __future__ import annotations

import itertools
import random

import pytest
import shardtensor as st
import torch
import torch.distributed as dist
from oracle import mesh_here, mesh_of
from pool import on_ranks
from shardtensor import _C, Replicate, Shard
from shardtensor.data import BalanceMonitor


def ends_of(lengths):
    return [0, *itertools.accumulate(lengths)]


def moved(before, after):
    pairs = zip(itertools.pairwise(ends_of(before)), itertools.pairwise(ends_of(after)), strict=True)
    return sum(d - c - max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in pairs)


def dearest(costs, lengths):
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(ends_of(lengths)))


def draw(number):
    drawn = random.Random(number)
    ranks, rows = drawn.randint(1, 5), drawn.randint(0, 12)
    costs = [[drawn.choice([0, 1, 2, 5, 9]), 1, drawn.random()][number % 3] for _ in range(rows)]
    before = [b - a for a, b in itertools.pairwise([0, *sorted(drawn.randint(0, rows) for _ in range(ranks - 1)), rows])]
    return costs, before, drawn.choice([0, 0, 0.1, 0.5])


def test_cut_is_the_best_and_moves_least():
    """Against all cuts there are."""
    from shardtensor.data._balance import balanced_cut

    for number in range(1000):
        costs, before, tolerance = draw(number)
        step = 1 + number % 2 * (number // 2 % 3)
        costs = costs[: len(costs) // step * step]
        before = [min(b, len(costs)) - min(a, len(costs)) for a, b in itertools.pairwise(ends_of(before))]
        got = balanced_cut(costs, before, tolerance, step)
        all_cuts = [
            [b - a for a, b in itertools.pairwise([0, *ends, len(costs)])]
            for ends in itertools.combinations_with_replacement(range(0, len(costs) + 1, step), len(before) - 1)
        ]
        most = min(dearest(costs, cut) for cut in all_cuts) * (1 + tolerance) * (1 + 1e-9)
        assert got in all_cuts and dearest(costs, got) <= most, (costs, before, tolerance, got)
        assert moved(before, got) == min(moved(before, cut) for cut in all_cuts if dearest(costs, cut) <= most), (costs, before, tolerance, got)


@pytest.mark.parametrize("before", [[10, 7], [0, 17], [6, 6, 6], [1, 0, 16]], ids=str)
@on_ranks(of=lambda before: len(before))
def test_rebalance(before):
    from shardtensor.data._balance import balanced_cut

    mesh, rank, rows = mesh_here(), dist.get_rank(), sum(before)
    whole = torch.randn(3, rows, 2, dtype=torch.float64)
    x = st.distribute_tensor(whole, mesh, [Shard(1)], sharding_shapes={0: before}).requires_grad_()
    costs = [float((i * 7) % 5) for i in range(rows)]
    want = balanced_cut(costs, before, 0.02)
    cut_costs = st.distribute_tensor(torch.tensor(costs), mesh, [Shard(0)])
    for given in (costs, torch.tensor(costs), cut_costs):
        _C.reset_comm_counts()
        y = x.rebalance(costs=given)
        sent = torch.tensor(sum(size for kind, (_, size) in _C.comm_counts().items() if kind == "all_to_all"))
        dist.all_reduce(sent)
        assert sent == moved(before, want) * 3 * 2 * 8, (sent, before, want)
        assert [s[1] for s in y.sharding_shapes()[0]] == want
        torch.testing.assert_close(y.detach().full_tensor(), whole)
    weight = torch.arange(2.0 * rows, dtype=torch.float64).view(rows, 2)
    (grad,) = torch.autograd.grad((y * st.distribute_tensor(weight, mesh, [Replicate()])).sum(), x)
    torch.testing.assert_close(grad.full_tensor(), weight.expand(3, -1, -1))

    times = [1.0 + 2 * r for r in range(mesh.size())]
    per_row = [t / n for t, n in zip(times, before, strict=True) for _ in range(n)]
    want = balanced_cut(per_row, before, 0.02)
    for given in (times, times[rank]):
        assert [s[1] for s in x.rebalance(times=given).sharding_shapes()[0]] == want
    assert x.rebalance(costs=[0.0] * rows) is x  # nothing to gain
    cut = [s[1] for s in x.rebalance(times=times, multiple_of=4).sharding_shapes()[0]]
    assert sum(cut) == rows and all(end % 4 == 0 or end == rows for end in ends_of(cut))


@on_ranks(4)
def test_two_mesh_dims():
    mesh = mesh_of((2, 2))
    whole = torch.randn(8, 6)
    x = st.distribute_tensor(whole, mesh, [Shard(0), Shard(1)], sharding_shapes={0: [4, 4], 1: [1, 5]})
    y = x.rebalance(costs=[5, 1, 1, 1, 1, 1, 1, 1], mesh_dim=0)
    assert [s[0] for s in y.sharding_shapes()[0]] == [2, 6] and [s[1] for s in y.sharding_shapes()[1]] == [1, 5]
    torch.testing.assert_close(y.full_tensor(), whole)
    z = x.rebalance(times=float([3, 1, 1, 1][dist.get_rank()]), mesh_dim=-1)  # the slower of two ranks counts
    assert [s[1] for s in z.sharding_shapes()[1]] == [1, 5] and torch.equal(z.full_tensor(), whole)
    for placements, options, error, text in (
        ([Shard(0), Shard(1)], {}, ValueError, "cut by 2 mesh dims; argument 'mesh_dim'"),
        ([Replicate(), Shard(1)], {"mesh_dim": 0}, ValueError, "mesh dim 0 of .* cuts nothing"),
        ([Shard(0), Shard(0)], {"mesh_dim": 0}, NotImplementedError, "several mesh dims cut dim 0"),
    ):
        with pytest.raises(error, match=text):
            st.distribute_tensor(whole, mesh, placements).rebalance(costs=[1] * 8, **options)


@on_ranks(2)
def test_refused_on_all_ranks():
    x, rank = st.distribute_tensor(torch.randn(4, 2), mesh_here(), [Shard(0)]), dist.get_rank()
    for options, error, text in (
        ({}, TypeError, "give one of the arguments"),
        ({"costs": [1, 2, 3]}, ValueError, r"sizes \[3\]; give one cost for each of the 4 rows"),
        ({"costs": [1, 2, 3, rank]}, ValueError, "'costs' differs between ranks 0 and 1"),
        ({"costs": [1, 2, 3, -1]}, ValueError, "on rank 0 that is negative or not finite"),
        ({"times": float("nan") if rank else 1.0}, ValueError, "on rank 1 that is negative or not finite"),
        ({"times": [1.0]}, ValueError, "has 1 entries; mesh dim 0 has 2 ranks"),
        ({"times": 1.0, "tolerance": -1}, ValueError, "'tolerance' -1 and 'multiple_of' 1"),
        ({"times": 1.0, "multiple_of": 0}, ValueError, "'multiple_of' 0"),
    ):
        with pytest.raises(error, match=text):
            x.rebalance(**options)
        dist.barrier()


@on_ranks(3)
def test_monitor():
    rank, now = dist.get_rank(), [0.0]
    x = st.distribute_tensor(torch.randn(30, 1000), mesh_here(), [Shard(0)], sharding_shapes={0: [10, 10, 10]})

    def monitor_after(seconds_per_row, **options):
        """A monitor that has seen three steps."""
        monitor = BalanceMonitor(clock=lambda: now[0], **options)
        for noise in (1.0, 1.3, 0.9):
            with monitor:
                now[0] += noise * sum(seconds_per_row[x.offsets()[0] : x.offsets()[0] + len(x.to_local())])
        return monitor

    slow_first = [3.0] * 10 + [1.0] * 20
    monitor = monitor_after(slow_first)
    verdict = monitor.verdict(x)
    assert verdict.pays and verdict.times == pytest.approx([30.0, 10.0, 10.0]) and verdict.step == pytest.approx(30)
    assert verdict.cut == [6, 12, 12] or verdict.balanced <= 18, verdict
    told = [None] * 3
    dist.all_gather_object(told, verdict)
    assert told == [verdict] * 3
    assert "pays: the slowest rank takes 30 s" in str(verdict)
    assert not monitor_after(slow_first, bandwidth=1.0, steps_ahead=2).verdict(x).pays  # moving takes longer
    x = x.rebalance(times=verdict.times)
    monitor.restart()
    after = monitor_after(slow_first).verdict(x)
    assert not after.pays and after.step == pytest.approx(verdict.balanced) and "does not pay" in str(after)
    with pytest.raises(ZeroDivisionError), monitor:
        1 / 0  # noqa: B018
    assert not monitor.verdict(x).pays  # a step that failed is not counted
    assert rank == dist.get_rank()
