"""torch.compile's caches in a folder that ranks share. When a job starts again, every rank finds its graphs of AOTAutograd and
inductor. It never gets a graph of another rank, other cuts, another process group, or code that has changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from oracle import UNEVEN, mesh_here, place
from pool import on_ranks
from shardtensor import ShardTensor

pytestmark = pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.12 and newer compile functions of ShardTensors")

# For each of the settings that it is given, a rank prints what it found in the caches.
RANK = """
import json, sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.utils import counters

rank, store, settings = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
import shardtensor as st

usual = st.init_device_mesh("cpu", (2,))
meshes = {"usual": usual, "other group": st.DeviceMesh.from_group(dist.new_group(), "cpu")}
weight = torch.ones(6, 4) + torch.eye(6, 4)


def moved(x):
    w = st.distribute_tensor(weight, x.device_mesh, [st.Replicate()], src_data_rank=None)
    return F.dropout(x @ w, 0.5).redistribute(placements=[st.Replicate()]).sum(0)


def made(x):  # of a plain tensor
    return st.ShardTensor.from_local(x, usual, [st.Shard(0)], sharding_shapes={0: [(5, 6), (2, 6)]}).exp()


def run(name, function, rows, mesh):
    torch.manual_seed(0)
    whole, cuts = torch.randn(sum(rows), 6), {0: [(n, 6) for n in rows]}
    x = st.distribute_tensor(whole, mesh, [st.Shard(0)], src_data_rank=None, sharding_shapes=cuts)
    x = (x.to_local() if name == "made" else x).requires_grad_()
    out = function(x)
    out.square().sum().full_tensor().backward()
    return [t.full_tensor() if isinstance(t, st.ShardTensor) else t for t in (out.detach(), x.grad)]


for name, rows, mesh in settings:
    counters.clear()
    torch._dynamo.reset()
    function = {"moved": moved, "made": made}[name]
    got = run(name, torch.compile(function, fullgraph=True), rows, meshes[mesh])
    torch.testing.assert_close(got, run(name, function, rows, meshes[mesh]))
    found = [counters["aot_autograd"][f"autograd_cache_{k}"] for k in ("hit", "miss", "bypass")]
    print(json.dumps(found + [counters["inductor"][f"fxgraph_cache_{k}"] for k in ("hit", "miss", "bypass")]), flush=True)
dist.destroy_process_group()
"""
HIT, MISS = [1, 0, 0, 2, 0, 0], [0, 1, 0, 0, 2, 0]  # forward and backward are two graphs to inductor


def start(folder, number, settings):
    """Runs a job on two ranks and returns what each printed."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    arguments = str(folder / f"store{number}"), json.dumps(settings)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(errors[-3000:] for _, errors in told)
    return [[json.loads(line) for line in out.splitlines()] for out, _ in told]


@pytest.mark.timeout(220)
def test_the_second_start_finds_every_ranks_graphs(tmp_path):
    usual = [("moved", [5, 2], "usual"), ("moved", [7, 0], "usual"), ("moved", [4, 4], "usual"), ("made", [5, 2], "usual")]
    assert start(tmp_path, 1, usual) == [[MISS] * 4] * 2
    # With the cuts swapped, rank 1 holds what rank 0 held before. In another process group, calls use another group name.
    others = [("moved", [2, 5], "usual"), ("moved", [5, 2], "other group")]
    found = start(tmp_path, 2, usual + others)
    assert [rank[:4] for rank in found] == [[HIT] * 4] * 2
    assert [[setting[:3] for setting in rank[4:]] for rank in found] == [[MISS[:3]] * 2] * 2


@on_ranks(2)
def test_handlers():
    """User code in place of an op: a graph cached without it is not used, and a graph with it is not cached."""
    whole = torch.arange(42.0).reshape(7, 6)
    x = place(whole, mesh_here(), ("S(0)",), UNEVEN)

    def compiled():
        torch._dynamo.reset()
        return torch.compile(lambda x: x.sin(), fullgraph=True)(x).full_tensor()

    for _ in range(2):
        torch.testing.assert_close(compiled(), whole.sin())
        ShardTensor.register_dispatch_handler(torch.ops.aten.sin.default, lambda t: t * 3)
        try:
            torch.testing.assert_close(compiled(), whole * 3)
        finally:
            ShardTensor.unregister_handler(torch.ops.aten.sin.default)
