"""Communication is counted, refused, budgeted, logged and drawn."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import pickle
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forks import Run, run_each
from pool import on_ranks
from torch import nn

ITEM = 8  # bytes of a double


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 7, dtype=torch.float64)
        self.down = nn.Linear(7, 5, dtype=torch.float64)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def sharded(rows=7, columns=4, cut="uneven", placement="S(0)"):
    from oracle import mesh_here, place

    whole = torch.arange(float(rows * columns), dtype=torch.float64).view(rows, columns)
    return whole, place(whole, mesh_here(), (placement,), cut)


# ---- torch.profiler ----


def here():
    return f"at {Path(__file__).name}:{sys._getframe(1).f_lineno}"


def collectives_are_profiled():
    import shardtensor
    from shardtensor import _C, Replicate, Shard
    from shardtensor.debug._explain import in_bytes
    from torch.profiler import ProfilerActivity, profile

    class Reader(nn.Module):
        def forward(self, x):
            self.out, self.at = x.redistribute(placements=[Replicate()]), here()
            return self.out

    reader = Reader()
    model = nn.Sequential(reader)
    _, x = sharded(columns=5)
    _, y = sharded(columns=6)
    weight = shardtensor.distribute_tensor(torch.ones(5, 9, dtype=torch.float64), x.device_mesh, [Shard(0)]).requires_grad_()
    for _ in range(2):  # the first time, ranks also agree about each kind of move
        whole = weight.redistribute(placements=[Replicate()])
        _C.reset_comm_counts()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            model(x)
            _, exchanged = x.redistribute(placements=[Shard(1)]), here()
            _, together = shardtensor.redistribute([x, y], [Replicate()]), here()
            shardtensor.set_reduce_ahead(True)
            loss, ahead = (x @ whole).sum(), here()
            shardtensor.set_reduce_ahead(False)
            _, read = loss.item(), here()
            _, backward = loss.backward(), here()
    sent, more = x.to_local().nbytes, y.to_local().nbytes
    ranges = [e for e in seen.events() if e.name.startswith("shardtensor:")]
    names = [e.name.removeprefix("shardtensor: ") for e in ranges]
    assert names[0] == f"all_gather S(0)->R {in_bytes(sent)} {reader.at} (Sequential.Reader)", names
    assert names[1] == f"wait for all_gather S(0)->R {reader.at} (Sequential.Reader)", names
    assert names[2].startswith("all_to_all S(0)->S(1) ") and names[2].endswith(exchanged), names
    assert names[3] == f"wait for all_to_all S(0)->S(1) {exchanged}", names
    joint = r"all_gather S\(0\)->R and 1 more (\d+) B " + together
    assert int(re.fullmatch(joint, names[4])[1]) >= sent + more, names  # parts of one call start at multiples of 16 bytes
    assert names[6:8] == [
        f"all_reduce P(sum)->R 40 B {ahead}",  # the value, and the hash of its identity
        f"wait for all_reduce P(sum)->R {read}",
    ], names
    assert names[8].startswith("reduce_scatter P(sum)->S(0) ") and names[8].endswith(backward), names
    inside = {e.name: {child.name for child in e.cpu_children} for e in ranges}
    assert all(len(children) == 1 for children in inside.values())
    counted = {name: calls for name, (calls, _) in _C.comm_counts().items()}
    shown = {e.key: e.count for e in seen.key_averages()}
    assert counted == {"all_gather": 2, "all_to_all": 1, "all_reduce": 1, "reduce_scatter": 1}
    assert shown["_c10d_functional::all_gather_into_tensor"] == 2 and shown["_c10d_functional::all_to_all_single"] == 1
    assert shown["_c10d_functional::all_reduce"] == shown["_c10d_functional::reduce_scatter_tensor"] == 1 and shown["_c10d_functional::wait_tensor"] == 5
    assert [e for e in seen.events() if e.name.startswith("c10d::") and not e.cpu_parent.name.startswith("_c10d_functional::")] == []


# ---- torch's flight recorder, the one that NCCL's groups write to ----


def collectives_are_in_the_flight_recorder():
    """Each has the line of the script that made it, in order."""
    from shardtensor import Replicate, Shard
    from torch._C import _distributed_c10d as c10d

    if not hasattr(c10d, "FlightRecorderHook"):
        pytest.skip("this torch records NCCL's calls only")
    _, x = sharded()
    x.requires_grad_()
    for _ in range(2):  # the first time, ranks also agree about each kind of move
        hook = c10d.FlightRecorderHook.attach(dist.group.WORLD)
        c10d._reset_fr_trace()
        whole, gathered = x.redistribute(placements=[Replicate()]), here()
        _, exchanged = x.redistribute(placements=[Shard(1)]), here()
        total, summed = (x * 2).sum().redistribute(placements=[Replicate()]), here()
        _, backward = (whole.redistribute(placements=[Shard(1)]).sum() + total).backward(), here()
        entries = pickle.loads(c10d._dump_fr_trace())["entries"]
        hook.remove()
    lines = [next(f"at {Path(f['filename']).name}:{f['line']}" for f in e["frames"] if f["filename"] == __file__) for e in entries]
    assert list(dict.fromkeys(lines)) == [gathered, exchanged, summed, backward], (lines, gathered)
    assert [e["profiling_name"] for e, line in zip(entries, lines, strict=True) if line == exchanged] == ["gloo:all_to_all"]


# ---- CommDebugMode ----


def modules_are_charged_for_what_they_send():
    from oracle import mesh_here
    from shardtensor import _C
    from shardtensor.debug import CommDebugMode
    from shardtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    funcol = torch.ops.c10d_functional
    block = parallelize_module(Block(), mesh_here(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    mode = CommDebugMode()
    for _ in range(2):  # entered again, it counts from zero
        _C.reset_comm_counts()
        with mode:
            block(x).sum().backward()
        (calls, size) = _C.comm_counts()["all_reduce"]
        assert mode.get_comm_counts()[funcol.all_reduce] == calls == mode.get_total_counts()
        assert mode.get_comm_bytes()[funcol.all_reduce] == size
        down, up = (mode.comm_module_counts[f"Block.{name}"] for name in ("down", "up"))
        assert down["forward"][funcol.all_reduce] == 1 and down["forward"][funcol.all_reduce].bytes == 3 * 5 * ITEM
        assert up["forward"] == {} and up["backward"][funcol.all_reduce] == 1
        assert mode.comm_module_counts["Block"]["backward"][funcol.all_reduce].bytes == 3 * 6 * ITEM
    table = mode.generate_comm_debug_tracing_table(noise_level=1)
    assert "all_reduce: 1 (120 B)" in table and "aten.linear" in table and "(Shard(dim=0),)" in table
    with tempfile.TemporaryDirectory() as folder:
        mode.generate_json_dump(f"{folder}/log.json", noise_level=2)
        (root,) = json.loads(Path(folder, "log.json").read_text())["children"]
    children = {child["fqn"]: child for child in root["children"]}
    assert children["Block.down"]["bytes_forward"] == [["c10d_functional.all_reduce", 120]]
    assert children["Block.up"]["bytes_backward"] == [["c10d_functional.all_reduce", 144]]


def a_gather_is_one_and_ones_own_calls_count():
    from shardtensor import Replicate, Shard
    from shardtensor.debug import CommDebugMode

    _, x = sharded()
    with CommDebugMode() as mode:
        x.redistribute(placements=[Replicate()])  # on Gloo, a broadcast per piece
        x.redistribute(placements=[Shard(1)])
        (x * 2).sum(0)
        dist.all_reduce(torch.ones(1))
    gather, exchange = torch.ops.c10d_functional.all_gather_into_tensor, torch.ops._dtensor.shard_dim_alltoall
    assert dict(mode.get_comm_counts()) == {gather: 1, exchange: 1, torch.ops.c10d.allreduce_: 1}
    assert mode.get_comm_bytes()[gather] == x.to_local().numel() * ITEM
    with CommDebugMode() as mode:
        torch.linalg.svdvals(x)
    (svd,) = [o for o in mode.comm_module_operation_counts["Global"]["operations_list"] if "svd" in str(o["name"])]
    assert svd["collectives"] == [("all_gather", x.to_local().numel() * ITEM)]


# ---- limits ----


def what_is_implicit_is_refused():
    from shardtensor import ExplicitRedistributionContext, Replicate, Shard

    whole, x = sharded()
    columns = x.redistribute(placements=[Shard(1)])
    rank = dist.get_rank()
    with ExplicitRedistributionContext():
        (x * 2).sum(0)  # nothing moves
        x.redistribute(placements=[Replicate()])  # explicit
        with pytest.raises(RuntimeError, match=rf"(?s)aten::add.Tensor, argument '(self|other)': S\(.*on rank {rank}.*redistribute"):
            x + columns
        with ExplicitRedistributionContext(enable=False):
            x + columns
        library = torch.library.Library("shardtensor_debug", "DEF")  # torch's own ops have rules
        library.define("unknown(Tensor x) -> Tensor")
        library.impl("unknown", lambda x: x * 1, "CPU")
        with pytest.raises(RuntimeError, match="it has no sharding rule"):
            torch.ops.shardtensor_debug.unknown(x)
        library._destroy()
        with pytest.raises(RuntimeError, match="it needs whole inputs"):
            x.nonzero()
        replicated = x.redistribute(placements=[Replicate()])
        replicated + x  # only slices local data
        with ExplicitRedistributionContext(strict=True), pytest.raises(RuntimeError, match="Implicit redistribution"):
            replicated + x
        (x @ columns.detach().T.redistribute(placements=[Replicate()])).sum()
    (x + columns).full_tensor().equal(whole + whole)
    with pytest.raises(RuntimeError, match="Invalid mode"):
        ExplicitRedistributionContext(mode="forbid")


def a_halo_is_part_of_its_op():
    from shardtensor import ExplicitRedistributionContext, Shard, comm_budget, distribute_tensor

    _, x = sharded()
    image = distribute_tensor(torch.randn(1, 1, 8, 4, dtype=torch.float64), x.device_mesh, [Shard(2)]).requires_grad_()
    with ExplicitRedistributionContext(strict=True):
        with comm_budget() as spent:
            y = torch.nn.functional.avg_pool2d(image, 3, 1, 1)
        assert y.placements == (Shard(2),) and spent.calls == 1
        torch.autograd.grad(y, image, y.detach())
        with pytest.raises(RuntimeError, match=r"(?s)aten::_fft_r2c, argument 'self'.*redistribute"):
            torch.fft.fft(image, dim=2)  # its result is cut along another dim
        wide = distribute_tensor(torch.randn(1, 1, 8, 6, dtype=torch.float64), x.device_mesh, [Shard(3)])
        with pytest.raises(RuntimeError, match=r"(?s)aten::im2col, argument 'self': S\(3\).*-> S\(2\).*redistribute"):
            torch.nn.functional.unfold(wide, 3)  # rows of blocks are cut instead


def halos_are_told():
    from shardtensor import Shard, distribute_tensor
    from shardtensor.debug import halos, log_redistributions

    _, x = sharded()
    image = distribute_tensor(torch.randn(1, 1, 9, 4, dtype=torch.float64), x.device_mesh, [Shard(2)]).requires_grad_()
    rank, world = dist.get_rank(), dist.get_world_size()
    row = {r: 4 * ITEM for r in (rank - 1, rank + 1) if 0 <= r < world}
    with heard() as texts, halos() as read:
        log_redistributions()
        try:
            y = torch.nn.functional.avg_pool2d(image, 3, 1, 1)
            torch.autograd.grad(y, image, y.detach())
        finally:
            log_redistributions(False)
    forward, backward = read
    for halo, op in ((forward, "aten::avg_pool2d"), (backward, "aten::avg_pool2d_backward")):
        assert halo.op.startswith(op) and halo.source == image._layout and halo.shape == (1, 1, 9, 4)
        assert halo.sent == halo.received == row
    with halos() as read:
        torch.nn.functional.avg_pool2d(image, (1, 2))  # reads no other rank's rows
    assert not read
    assert len(texts) == 2 and f"sends {4 * ITEM} bytes to rank" in texts[0], texts


def what_is_implicit_is_refused_backward():
    from shardtensor import ExplicitRedistributionContext, Replicate, Shard, ShardTensor

    _, x = sharded()
    local = torch.ones(7, 4, dtype=torch.float64, requires_grad=True)
    whole = ShardTensor.from_local(local, x.device_mesh, [Replicate()])
    loss = whole.redistribute(placements=[Shard(0)]).square().sum()
    with ExplicitRedistributionContext():
        loss.backward()  # the backward of an explicit redistribution
    y = (whole * x).sum()
    with ExplicitRedistributionContext(), pytest.raises(RuntimeError, match="from_local, argument 'gradient'"):
        y.backward()


def what_is_implicit_is_warned_of():
    from shardtensor import ExplicitRedistributionContext, Shard

    whole, x = sharded()
    columns = x.redistribute(placements=[Shard(1)])
    with heard() as texts, ExplicitRedistributionContext(mode="warn"):
        assert (x + columns).full_tensor().equal(2 * whole)
    assert len(texts) == 1 and "aten::add.Tensor" in texts[0]


def budgets_hold_on_all_ranks():
    from shardtensor import Replicate, Shard, comm_budget

    whole, x = sharded(cut=(6, 1) if dist.get_world_size() == 2 else (5, 1, 1))
    largest = max(n for n in (6, 5) if n == x._spec.sharding_shapes()[0][0][0]) * 4 * ITEM
    with comm_budget(calls=2, bytes=10**6) as spent:
        x.full_tensor()
        x.redistribute(placements=[Shard(1)])
        assert spent.calls == 2 and spent.bytes >= largest
        with pytest.raises(dist.DistError, match=r"3 calls, but the budget is 2 calls[\s\S]*aten::_linalg_svd"):
            torch.linalg.svdvals(x)
    with comm_budget(bytes=largest) as spent:
        assert x.full_tensor().equal(whole)
        assert spent.bytes == largest
    # Only the first rank would exceed the budget, but all ranks raise.
    with comm_budget(bytes=largest - 1), pytest.raises(dist.DistError, match=rf"budget is {largest - 1} bytes.*redistribute: from S\(0\)"):
        x.redistribute(placements=[Replicate()])
    with comm_budget(calls=0):
        (x * 2).sum(1)
        with pytest.raises(dist.DistError, match="budget is 0 calls"):
            torch.softmax(x, 0)
    assert x.full_tensor().equal(whole)
    with pytest.raises(ValueError, match="comm_budget: argument 'calls' is -1"):
        comm_budget(calls=-1)


# ---- log ----


@contextlib.contextmanager
def heard():
    texts = []

    class Ear(logging.Handler):
        def emit(self, record):
            texts.append(record.getMessage())

    log, ear = logging.getLogger("shardtensor"), Ear()
    level = log.level
    log.addHandler(ear)
    log.setLevel(logging.INFO)
    try:
        yield texts
    finally:
        log.removeHandler(ear)
        log.setLevel(level)


def redistributions_are_logged():
    from shardtensor import Shard
    from shardtensor.debug import log_redistributions

    _, x = sharded()
    columns = x.redistribute(placements=[Shard(1)])
    with heard() as texts:
        log_redistributions()
        try:
            x + columns
            x.redistribute(placements=[Shard(1)])
        finally:
            log_redistributions(False)
        x - columns
    assert len(texts) == 1, texts
    assert "aten::add.Tensor, argument" in texts[0] and "its rule requires this layout" in texts[0] and "224 bytes" in texts[0]


LOGGED = """
import torch, torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
import shardtensor as st
mesh = st.init_device_mesh("cpu", (2,))
x = st.ShardTensor.from_local(torch.ones(3, 4), mesh, [st.Shard(0)])
x + x.redistribute(placements=[st.Shard(1)])
"""


@pytest.mark.parametrize("names", ["shardtensor", "+shardtensor,dynamo", "dynamo"])
def test_torch_logs(names):
    environment = os.environ | {"TORCH_LOGS": names, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", LOGGED], capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    assert ("redistributed for aten::add.Tensor" in done.stderr) == ("shardtensor" in names), done.stderr


# ---- gathers ----


def line_of(function):
    """Where the function's first statement is: "file:line"."""
    return f"{__file__}:{function.__code__.co_firstlineno + 1}"


def gathers_are_told_once():
    from shardtensor import Partial, Replicate, Shard, ShardTensor, strict_mode
    from shardtensor.debug import _watch, log_gathers

    first = dist.get_rank() == 0
    whole, x = sharded()
    replicated = x.redistribute(placements=[Replicate()])
    summands = ShardTensor.from_local(whole, x.device_mesh, [Partial()])
    library = torch.library.Library("shardtensor_told", "DEF")
    library.define("unknown(Tensor x, Tensor y) -> Tensor")
    library.impl("unknown", lambda x, y: x * 1, "CPU")

    def unknown(x, y):
        return torch.ops.shardtensor_told.unknown(x, y)

    try:
        with heard() as texts:
            log_gathers()
            x.nonzero()
            size = "shape (7, 4), 224 B"
            start = f"aten::nonzero at {__file__}:{sys._getframe().f_lineno - 2} gathers its argument 'self', {size}, from S(0)"
            assert [t.startswith(start) for t in texts] == [True] * first, texts
            assert all("the op needs it whole. Redistribute it to Replicate() once" in t and "by rank 0;" in t for t in texts)
            # Known calls, other sizes, and what has forgotten the call's solution.
            for other in (x, sharded(rows=8)[1]):
                other.nonzero()
            with strict_mode(False):
                x.nonzero()
            for _ in range(2):
                x.nonzero()
            assert len(texts) == first
            assert _watch.moves._listeners == []  # a known call has no extra cost
            texts.clear()
            x.redistribute(placements=[Shard(1)]).nonzero()
            assert [" from S(1) " in t for t in texts] == [True] * first
            texts.clear()
            with strict_mode():
                unknown(replicated, summands)  # added up, not gathered
            unknown(x, replicated)
            unknown(x, x)
            assert [("argument 'x'" in t, "argument 'y'" in t) for t in texts] == [(True, False), (False, True)] * first, texts
            assert all(t.startswith(f"shardtensor_told::unknown at {line_of(unknown)} ") and "register_sharding" in t for t in texts)
            texts.clear()
            x + x.redistribute(placements=[Shard(1)])  # not a gather
            assert not texts and _watch.moves._listeners == []
            log_gathers()  # it warns again of the same operands
            x.nonzero()
            assert len(texts) == first
    finally:
        log_gathers("off")
        library._destroy()


def gathers_are_told_as_often_as_asked():
    from shardtensor.debug import _watch, log_gathers

    first = dist.get_rank() == 0
    flat = sharded(columns=1)[1].view(7)
    try:
        with heard() as texts:
            log_gathers("every")
            for _ in range(3):
                flat.sort()
            assert ["aten::sort" in t and "no other layout that the op takes costs less" in t for t in texts] == [True] * 3 * first, texts
            texts.clear()
            log_gathers("once", all_ranks=True)
            for _ in range(3):
                flat.nonzero()
                flat.sort()
            assert [f"by rank {dist.get_rank()};" in t for t in texts] == [True, True]
            texts.clear()
            log_gathers("off")
            flat.bool().nonzero()
            assert not texts and _watch.moves._listeners == []
            with pytest.raises(ValueError, match="argument 'often' is 'always'; use one of off, once, every"):
                log_gathers("always")
    finally:
        log_gathers("off")


def attention_tells_of_gathered_keys():
    from shardtensor.debug import _watch, log_gathers

    attention = torch.nn.functional.scaled_dot_product_attention
    first = dist.get_rank() == 0
    q, k = (sharded(rows=rows)[1].view(1, 1, rows, 4) for rows in (40, 6))
    try:
        with heard() as texts:
            log_gathers()
            for _ in range(2):
                attention(q, k, k)
            said = [f"gathers its argument '{name}', shape (1, 1, 6, 4), 192 B, from S(2)" for name in ("key", "value")]
            assert [s in t for s, t in zip(said, texts, strict=True)] == [True] * 2 if first else not texts, texts
            assert all(t.startswith("aten::scaled_dot_product_attention at ") and "would cost more" in t for t in texts)
            (q + q.redistribute(placements=k.placements)).sum()
            attention(q, k, k)
            assert len(texts) == 2 * first
            texts.clear()
            log_gathers()  # it warns again of the same operands
            torch._dynamo.reset()
            torch.compile(attention, backend="aot_eager", fullgraph=True, dynamic=False)(q, k, k)
            assert ["would cost more" in t for t in texts] == [True] * 2 * first, texts
            texts.clear()
            flat = q[0]  # of symbols, and not of the dims that a ring takes
            torch.compile(attention, backend="aot_eager", fullgraph=True, dynamic=True)(flat, flat * 2, flat)
            assert ["its pieces cannot be sent round the ranks" in t for t in texts] == [True] * 2 * first, texts
            q.redistribute(placements=[torch.distributed.tensor.Replicate()]) + q  # ends the listening
            assert _watch.moves._listeners == []
    finally:
        log_gathers("off")


def gathers_in_a_graph():
    from shardtensor.debug import log_gathers

    whole, x = sharded()

    def function(x):
        return torch.block_diag(x * 2, x).sum()

    try:
        with heard() as texts:
            log_gathers()
            torch._dynamo.reset()
            compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
            for _ in range(2):
                assert compiled(x).full_tensor() == 3 * whole.sum()
        assert [t.startswith(f"aten::block_diag at {line_of(function)} ") for t in texts] == [True] * (dist.get_rank() == 0), texts
    finally:
        log_gathers("off")


GATHERS = LOGGED + """
for _ in range(2):
    x.nonzero()
    x.flatten().sort()
"""


def test_gathers_by_environment():
    told = {None: 2, "": 2, "once": 2, "ONCE,all_ranks": 2, "off": 0, "every": 4, "always": "use off, once or every"}
    runs = run_each(GATHERS, [Run(environment={"SHARDTENSOR_GATHERS": often}) for often in told])
    for says, run in zip(told.values(), runs, strict=True):
        if isinstance(says, str):
            assert run.returncode == 1 and says in run.stderr.splitlines()[-1]
        else:
            assert run.returncode == 0 and run.stderr.count(" gathers its argument ") == says, run.stderr


# ---- pictures ----


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "what",
    [
        "collectives_are_profiled",
        "collectives_are_in_the_flight_recorder",
        "modules_are_charged_for_what_they_send",
        "a_gather_is_one_and_ones_own_calls_count",
        "what_is_implicit_is_refused",
        "a_halo_is_part_of_its_op",
        "halos_are_told",
        "what_is_implicit_is_refused_backward",
        "what_is_implicit_is_warned_of",
        "budgets_hold_on_all_ranks",
        "redistributions_are_logged",
        "gathers_are_told_once",
        "gathers_are_told_as_often_as_asked",
        "attention_tells_of_gathered_keys",
        "gathers_in_a_graph",
    ],
)
def test_communication(pools, what, world):
    pools(world).run(globals()[what])


@on_ranks(3)
def test_pictures():
    from oracle import place
    from shardtensor import init_device_mesh
    from shardtensor.debug import draw_sharding, visualize_sharding

    first = dist.get_rank() == 0
    _, x = sharded(cut=(4, 0, 3))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        visualize_sharding(x)
    lines = ["(7, 4), S(0)[4,0,3] on cpu mesh (3)", "         Col 0-3", "Row 0-3  cpu:0", "Row 4-6  cpu:2", "nothing on cpu:1"]
    assert out.getvalue().splitlines() == (lines if first else [])
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder, "x.svg")
        draw_sharding(x, picture)
        assert picture.exists() == first
        if first:
            heights = [float(r.get("height")) for r in ET.parse(picture).iter("{http://www.w3.org/2000/svg}rect")]
            assert heights[0] / heights[1] == pytest.approx(4 / 3, 0.01)
    cube = place(torch.zeros(2, 5, 3), init_device_mesh("cpu", (3,)), ("S(2)",), "even")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        visualize_sharding(cube, header="the cube")
    assert out.getvalue().startswith("the cube, dims 0 and 2\n         Col 0-0  Col 1-1  Col 2-2\n") == first
