"""Communication is counted, refused, budgeted, logged and drawn."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
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


# ---- pictures ----


def shardings_are_shown():
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


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "what",
    [
        "modules_are_charged_for_what_they_send",
        "a_gather_is_one_and_ones_own_calls_count",
        "what_is_implicit_is_refused",
        "what_is_implicit_is_refused_backward",
        "what_is_implicit_is_warned_of",
        "budgets_hold_on_all_ranks",
        "redistributions_are_logged",
    ],
)
def test_communication(pools, what, world):
    pools(world).run(f"{__name__}:{what}")


def test_pictures(pools):
    pools(3).run(f"{__name__}:shardings_are_shown")
