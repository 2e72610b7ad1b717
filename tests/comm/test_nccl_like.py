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
        "test_moves_at_once", "test_dtypes", "test_locals_of_any_strides", "test_odd_sizes", "test_from_summands", "test_scattered_before_it_moves",
        "test_pieces_become_summands", "test_to_summands_elsewhere", "test_some_ranks_stand_aside", "test_meshes_out_of_order",
    ]),
    *(("async", name) for name in ["all_pairs", "not_done_at_once", "chains", "writes", "dropped", "gradients", "threads"]),
    *(("comm", name) for name in ["scatters", "strided"]),
    ("points", "on_four_ranks"),
    *(("many", name) for name in ["as_one", "as_one_later", "not_done_at_once", "test_read_by_threads"]),
]  # fmt: skip


@pytest.fixture(scope="module", params=["nccl_like", "nccl2_like"])
def ranks(request):
    from pool import Pool

    pool = Pool(4, request.param)
    yield pool
    pool.stop()


def the_calls(kind):
    """One call per move of one piece or list; at most one batch of messages, if the group takes batches, between those concerned."""
    import torch.distributed as dist
    from nccl_like import calls
    from oracle import cut_sizes, mesh_of, place
    from shardtensor import DeviceMesh, Partial, Replicate, Shard, ShardTensor

    mesh = mesh_of((4,))
    me = dist.get_rank()

    def exchange(size, cut):  # of pieces of this cut; all want something
        held = [n > 0 for n in cut_sizes(size, 4, cut) or [1] * 4]
        if kind == "nccl_like":
            return [("all_to_all_single", 1)]
        messages = {"send": 3 * held[me], "recv": sum(held) - held[me]}
        return [("batch", 1), *((name, n) for name, n in messages.items() if n)]

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
            check(x, Shard(1 - dim), data, *exchange(data.shape[dim], cut))
            own = data * (me + 1)
            for op, want in (("sum", data * 10), ("avg", data * 2.5), ("product", data**4 * 24)):
                summand = ShardTensor.from_local(own, mesh, [Partial(op)], shape=data.shape)
                check(summand, Shard(dim), want, (scatter, 1))
                check(summand, Replicate(), want, ("allreduce", 1))
            largest = ShardTensor.from_local(own, mesh, [Partial("max")], shape=data.shape)
            check(largest, Shard(dim), torch.maximum(data, data * 4), *exchange(4, "even"))
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
    # Neighbours alone.
    x = place(torch.arange(16.0), mesh, ("S(0)",), "even")
    one_further = {0: [(5,), (4,), (4,), (3,)]}
    moved = ShardTensor.from_local(torch.arange(16.0).split([5, 4, 4, 3])[me], mesh, [Shard(0)], sharding_shapes=one_further)
    x.redistribute(placements=moved.placements, sharding_shapes=one_further)
    calls()
    y = x.redistribute(placements=moved.placements, sharding_shapes=one_further)
    made = calls()
    assert torch.equal(y.to_local(), moved.to_local())
    if kind == "nccl2_like":
        assert made == {"batch": 1} | ({"send": 1} if me else {}) | ({"recv": 1} if me < 3 else {}), made
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
    ranks.run(the_calls, ranks.backend)


@pytest.mark.parametrize("seed", [0, 1])
def test_moves(ranks, seed):
    ranks.run("test_redistribute:test_moves", seed)


def test_the_example_trains(ranks):
    """The transformer, tensor parallel and data parallel on uneven sizes, has the losses of one process."""
    want = ranks.run("test_examples:losses", False)[0]
    for got in ranks.run("test_examples:losses", True):
        assert got == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize(("where", "name"), MORE, ids=lambda s: s.removeprefix("test_"))
def test_like_gloo(ranks, where, name):
    for shape in {"async": [((4,),), ((2, 2),)], "comm": [((4,),)]}.get(where, [()]):
        ranks.run(f"test_{where}:{name}", *shape)


# ---- one test for each hazard; each fails without the line of csrc/comm that is named ----


def moves_of_each_kind():
    """Everything that a move may start, as functions that start it."""
    import torch.distributed as dist
    from oracle import mesh_of, place
    from shardtensor import DeviceMesh, Partial, Replicate, Shard, ShardTensor, redistribute

    mesh = mesh_of((4,))
    some, others = (DeviceMesh("cpu", torch.tensor(ranks)) for ranks in ([0, 1], [1, 2]))
    even, uneven = torch.randn(8, 12), torch.randn(7, 11)
    for data, cut in ((even, "even"), (uneven, "uneven")):
        for start, end in (("S(0)", Replicate()), ("S(1)", Replicate()), ("S(0)", Shard(1))):
            x = place(data, mesh, (start,), cut)
            yield lambda x=x, end=end: x.redistribute(placements=[end], async_op=True)
        for end in (Shard(0), Replicate()):
            x = ShardTensor.from_local(data * (dist.get_rank() + 1), mesh, [Partial("avg")], shape=data.shape)
            yield lambda x=x, end=end: x.redistribute(placements=[end], async_op=True)
    x = place(even, some, ("S(0)",), "even")
    yield lambda: x.redistribute(others, [Shard(0)], async_op=True)
    for start, end in (("S(0)", "R"), ("S(0)", "S(1)"), ("P", "R"), ("P", "S(0)")):  # one call for all; some are dropped at once
        xs = [place(data, mesh, (start,), cut) for data, cut in ((even, "even"), (uneven, "uneven"), (even, "empty"))]
        target = {"R": Replicate(), "S(0)": Shard(0), "S(1)": Shard(1)}[end]
        yield lambda xs=xs, target=target: redistribute(xs, [target], async_op=True)[1]


def tells_what_is_lost(kind):
    """The groups of these tests themselves."""
    import gc

    import nccl_like
    import torch.distributed as dist

    nccl_like.hold()
    try:
        out = torch.empty(4)
        work = dist.all_to_all_single(out, torch.arange(4.0), async_op=True)
        del out
        gc.collect()
        assert not nccl_like.lost()
        del work
        gc.collect()
        assert nccl_like.lost() == (["all_to_all_single"] if kind == "nccl2_like" else [])
    finally:
        nccl_like.release()
        nccl_like.forget()
    dist.barrier()


def dropped_in_flight(kind):
    """Hazard a: nccl2 does not keep the outputs of a call whose work was dropped (leave() in in_flight.cpp)."""
    import gc

    import nccl_like
    from shardtensor import _C

    for i, move in enumerate(moves_of_each_kind()):
        move().to_local()  # the ranks have compared notes
        gc.collect()
        nccl_like.hold()
        before = nccl_like.in_flight()
        try:
            y = move()
            if i % 2:
                y = y.detach()  # it has it too
            begun = nccl_like.in_flight() - before
            del y
            gc.collect()
            assert not nccl_like.lost(), (i, nccl_like.lost())
            assert _C.dropped_in_flight() == (begun > 0), (i, begun)
        finally:
            nccl_like.release()
        _C.drain_dropped()
        assert _C.dropped_in_flight() == 0
        assert nccl_like.in_flight() == before  # and then they are freed


def first_two_empty(kind):
    """Hazard d: two outputs without memory have one address (`by_address`). Pieces travel one by one then, the empty ones not at all."""
    import nccl_like
    from oracle import mesh_of
    from shardtensor import Replicate, Shard, ShardTensor

    mesh = mesh_of((4,))
    whole = torch.arange(12.0).view(4, 3)
    for cut in ([0, 0, 4, 0], [0, 0, 1, 3], [0, 3, 0, 1]):
        mine = whole.split(cut)[mesh.get_local_rank()]
        for dim in (0, 1):
            data = whole if dim == 0 else whole.t().contiguous()
            piece = mine if dim == 0 else mine.t().contiguous()
            x = ShardTensor.from_local(piece, mesh, [Shard(dim)], sharding_shapes={0: [tuple(s) for s in sizes_of(data, dim, cut)]})
            x.redistribute(placements=[Replicate()])  # the ranks compare notes
            nccl_like.calls()
            assert torch.equal(x.redistribute(placements=[Replicate()]).to_local(), data), (cut, dim)
            one_by_one = kind == "nccl2_like" and cut[:2] == [0, 0]
            assert nccl_like.calls() == ({"broadcast": sum(n > 0 for n in cut)} if one_by_one else {"allgather": 1}), (cut, dim)


def sizes_of(data, dim, cut):
    return [[*data.shape[:dim], n, *data.shape[dim + 1 :]] for n in cut]


def starts_of_several(_):
    """What is packed for several tensors starts at multiples of 16 bytes, whatever their sizes and dtypes (PackedBuffer in coalescing.cpp)."""
    import nccl_like
    from oracle import mesh_of, place
    from shardtensor import DeviceMesh, Replicate, Shard, redistribute

    mesh, some = mesh_of((4,)), DeviceMesh("cpu", torch.tensor([3, 1, 2]))
    dtypes = [torch.uint8, torch.bfloat16, torch.bool, torch.float64]
    wholes = [(torch.arange(rows * 7) % 2).view(rows, 7).to(dtype) for rows, dtype in zip((5, 3, 9, 1), dtypes, strict=True)]
    for cut in ("even", "uneven", "empty"):
        for dim, to, on in ((0, Replicate(), mesh), (1, Replicate(), mesh), (0, Shard(1), mesh), (1, Shard(0), mesh), (0, Shard(1), some)):
            xs = [place(whole, mesh, (f"S({dim})",), cut) for whole in wholes]
            redistribute(xs, [to], on)  # the ranks compare notes
            nccl_like.unaligned()
            ys = redistribute(xs, [to], on)
            assert not nccl_like.unaligned(), (cut, dim, to)
            for y, whole in zip(ys, wholes, strict=True):
                assert torch.equal(y.redistribute(mesh, [Replicate()]).to_local(), whole)


def starts_of_one(kind):
    """So does what is staged for one tensor (comm::spacing()). An all-to-all of the older group may have no gaps."""
    import nccl_like
    import torch.nn.functional as F
    from oracle import mesh_of, place
    from shardtensor import DeviceMesh, Replicate, Shard

    mesh, some, grid = mesh_of((4,)), DeviceMesh("cpu", torch.tensor([3, 1, 2])), mesh_of((2, 2))
    for dtype in (torch.uint8, torch.bfloat16, torch.float64):
        whole = (torch.arange(13 * 11) % 5).view(13, 11).to(dtype)
        twice = [Shard(0), Shard(1)]
        moves = [(mesh, ("S(1)",), Replicate(), mesh), (mesh, ("S(0)",), Shard(0), some), (grid, ("S(0)", "S(1)"), Shard(0), mesh)]
        moves += [(grid, ("S(0)", "S(1)"), placements, grid) for placements in ([Shard(1), Shard(0)], twice[::-1])]
        if kind == "nccl2_like":
            moves += [(mesh, ("S(0)",), Shard(1), mesh), (mesh, ("S(1)",), Shard(0), mesh)]
        for cut in ("even", "uneven", "empty"):
            for here, placements, to, there in moves:
                x = place(whole, here, placements, cut)
                to = to if isinstance(to, list) else [to]
                x.redistribute(there, to)  # the ranks compare notes
                nccl_like.unaligned()
                y = x.redistribute(there, to)
                in_place = (to == [Shard(1)] and x.to_local().shape[0] == 1) or (to == [Shard(0)] and y.to_local().shape[0] == 1)
                assert in_place or not nccl_like.unaligned(), (dtype, cut, placements, to)
                assert torch.equal(y.redistribute(mesh, [Replicate()]).to_local(), whole), (dtype, cut, placements, to)
    image = torch.randn(1, 1, 13, 7)
    for cut in ("even", "uneven", "empty"):  # a halo; rows that a grid points at, and their gradients; places that a pool has kept
        x = place(image, mesh, ("S(2)",), cut).requires_grad_()
        weight = place(torch.randn(1, 1, 3, 3), mesh, ("R",), "even")
        theta = torch.tensor([[[0.9, 0.1, 0.0], [0.2, 1.1, 0.1]]])
        at = place(F.affine_grid(theta, [1, 1, 13, 7], align_corners=False), mesh, ("S(1)",), cut)
        indexed = place(image[:, :, ::2], mesh, ("S(2)",), cut)
        places = place(torch.randperm(91)[:49].view(1, 1, 7, 7), mesh, ("S(2)",), cut)
        ops = {
            "conv2d": (F.conv2d, x, weight, None, 1, 1),
            "grid_sample": (F.grid_sample, x, at, "bilinear", "zeros", False),
            "max_unpool2d": (F.max_unpool2d, indexed.requires_grad_(), places, (2, 1), None, 0, (1, 1, 13, 7)),
        }
        for name, (op, *given) in ops.items():
            op(*given).sum().backward()
            nccl_like.unaligned()
            op(*given).sum().backward()
            byte_by_byte = set(nccl_like.unaligned())
            assert byte_by_byte <= {"allreduce"}, (cut, name, byte_by_byte)


def an_error_in_a_batch(_):
    """Hazard k: a batch that nobody ends makes all later ones raise (~Messages in comm.cpp)."""
    import nccl_like
    import torch.distributed as dist
    from oracle import place
    from shardtensor import DeviceMesh, Shard, set_fault_notice

    me = dist.get_rank()
    some, others = (DeviceMesh("cpu", torch.tensor(ranks)) for ranks in ([0, 1], [1, 2]))
    x = place(torch.arange(12.0), some, ("S(0)",), "even")
    x.redistribute(others, [Shard(0)])
    set_fault_notice(False)
    try:
        if me < 3:
            nccl_like.fail_next("recv" if me else "send")  # the first of each rank
            with pytest.raises(RuntimeError, match="refused, as a test wants it"):
                x.redistribute(others, [Shard(0)])
    finally:
        set_fault_notice(True)
    dist.barrier()
    y = x.redistribute(others, [Shard(0)])
    if me in (1, 2):
        assert torch.equal(y.to_local(), torch.arange(12.0).chunk(2)[me - 1])


def a_lazy_group():
    """Hazard j: the first call makes the communicator of all ranks (`at_once`)."""
    import nccl_like
    import torch.distributed as dist
    from oracle import place
    from shardtensor import DeviceMesh, Shard

    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    some, others = (DeviceMesh("cpu", torch.tensor(ranks)) for ranks in ([0, 1], [1, 2]))
    x = place(torch.arange(12.0), some, ("S(0)",), "even")
    x.redistribute(others, [Shard(0)])
    nccl_like.calls()
    backend._has_communicator = False
    try:
        if dist.get_rank() < 3:
            with pytest.raises(RuntimeError, match="is the first use of the default process group, nccl2"):
                x.redistribute(others, [Shard(0)])
        assert not nccl_like.calls()
    finally:
        backend._has_communicator = True
    dist.barrier()
    y = x.redistribute(others, [Shard(0)])
    if dist.get_rank() in (1, 2):
        assert torch.equal(y.to_local(), torch.arange(12.0).chunk(2)[dist.get_rank() - 1])


def sums_of_no_dims():
    """Nothing could notice that one rank makes one alone, so it starts when all ranks read it."""
    from nccl_like import calls
    from oracle import mesh_of, place
    from shardtensor import set_reduce_ahead

    x = place(torch.randn(8, dtype=torch.float64), mesh_of((4,)), ("S(0)",), "even")
    set_reduce_ahead(True)
    try:
        x.sum().item()  # before the first such move, the ranks compare notes
        calls()
        total = x.sum()
        assert not calls()
        total.item()
        assert calls() == {"allreduce": 1}
    finally:
        set_reduce_ahead(False)


def test_sums_of_no_dims(ranks):
    ranks.run(sums_of_no_dims)


def test_dropped_in_flight(ranks):
    ranks.run(tells_what_is_lost, ranks.backend)
    ranks.run(dropped_in_flight, ranks.backend)


@pytest.mark.parametrize("hazard", ["first_two_empty", "starts_of_several", "starts_of_one", "an_error_in_a_batch"])
def test_hazards(ranks, hazard):
    ranks.run(globals()[hazard], ranks.backend)


def test_a_lazy_group(ranks):
    if ranks.backend != "nccl2_like":
        pytest.skip("the older group makes a communicator for each pair of ranks")
    ranks.run(a_lazy_group)
