"""The collective layer: groups of every backend, and what the other ranks see when one of them fails."""

from __future__ import annotations

import faulthandler
import functools
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from oracle import mesh_of, place
from shardtensor import _C, DeviceMesh, Partial, Replicate, Shard, ShardTensor, distribute_tensor, redistribute
from shardtensor.tensor._mesh import as_mesh
from torch.distributed.tensor.placement_types import _StridedShard

WHERE_WE_FOUND_IT = os.pathsep.join(p for p in sys.path if p)

# ---- the fake group: one process that acts as a rank of many ----

FAKE = """
import itertools, sys
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=6)
import shardtensor as st
from shardtensor import Partial, Replicate, Shard
from oracle import place

for shape in ((6,), (2, 3)):
    mesh = st.init_device_mesh("cpu", shape)
    single = ["R", "S(0)", "S(1)", "P"]
    to = {"R": Replicate(), "S(0)": Shard(0), "S(1)": Shard(1), "P": Partial()}
    starts = list(itertools.product(single, repeat=len(shape)))
    for start, end, async_op in itertools.product(starts, starts, (False, True)):
        if any(e == "P" != s for s, e in zip(start, end)):
            continue
        for cut in ("even", "uneven") if len(shape) == 1 else ("even",):
            x = place(torch.randn(7, 5), mesh, start, cut)
            y = x.redistribute(placements=[to[e] for e in end], async_op=async_op)
            assert list(y._local_tensor.shape) == y._layout.local_sizes([7, 5]), (start, end)
    for placements in itertools.product((Replicate(), Shard(0), Shard(1)), repeat=len(shape)):
        y = st.distribute_tensor(torch.randn(7, 5), mesh, placements)
        assert list(y.to_local().shape) == y._layout.local_sizes([7, 5])
    for op in (Partial("max"), Partial("avg"), Partial("product")):
        y = st.ShardTensor.from_local(torch.randn(7, 5), mesh, [op] * len(shape), shape=(7, 5))
        assert y.full_tensor().shape == (7, 5)
        y.redistribute(placements=[Shard(0)] * len(shape)).to_local()
x = place(torch.randn(7, 5), st.init_device_mesh("cpu", (6,)), ("S(0)",), "uneven").requires_grad_()
(torch.softmax(x @ x.t(), 0).sum() + x.cumsum(0).max()).backward()
assert x.grad.shape == (7, 5)
print("all shapes are right")
"""


def test_fake_group():
    environment = {**os.environ, "PYTHONPATH": WHERE_WE_FOUND_IT}
    done = subprocess.run([sys.executable, "-c", FAKE], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0 and "all shapes are right" in done.stdout, done.stderr[-3000:]


# ---- Gloo: values ----


def scatters(shape):
    """Pieces of any size and stride, from any rank; empty ones too."""
    view = as_mesh(mesh_of(shape))
    me, n = dist.get_rank(), dist.get_world_size()
    data = torch.arange(n * (n + 1) * 2, dtype=torch.float32).reshape(2, -1)
    for source in range(n):
        for sizes in (list(range(n)), [2] * n, [0] * n, [0] * (n - 1) + [3]):
            pieces = list(data[:, : sum(sizes)].split_with_sizes(sizes, 1))
            mine = torch.empty(2, sizes[me])
            _C.scatter(mine, pieces if me == source else [], view, 0, source)
            assert torch.equal(mine, pieces[me])


def uneven_numels(shape):
    view = as_mesh(mesh_of(shape))
    me, n = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.uint8, torch.bool, torch.bfloat16, torch.complex64, torch.int16, torch.float8_e4m3fn):
        pieces = [torch.zeros(c, 2).to(dtype) for c in range(n)]
        _C.all_gather(pieces, torch.full((me, 2), 1).to(dtype), view, 0)
        assert all(torch.equal(p.float().sum(), torch.tensor(2.0 * c)) for c, p in enumerate(pieces) if dtype != torch.complex64)
    nothing = ShardTensor.from_local(torch.empty(0, 3), mesh_of(shape), [Partial()], shape=(0, 3))
    nothing.redistribute(placements=[Replicate()])  # the ranks compare notes
    _C.reset_comm_counts()
    nothing.redistribute(placements=[Replicate()])
    assert not any(calls for calls, _ in _C.comm_counts().values())  # nothing has to be sent


def large_reductions(shape):
    """Few bytes are gathered and combined here (Backend::latency). Of these, Gloo itself adds up what it can; NaN is not lost."""
    mesh, me, n = mesh_of(shape), dist.get_rank(), dist.get_world_size()
    arithmetic = {"sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}
    bitwise = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}
    whole_numbers = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64, torch.bool]
    floats = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
    for dtype in [*whole_numbers, *floats, torch.complex64]:
        summands = [((torch.arange(20000) + r) % 4).double() for r in range(n)]
        if dtype in floats:
            summands[1][7] = float("nan")
        if dtype in whole_numbers:
            summands = [s.bool() if dtype == torch.bool else s.long() for s in summands]
        if dtype in (torch.uint32, torch.uint64):
            summands[1][5] = 2**31 if dtype == torch.uint32 else 2**62
        ops = {"sum": torch.add} if dtype == torch.complex64 else arithmetic | (bitwise if dtype in whole_numbers else {})
        for op, combine in ops.items():
            x = ShardTensor.from_local(summands[me].to(dtype), mesh, [Partial(op)], shape=(20000,))
            got = x.redistribute(placements=[Replicate()]).to_local()
            want = functools.reduce(combine, summands).to(dtype)
            assert got.dtype == dtype and torch.equal(got.double().nan_to_num(99), want.double().nan_to_num(99)), (dtype, op)
        if dtype in floats:  # sums of half overflow, their mean does not
            x = ShardTensor.from_local((summands[me] * 16384).to(dtype), mesh, [Partial("avg")], shape=(20000,))
            got = x.redistribute(placements=[Replicate()]).to_local().double()
            want = functools.reduce(torch.add, [(s * 16384).to(dtype).double() for s in summands]) / n
            torch.testing.assert_close(got, want, rtol=0.07, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", [scatters, uneven_numels, large_reductions], ids=lambda f: f.__name__)
@pytest.mark.parametrize("world", [2, 3])
def test_gloo(pools, world, case):
    pools(world).run(case, (world,))


def strided(shape):
    """A strided shard has several runs. If the cut dim is an inner one, they are not adjacent in memory."""
    mesh = mesh_of(shape)
    data = torch.arange(3 * 13 * 2, dtype=torch.float64).reshape(3, 13, 2)
    for dim in (0, 1):
        for async_op in (False, True):
            x = distribute_tensor(data, mesh, [_StridedShard(dim, split_factor=2)])
            assert torch.equal(x.redistribute(placements=[Replicate()], async_op=async_op).to_local(), data)
            for other in (0, 1, 2):
                y = x.redistribute(placements=[Shard(other)], async_op=async_op)
                assert torch.equal(y.full_tensor(), data)
                assert torch.equal(y.redistribute(placements=x.placements, async_op=async_op)._local_tensor, x._local_tensor)


@pytest.mark.parametrize("world", [2, 3])
def test_strided(pools, world):
    pools(world).run(strided, (world,))


# ---- Gloo: failures, in processes of their own ----

SECONDS = 1.5


def fail(rank, world, store, results):
    os.environ["OMP_NUM_THREADS"] = "1"
    faulthandler.dump_traceback_later(50)  # before failures() gives up

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=40))
    import shardtensor  # noqa: F401

    def mesh():
        group = dist.new_group(list(range(world)))
        dist.barrier(group)  # connects, which may take longer than the timeout of a call
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=SECONDS), group)
        return DeviceMesh.from_group(group, "cpu")

    dist.barrier()
    meshes = [mesh() for _ in range(7)]
    several = []
    redistribute([place(torch.ones(6, 4), meshes[0], ("S(0)",), "even")] * 2, [Shard(1)])  # the ranks compare notes
    data = torch.ones(6, 4)
    calls = {  # after an error the ranks compare what they call, so what shall fail while it is in flight comes first
        "several": lambda m: several.extend(redistribute([place(data, m, ("S(0)",), "even")] * 2, [Shard(1)], async_op=True))
        or several[1] + 1,
        "several, another of them": lambda _: several[0] + 1,
        "sliced wrongly on one rank": lambda m: place(data, m, ("S(0)",), "uneven").full_tensor(),
        "an op": lambda m: torch.linalg.svdvals(place(data, m, ("S(0)",), "uneven")),
        "an op's own": lambda m: place(data, m, ("S(0)",), "uneven").softmax(0),
        "asynchronous": lambda m: place(data, m, ("S(0)",), "even").redistribute(placements=[Shard(1)], async_op=True) + 1,
        "killed": lambda m: place(data, m, ("P",), "even").redistribute(placements=[Replicate()]),
    }
    if rank == world - 1:
        try:
            place(data, meshes[2], ("S(0)",), "even").redistribute(placements=[Shard(2)])
        except Exception as error:
            results.put((rank, "own", type(error).__name__, str(error), 0.0))
        time.sleep(5.5 * SECONDS)  # takes no part in five calls
        os.kill(os.getpid(), signal.SIGKILL)
    for (what, call), on in zip(calls.items(), meshes, strict=True):
        start = time.monotonic()
        try:
            call(on)
            results.put((rank, what, "nothing", "", 0.0))
        except Exception as error:
            kind = "DistBackendError" if isinstance(error, dist.DistBackendError) else type(error).__name__
            results.put((rank, what, kind, str(error), time.monotonic() - start))
    results.put((rank, "end", "", "", 0.0))


@pytest.fixture(scope="module")
def failures():
    context = mp.get_context("spawn")
    store = os.path.join(tempfile.mkdtemp(), "store")
    results = context.Queue()
    ranks = [context.Process(target=fail, args=(r, 3, store, results), daemon=True) for r in range(3)]
    for process in ranks:
        process.start()
    seen, ended = {}, 0
    while ended < 2:
        rank, what, kind, text, seconds = results.get(timeout=60)
        ended += what == "end"
        seen[rank, what] = kind, text, seconds
    for process in ranks:
        process.kill()
        process.join()
    return seen


STEPS = {
    "sliced wrongly on one rank": "from S(0)[1,2,3] on cpu mesh (3) to R on cpu mesh (3), step all_gather along mesh dim 0",
    "an op": "in aten::_linalg_svd",
    "an op's own": "in aten::_softmax on [6, 4] S(0)[1,2,3] on cpu mesh (3)",
    "asynchronous": "step all_to_all along mesh dim 0",
    "several": "step all_to_all along mesh dim 0",
    "several, another of them": "step all_to_all along mesh dim 0",
    "killed": "step all_reduce along mesh dim 0",
}


@pytest.mark.parametrize("what", STEPS)
def test_failure_reaches_all(failures, what):
    for rank in (0, 1):
        kind, text, seconds = failures[rank, what]
        assert kind == "DistBackendError", text
        assert f"rank {rank}" in text and " along mesh dim 0" in text, text
        assert "redistribute: from " in text or "own" in what, text
        assert STEPS[what] in text, text
        assert seconds < 4 * SECONDS


def test_failing_rank_says_so_itself(failures):
    kind, text, _ = failures[2, "own"]
    assert kind != "nothing" and "2" in text


# ---- NCCL, with the one rank that one GPU can have ----

NCCL = """
import torch, torch.distributed as dist
torch.cuda.set_device(0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
import shardtensor as st
from shardtensor import Partial, Replicate, Shard, _C
_C.comm_call_alone(True)
mesh = st.init_device_mesh("cuda", (1,))
data = torch.randn(7, 5, device="cuda")
to = [Replicate(), Shard(0), Shard(1), Partial(), Partial("avg"), Partial("max")]
for start in to:
    for end in to[:3]:
        for async_op in (False, True):
            x = st.ShardTensor.from_local(data.clone(), mesh, [start], shape=(7, 5))
            y = x.redistribute(placements=[end], async_op=async_op)
            other = torch.cuda.Stream()
            with torch.cuda.stream(other):
                got = y.to_local() * 1
            torch.cuda.current_stream().wait_stream(other)
            assert torch.equal(got, data), (start, end)
            assert torch.equal(y.to_local(), data), (start, end)
counts = _C.comm_counts()
assert {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"} <= set(counts), counts
for placements in to[:3]:
    assert torch.equal(st.distribute_tensor(data, mesh, [placements]).full_tensor(), data)
dist.destroy_process_group()
print("all values are right")
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a GPU")
def test_nccl_with_one_rank():
    environment = {**os.environ, "PYTHONPATH": WHERE_WE_FOUND_IT}
    done = subprocess.run([sys.executable, "-c", NCCL], capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0 and "all values are right" in done.stdout, done.stderr[-3000:]
