"""Scripts that know only torch.distributed.tensor get ShardTensors."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import shardtensor
import torch
import torch.distributed.tensor as stock
from forks import Run, run_each
from oracle import mesh_here
from pool import on_ranks
from test_fsdp import needs_uneven_columns
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STOCK_NAMES = ["distribute_tensor", "zeros", "randn"]


def fsdp_stores_ours(world_mesh, options):
    """FSDP2's parameters, gradients and optimizer states are ShardTensors, and it trains as one process does."""
    from test_fsdp import columns, train
    from test_parallel import MLP

    if options.pop("columns", False):
        options |= columns()
    with shardtensor.replace_dtensor():
        names = ("replicate", "shard")[-len(world_mesh) :]
        mesh = init_device_mesh("cpu", world_mesh, mesh_dim_names=names)
        plain = nn.Sequential(MLP(7), nn.LayerNorm(5, dtype=torch.float64))
        ours = copy.deepcopy(plain)
        fully_shard(ours[0], mesh=mesh, **options)
        fully_shard(ours, mesh=mesh, **options)
        assert {type(p.data) for p in ours.parameters()} == {shardtensor.ShardTensor}
        train(ours, plain, torch.randn(4, 4, 6, dtype=torch.float64))
        loss = ours(torch.randn(4, 6, dtype=torch.float64)).sum()
        loss.backward()
        assert {type(p.grad) for p in ours.parameters()} == {shardtensor.ShardTensor}
        state = copy.deepcopy(ours.state_dict())
        ours.load_state_dict(state)
        for name, value in state.items():
            torch.testing.assert_close(dict(ours.named_parameters())[name].full_tensor(), value.full_tensor())


@on_ranks(2)
def test_names():
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor  # imported before the replacement
    from torch.distributed.tensor._utils import ExplicitRedistributionContext

    here = sys.modules[__name__]
    here.distribute_tensor = distribute_tensor
    mesh, whole = mesh_here(), torch.arange(10.0).view(5, 2)
    before = {name: getattr(stock, name) for name in STOCK_NAMES}
    with shardtensor.replace_dtensor():
        for x in (
            here.distribute_tensor(whole, mesh, [Shard(0)]),
            stock.distribute_tensor(whole, mesh, [Shard(1)]),
            DTensor.from_local(whole, mesh, [Shard(0)]),
            stock.zeros(5, 2, device_mesh=mesh, placements=[Shard(0)]),
            DTensor(whole.clone(), distribute_tensor(whole, mesh, [stock.Replicate()])._spec),
        ):
            assert type(x) is shardtensor.ShardTensor and isinstance(x, DTensor)
        from torch.distributed.tensor.debug import CommDebugMode
        from torch.distributed.tensor.parallel import ColwiseParallel

        assert CommDebugMode is shardtensor.debug.CommDebugMode
        assert ColwiseParallel is shardtensor.parallel.ColwiseParallel
        assert stock._utils.ExplicitRedistributionContext is shardtensor.ExplicitRedistributionContext
    assert {name: getattr(stock, name) for name in STOCK_NAMES} == before
    assert type(here.distribute_tensor(whole, mesh, [Shard(0)])) is DTensor
    assert type(DTensor.from_local(whole, mesh, [Shard(0)])) is DTensor
    assert stock._utils.ExplicitRedistributionContext is ExplicitRedistributionContext


@pytest.mark.parametrize("world_mesh", [(2,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("options", [{}, dict(reshard_after_forward=False), dict(columns=True)], ids=["usual", "kept", "columns"])
def test_fsdp(pools, world_mesh, options):
    if "columns" in options:
        needs_uneven_columns()
    pools(torch.Size(world_mesh).numel()).run(fsdp_stores_ours, world_mesh, options)


SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
x = torch.randn(5, 4)
for _ in range(3):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
made = {type(p.data).__name__ for p in model.parameters()} | {type(distribute_tensor(x, mesh, [Shard(0), Shard(0)])).__name__}
if dist.get_rank() == 0:
    print(sys.argv[1:], *sorted(made), f"{loss.item():.6f}", isinstance(next(model.parameters()), DTensor))
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # stock torch's threads, too, abort a process now and then while it ends
"""


@pytest.mark.timeout(300)
def test_unmodified_script(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29533"]
    package = _package()
    environment = os.environ | {"PYTHONPATH": package, "OMP_NUM_THREADS": "1"}
    said = {}
    for name, how in {"stock": [], "ours": ["-m", "shardtensor"]}.items():
        done = subprocess.run(
            [*torchrun, *how, str(script), "--epochs", "3"],
            capture_output=True, text=True, timeout=110, env=environment, cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        said[name] = done.stdout.strip().splitlines()[-1]
    assert said["stock"].startswith("['--epochs', '3'] DTensor ") and said["stock"].endswith(" True")
    assert said["ours"] == said["stock"].replace("DTensor", "ShardTensor")


def _package() -> str:
    return str(Path(shardtensor.__file__).parents[1])


def test_module_and_usage(tmp_path):
    (tmp_path / "which.py").write_text(
        "import sys\nfrom torch.distributed.tensor import DTensor\nprint(sys.argv[1:], DTensor.from_local.__module__, __name__)\n"
    )
    done = _run_by_name(tmp_path, "-m", "which", "-x")
    assert done.stdout.strip() == "['-x'] shardtensor.tensor._tensor __main__", done.stderr
    done = _run_by_name(tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("usage: python -m shardtensor [-m] script")


def _run_by_name(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "shardtensor", *arguments],
        capture_output=True, text=True, timeout=100, cwd=folder, env=os.environ | {"PYTHONPATH": _package()},
    )


NOTHING = [
    (["nofile.py"], "there is no script 'nofile.py' to run, in {}"),
    (["empty"], "there is no script 'empty' to run, in {}"),
    (["-m", "nomodule"], "there is no module 'nomodule' to run, in {} or installed"),
    (["-m", "empty.nomodule"], "there is no module 'empty.nomodule' to run, in {} or installed"),
    (["-m", "empty"], "there is no module 'empty' to run, in {} or installed"),
]


def test_nothing_to_run(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "__init__.py").touch()
    runs = run_each("from shardtensor.__main__ import main; main()", [Run(what) for what, _ in NOTHING], tmp_path)
    for (_, says), run in zip(NOTHING, runs, strict=True):
        assert run.returncode == 2
        assert run.stderr.strip() == f"python -m shardtensor: {says.format(tmp_path)}"


def test_a_missing_import_is_not_a_missing_module(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import not_there")
    (tmp_path / "package" / "train.py").touch()
    done = _run_by_name(tmp_path, "-m", "package.train")
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'not_there'"
