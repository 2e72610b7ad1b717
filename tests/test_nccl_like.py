"""What goes to NCCL, with ranks and data, on the CPU: with both kinds of groups of nccl_like.py.

Gloo's tests run here too, to check that results are right and on time. Other tests here check which calls are made.
"""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.skipif(
    tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 13), reason="this torch has no backends written in Python"
)
MORE = [
    *(("redistribute", name) for name in [
        "moves_at_once", "dtypes", "locals_of_any_strides", "odd_sizes", "from_summands", "scattered_before_it_moves",
        "pieces_become_summands", "to_summands_elsewhere", "some_ranks_stand_aside", "meshes_out_of_order",
    ]),
    *(("async", name) for name in ["all_pairs", "not_done_at_once", "chains", "writes", "gradients", "threads"]),
    *(("comm", name) for name in ["scatters", "strided"]),
    ("points", "on_four_ranks"),
    ("many", "as_one"),
]  # fmt: skip


@pytest.fixture(scope="module", params=["nccl_like", "nccl2_like"])
def ranks(request):
    from pool import Pool

    pool = Pool(4, request.param)
    yield pool
    pool.stop()


def the_calls(kind):
    """One call per move of one piece or list; at most one batch of messages, if the group takes batches."""
    import torch.distributed as dist
    from nccl_like import calls
    from oracle import mesh_of, place
    from shardtensor import DeviceMesh, Partial, Replicate, Shard, ShardTensor

    mesh = mesh_of((4,))
    me = dist.get_rank()
    even, uneven = torch.randn(8, 12, dtype=torch.float64), torch.randn(7, 11, dtype=torch.float64)

    def check(x, to, want, *expected, on=None):
        x.redistribute(on, [to])  # before the first such move, the ranks compare notes
        calls()
        y = x.redistribute(on, [to])
        made = calls()
        assert made == dict(expected), (x.placements, to, made)
        if want is not None:
            torch.testing.assert_close(y.full_tensor(), want)

    for data, cut, gather, scatter in (
        (even, "even", "all_gather_single", "reduce_scatter_single"),
        (uneven, "uneven", "allgather", "reduce_scatter"),
    ):
        for dim in (0, 1):
            x = place(data, mesh, (f"S({dim})",), cut)
            check(x, Replicate(), data, (gather, 1))
            check(x, Shard(1 - dim), data, ("all_to_all_single", 1))
            own = data * (me + 1)
            for op, want in (("sum", data * 10), ("avg", data * 2.5), ("product", data**4 * 24)):
                summand = ShardTensor.from_local(own, mesh, [Partial(op)], shape=data.shape)
                check(summand, Shard(dim), want, (scatter, 1))
                check(summand, Replicate(), want, ("allreduce", 1))
            largest = ShardTensor.from_local(own, mesh, [Partial("max")], shape=data.shape)
            check(largest, Shard(dim), torch.maximum(data, data * 4), ("all_to_all_single", 1))
    bits = torch.arange(12) + me
    for op, combine in (("band", torch.bitwise_and), ("bor", torch.bitwise_or), ("bxor", torch.bitwise_xor)):
        want = torch.arange(12)
        for other in (1, 2, 3):
            want = combine(want, torch.arange(12) + other)
        check(ShardTensor.from_local(bits, mesh, [Partial(op)], shape=(12,)), Replicate(), want, ("all_gather_single", 1))
    odd = ShardTensor.from_local(bits % 3 == 0, mesh, [Partial("bxor")], shape=(12,))
    check(odd, Replicate(), sum((torch.arange(12) + r) % 3 == 0 for r in range(4)) % 2 == 1, ("allreduce", 1))
    empty = place(torch.randn(0, 3), mesh, ("S(0)",), "even")
    check(empty, Replicate(), torch.empty(0, 3))
    # Among three of four ranks.
    some, others = (DeviceMesh("cpu", torch.tensor(ranks)) for ranks in ([0, 1], [1, 2]))
    x = place(torch.arange(12.0), some, ("S(0)",), "even")
    partners = {0: 1, 1: 2, 2: 1}.get(me, 0)
    calls()
    y = x.redistribute(others, [Shard(0)])
    made = calls()
    messages = made.get("send", 0) + made.get("recv", 0)
    assert 0 < messages <= partners if partners else messages == 0, made
    assert made.get("batch", 0) == (kind == "nccl2_like" and partners > 0), made
    assert set(made) <= {"send", "recv", "batch"}, made
    if me in (1, 2):
        assert torch.equal(y.to_local(), torch.arange(12.0).chunk(2)[me - 1])


def test_calls(ranks):
    ranks.run("test_nccl_like:the_calls", ranks.backend)


@pytest.mark.parametrize("seed", [0, 1])
def test_moves(ranks, seed):
    ranks.run("test_redistribute:moves", seed)


def test_the_example_trains(ranks):
    """The transformer, tensor parallel and data parallel on uneven sizes, has the losses of one process."""
    want = ranks.run("test_examples:losses", False)[0]
    for got in ranks.run("test_examples:losses", True):
        assert got == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize(("where", "name"), MORE, ids=lambda s: s)
def test_like_gloo(ranks, where, name):
    for shape in {"async": [((4,),), ((2, 2),)], "comm": [((4,),)]}.get(where, [()]):
        ranks.run(f"test_{where}:{name}", *shape)
